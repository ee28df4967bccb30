"""How a judge and a pool of judges start and end: where they refuse to, and what is left of them, also of a killed one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from judge_harness import (
    GOOD,
    LEVELS,
    ROOT,
    SUITES,
    descendants_of,
    fenced,
    is_alive,
    judge_at,
    program_of,
    short,
    suite_of,
)

from common.errors import ConfigError
from protocol.verdicts import Verdict
from services.reward.config import RewardConfig
from services.reward.judge import Judge
from services.reward.pool import JudgePool


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's judges have their folders: other judges of this machine use another place."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # so that it is looked up again
    return tmp_path


def test_a_judge_that_was_closed_leaves_no_process_or_folder(temp: Path) -> None:
    for level in LEVELS:
        with judge_at(level) as judge:
            for kind in ("remote", "stdin"):
                judge.judge(program_of(kind, GOOD), suite_of(kind))
            pids = [pid for worker in judge.lab._workers.values() for pid in (worker.pid, *descendants_of(worker.pid))]
            assert bool(list(temp.glob("forebay-box-*"))) == (level == "landlock")
        judge.close()
        assert len(pids) >= 3
        assert not any(map(is_alive, pids))
        assert not list(temp.iterdir())


def test_a_closed_pool_gives_infra_errors() -> None:
    pool = JudgePool(RewardConfig(workers=1))
    pool.start()
    assert pool.judge(fenced(GOOD), suite_of("call")).verdict is Verdict.ACCEPTED
    pool.close()
    assert pool.judge(fenced(GOOD), suite_of("call")).verdict is Verdict.INFRA_ERROR
    pool.close()


_OWNER = """
import sys, threading, time
from services.reward.config import RewardConfig
from services.reward.pool import JudgePool
from protocol.suites import parse_suite
pool = JudgePool(RewardConfig(workers=2), levels=(sys.argv[1],))
pool.start()
busy = "```python\\nimport time\\ndef f():\\n    time.sleep(60)\\n```"
pool.submit(busy, parse_suite({"kind": "asserts", "entry_point": "f", "code": "assert f()", "limits": {"wall_s": 100}}))
time.sleep(0.3)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("level", LEVELS)
def test_a_killed_node_leaves_no_process_and_no_folder(level: str, temp: Path) -> None:
    with judge_at(level):
        pass
    owner = subprocess.Popen([sys.executable, "-c", _OWNER, level], cwd=ROOT, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"ready\n"
    pids = descendants_of(owner.pid)
    assert len(pids) >= 4
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if is_alive(pid)]
    assert not list(temp.iterdir())


def test_without_isolation_the_judge_refuses_unless_told_to_be_unsafe() -> None:
    with pytest.raises(ConfigError, match="unsafe"):
        Judge(RewardConfig(), levels=()).start()
    judge = Judge(RewardConfig(unsafe=True), levels=())
    judge.start()
    try:
        for kind in SUITES:
            result = judge.judge(program_of(kind, GOOD), suite_of(kind))
            assert short(result) == "AC", result
            assert result.isolation.startswith("none")
            assert short(judge.judge(program_of(kind, "def f(a, b): return 0"), suite_of(kind))) == "WA"
        assert (
            short(judge.judge(program_of("stdin", "while True: pass"), suite_of("stdin", limits={"cpu_s": 0.1})))
            == "TLE"
        )
    finally:
        judge.close()


def test_a_missing_interpreter_is_said_at_start() -> None:
    with pytest.raises(ConfigError, match="no/such/python"):
        Judge(RewardConfig(python="/no/such/python")).start()
    with pytest.raises(ConfigError, match="no/such/python"):
        JudgePool(RewardConfig(python="/no/such/python", workers=1)).start()


def test_it_works_without_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("the whole file runs without root already")
    if not os.access("/usr/bin/python3", os.X_OK):
        pytest.skip("needs an interpreter that every user may read: /usr/bin/python3")
    script = (
        "import os\nfrom services.reward.judge import Judge\nfrom services.reward.config import RewardConfig\nfrom protocol.suites import parse_suite\n"
        "suite = parse_suite({'kind': 'asserts', 'entry_point': 'f', 'code': 'assert f(1) == 1'})\n"
        "from services.reward.sandbox.filters import filters\nfilters()  # imports what nobody could\n"
        "judges = [Judge(RewardConfig(python='/usr/bin/python3'), levels=(level,)) for level in ('namespaces', 'landlock')]\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "for judge in judges:\n    judge.start()\n"
        "    print(judge.isolation, judge.judge('```python\\ndef f(x): return x\\n```', suite).verdict)\n    judge.close()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if "seccomp" in line and "isolation=" not in line]
    assert [line.split()[-1] for line in lines] == ["accepted", "accepted"], (done.stdout, done.stderr)
    assert lines[0].startswith("namespaces+")
