"""A short soak run, and what came out of long ones."""

from __future__ import annotations

import subprocess
import sys

import pytest
from judge_harness import ROOT

from protocol.suites import parse_suite
from protocol.verdicts import Verdict
from services.reward.config import RewardConfig
from services.reward.judge import Judge


def test_600_jobs_with_hostile_ones_among_them_get_their_verdicts_and_leave_nothing() -> None:
    command = [sys.executable, "-m", "bench.soak", "--jobs", "600", "--hostile", "0.05", "--workers", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)  # for what never ends
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "problems: 0" in done.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import threading, time\ndef late(): time.sleep(0.05); print('done')\nthreading.Thread(target=late).start()",
        "import threading\nprint('done' if threading.main_thread().is_alive() else 'dead')",
        "import atexit\natexit.register(print, 'done')",
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(16) as pool:\n    list(pool.map(lambda i: bytearray(10**6), range(64)))\nprint('done')",
        "import asyncio, time\nasync def main():\n    await asyncio.to_thread(time.sleep, 0.01)\n    print('done')\nasyncio.run(main())",
        "import weakref\nclass A: pass\na = A()\nweakref.finalize(a, print, 'done')",
        "import multiprocessing.dummy\nwith multiprocessing.dummy.Pool(3) as pool: pool.map(str, range(9))\nprint('done')",
    ],
)  # fmt: skip
def test_threads_and_exit_functions_work_as_in_an_interpreter_of_its_own(code: str, judge: Judge) -> None:
    """Once the worker had run an interpreter's end itself: then no thread was joined, and no pool of threads could be imported."""
    suite = parse_suite({"kind": "stdin", "cases": [{"output": "done"}]})
    for _ in range(3):
        result = judge.judge_code(code, suite)
        assert result.verdict is Verdict.ACCEPTED, result


@pytest.fixture(scope="module")
def judge():
    judge = Judge(RewardConfig(workers=1))
    judge.start()
    yield judge
    judge.close()
