"""Public bug reports of other judges, as tests of ours: SANDBOX 3.3 and 3.4 (and B84), by number: limits; processes, leaks, and load.

As in ``test_reports.py``: each line stands for a kind of bug, so each has variations.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from judge_harness import (
    GOOD,
    OVERSHOOT_S,
    ROOT,
    SUITES,
    call_suite,
    children_of,
    descendants_of,
    fenced,
    function,
    is_alive,
    judge_at,
    program,
    program_of,
    short,
    stdin_suite,
    suite_of,
)

from protocol.suites import parse_suite
from protocol.verdicts import JudgeResult, Verdict
from services.reward.config import RewardConfig
from services.reward.judge import Judge
from services.reward.pool import JudgePool
from tests.polling import block_until

NUM_WORKERS = 2


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with judge_at("namespaces") as judge:
        yield judge


@pytest.fixture(scope="module")
def temp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The judges' folder for temporary files: other judges of this machine use another."""
    path = tmp_path_factory.mktemp("judges")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(path))
        yield path


@pytest.fixture(scope="module")
def pool(temp: Path) -> Iterator[JudgePool]:
    with judge_at("namespaces"):  # skips where that does not work
        pool = JudgePool(RewardConfig(workers=NUM_WORKERS, cache_size=0))
    pool.start()
    yield pool
    pool.close()
    assert list(temp.iterdir()) == []


def unique(code: str, number: int) -> str:
    """The same program, and another text: no verdict is shared with it."""
    return f"# {number}\n{code}"


# --- 3.3 limits and time ---

_BURN = "import time\nstart = time.process_time()\nwhile time.process_time() < start + {}: pass\n"


def test_b41_b43_short_cpu_limits_hold_under_load(pool: JudgePool) -> None:
    """B41: 30 ms of CPU under a limit of 80 ms, 64 at once beside four processes that burn, some of which wait for a CPU for seconds;
    B43: a start costs nothing."""
    suite = stdin_suite((None, "1"), limits={"cpu_s": 0.08, "wall_s": 0.5})
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        working = [pool.submit(fenced(unique(_BURN.format(0.03) + "print(1)", n)), suite) for n in range(64)]
        starting = [
            pool.submit(
                fenced(unique("import json, re, collections, random, decimal\nprint(1)", n)),
                stdin_suite((None, "1"), limits={"cpu_s": 0.05}),
            )
            for n in range(32)
        ]
        verdicts = [short(future.result()) for future in working + starting]
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert verdicts == ["AC"] * 96


def test_b42_sleeping_costs_no_cpu_and_burning_does(judge: Judge) -> None:
    limits = {"cpu_s": 0.2, "wall_s": 2.0}
    assert program(judge, "import time\ntime.sleep(0.3)\nprint(1)", None, "1", limits=limits) == "AC"
    result = judge.judge(fenced(_BURN.format(0.5) + "print(1)"), stdin_suite((None, "1"), limits=limits))
    assert short(result) == "TLE"
    assert 0.15 < result.cpu_s < 0.2 + OVERSHOOT_S
    assert "cpu" in result.message
    result = judge.judge(
        fenced("import time\ntime.sleep(9)"), stdin_suite((None, "1"), limits={"cpu_s": 0.2, "wall_s": 0.3})
    )
    assert (short(result), "wall" in result.message) == ("TLE", True)


@pytest.mark.parametrize(
    "expression",
    ["max(itertools.product(range(9), repeat=12))", "sum(range(10**12))", "sorted(itertools.repeat(1))", "list(range(10**7)).count('x' * 10) or pow(7, 10**9)", "re.match('(a|a)*$', 'a' * 60 + 'b')"],
)  # fmt: skip
def test_b44_a_call_into_c_ends_at_the_limit(judge: Judge, expression: str) -> None:
    for kind in ("call", "stdin"):
        code = f"import itertools, re\ndef f(a, b): return {expression}"
        result = judge.judge(program_of(kind, code), suite_of(kind, limits={"cpu_s": 0.2, "memory_mib": 1024}))
        assert short(result) == "TLE", result
        assert result.cpu_s < 0.2 + OVERSHOOT_S


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf"), "fast", [], 10**9])
@pytest.mark.parametrize("name", ["cpu_s", "wall_s", "memory_mib", "output_kib", "processes", "stack_mib"])
def test_b45_a_limit_that_is_none_is_refused(name: str, limit: Any) -> None:
    with pytest.raises(ValueError, match=f"limits.{name}|NaN"):
        parse_suite(SUITES["call"] | {"limits": {name: limit}})


def test_b45_limits_hold_and_there_are_defaults(judge: Judge) -> None:
    loop = fenced("def f(a, b):\n    while True: pass")
    for limits in ({"cpu_s": 0.1}, {"cpu_s": "0.1"}, {"cpu_s": 5, "wall_s": 0.2}):
        assert short(judge.judge(loop, parse_suite(SUITES["call"] | {"limits": limits}))) == "TLE"
    assert parse_suite(SUITES["call"]).limits.cpu_s == 2.0  # B48 waits for it
    with pytest.raises(ValueError, match="limits"):
        parse_suite(SUITES["call"] | {"limits": {"timeout": 1}})  # an unknown name is no limit


def test_b46_what_the_judge_has_in_memory_is_none_of_the_candidates(judge: Judge) -> None:
    ballast = bytearray(1 << 30)
    ballast[:: 1 << 12] = b"x" * len(range(0, len(ballast), 1 << 12))
    fresh = Judge(RewardConfig(), levels=("namespaces",))
    fresh.start()
    try:
        result = fresh.judge(fenced("print(1)"), stdin_suite((None, "1"), limits={"memory_mib": 64}))
        assert short(result) == "AC", result
        assert result.memory_mib < 64
    finally:
        fresh.close()
        del ballast


def test_b47_a_service_that_is_limited_itself_still_judges() -> None:
    script = (
        "import sys\nfrom services.reward.judge import Judge\nfrom services.reward.config import RewardConfig\nfrom protocol.suites import parse_suite\n"
        "judge = Judge(RewardConfig(), levels=(sys.argv[1],)); judge.start()\n"
        "suite = parse_suite({'kind': 'stdin', 'cases': [{'input': '', 'output': '1'}], 'limits': {'stack_mib': 512}})\n"
        "print('verdict', judge.judge('```python\\nprint(1)\\n```', suite).verdict); judge.close()"
    )
    for level in ("namespaces", "landlock"):
        command = f'ulimit -s 8192 && ulimit -n 128 && ulimit -f 1000000 && exec {sys.executable} -c "$1" {level}'
        done = subprocess.run(
            ["bash", "-c", command, "bash", script], cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert "verdict accepted" in done.stdout, (done.stdout, done.stderr)


def test_b48_there_are_limits_without_being_asked_for(judge: Judge) -> None:
    assert function(judge, "def f():\n    while True: pass", ([], 1)) == "TLE"
    assert function(judge, "def f():\n    x = [0] * 10**11", ([], 1)) == "MLE"
    assert program(judge, "while True: print('x' * 10**5)", None, "1") == "OLE"


def test_b50_b57_the_exit_status_is_reported(judge: Judge) -> None:
    for code, words in (
        ("raise SystemExit(3)", "code 3"),
        ("import os; os._exit(255)", "code 255"),
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("import os; os.kill(os.getpid(), 15)", "signal 15"),
        ("import os; os.abort()", "signal 6"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
        ("raise ValueError('no')", "ValueError: no"),
    ):
        result = judge.judge(fenced(code), stdin_suite((None, "1")))
        assert (short(result), words in result.message) == ("RE", True), result
    for code, words in (
        ("os.abort()", "signal 6"),
        ("os.kill(os.getpid(), 11)", "signal 11"),
        ("os._exit(4)", "code 4"),
    ):
        result = judge.judge(fenced(f"import os\ndef f(): {code}"), call_suite(([], 1)))
        assert (short(result), words in result.message) == ("RE", True), result


def test_b51_a_missing_toolchain_is_no_compile_error(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    bare = Judge(RewardConfig(), levels=("namespaces",))
    bare.start()
    try:
        for language in ("cpp", "javascript"):
            result = bare.judge(
                fenced("console.log(1); // int main() {}", language), stdin_suite((None, "1"), language=language)
            )
            assert (short(result), result.reward, result.repeatable) == ("IE", None, True)
            assert "toolchain" in result.message
        assert program(bare, "print(1)", None, "1") == "AC"
    finally:
        bare.close()


def test_b53_a_hundred_files_may_be_open(judge: Judge) -> None:
    assert program(judge, "files = [open(f'{n}', 'w') for n in range(200)]\nprint(len(files))", None, "200") == "AC"
    assert (
        program(
            judge,
            "import tempfile\nfiles = [tempfile.TemporaryFile() for _ in range(100)]\nprint(len(files))",
            None,
            "100",
        )
        == "AC"
    )
    result = judge.judge(fenced("files = [open(f'{n}', 'w') for n in range(999)]"), stdin_suite((None, "")))
    assert (short(result), "Errno 24" in result.message) == ("RE", True)


# --- 3.4 processes, leaks, service behaviour ---


class Baseline:
    """What a service must have back after its work: processes, descriptors, memory, folders, groups, mounts."""

    def __init__(self, temp: Path) -> None:
        self.temp = temp
        self.pids = sorted(descendants_of(os.getpid()))
        self.descriptors = {pid: self._num_descriptors(pid) for pid in (os.getpid(), *self.pids)}
        self.rss_mib = {pid: self._rss_mib(pid) for pid in self.pids}
        self.boxes = sorted(temp.rglob("*"))
        self.mounts = len(Path("/proc/self/mounts").read_text().splitlines())
        self.groups = sorted(
            path for top in Path("/sys/fs/cgroup").glob("*") for path in top.rglob(f"forebay-*{os.getpid()}*")
        )

    @staticmethod
    def _num_descriptors(pid: int) -> int:
        with contextlib.suppress(OSError):
            return len(os.listdir(f"/proc/{pid}/fd"))
        return -1

    @staticmethod
    def _rss_mib(pid: int) -> float:
        with contextlib.suppress(OSError):
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20
        return -1

    def assert_same(self) -> None:
        now = Baseline(self.temp)
        assert now.pids == self.pids
        assert not [pid for pid in now.pids if not is_alive(pid)], "zombies"
        assert now.boxes == self.boxes
        assert now.mounts == self.mounts
        assert now.groups == self.groups
        for pid, count in now.descriptors.items():
            assert count <= self.descriptors[pid] + 3, pid
        for pid, rss in now.rss_mib.items():
            assert rss < self.rss_mib[pid] * 1.3 + 20, pid


def test_b55_b58_b64_to_b67_nothing_grows(pool: JudgePool, temp: Path) -> None:
    """At sizes that fit: 30 time limits instead of 1,000, each at 50 ms; 64 good jobs; 300 that write 1 MB, a third of them killed; 200 that
    are given up. All the kinds of worker are up before the baseline is taken."""
    loop, good = "def f(a, b):\n    while True: pass", GOOD
    tiny = {"cpu_s": 0.05, "wall_s": 1.0}
    suites = {kind: suite_of(kind) for kind in SUITES}

    def good_jobs(start: int, count: int) -> list[Future[JudgeResult]]:
        kinds = list(suites)
        return [
            pool.submit(program_of(kinds[n % 6], unique(good, start + n)), suites[kinds[n % 6]]) for n in range(count)
        ]

    assert {short(future.result()) for future in good_jobs(0, 60)} == {"AC"}
    before = Baseline(temp)

    slow = [
        pool.submit(program_of(kind, unique(loop, n)), suite_of(kind, limits=tiny))
        for n in range(15)
        for kind in ("call", "stdin")
    ]
    assert {short(future.result()) for future in slow} == {"TLE"}, "B55"
    before.assert_same()
    assert {short(future.result()) for future in good_jobs(100, 64)} == {"AC"}, "B64"

    write = "open('x', 'wb').write(bytes(1 << 20))\n"
    ends = ["print(1)", "import os\nos.kill(os.getpid(), 9)", "raise KeyError"]
    writers = [pool.submit(fenced(unique(write + ends[n % 3], n)), stdin_suite((None, "1"))) for n in range(300)]
    counts = [short(future.result()) for future in writers]
    assert (counts.count("AC"), counts.count("RE")) == (100, 200), "B66"
    before.assert_same()

    given_up, cancelled = [], 0
    for n in range(200):
        given_up.append(pool.submit(program_of("call", unique(loop, 1000 + n)), suite_of("call", limits=tiny)))
        cancelled += given_up[-1].cancel()  # at once: but for the few that a judge has just taken
    assert cancelled > 150
    assert {short(future.result()) for future in given_up if not future.cancelled()} <= {"TLE"}
    assert {short(future.result()) for future in good_jobs(300, 12)} == {"AC"}, "B58"
    before.assert_same()
    assert pool.counters()["queued"] == 0


def test_b66_a_box_that_is_a_folder_of_the_host_is_emptied_and_removed(temp: Path) -> None:
    """Level ``landlock``."""
    with judge_at("landlock"):
        pool = JudgePool(RewardConfig(workers=1, cache_size=0), levels=("landlock",))
    before = set(temp.iterdir())
    pool.start()
    try:
        ends = ["print(1)", "import os\nos.kill(os.getpid(), 9)", "while True: pass"]
        write = "import os\nopen('x', 'wb').write(bytes(1 << 20))\nos.makedirs('a/b/c')\n"
        suite = stdin_suite((None, "1"), limits={"cpu_s": 0.05})
        jobs = [pool.submit(fenced(unique(write + ends[n % 3], n)), suite) for n in range(45)]
        assert {short(job.result()) for job in jobs} == {"AC", "RE", "TLE"}
        boxes = set(temp.iterdir()) - before
        assert 1 <= len(boxes) <= 3
        assert [path for box in boxes for path in box.rglob("*")] == []
    finally:
        pool.close()
    block_until(lambda: set(temp.iterdir()) == before)  # the sandboxes end by themselves when their judge does


def test_b56_b59_b60_jobs_may_come_from_any_thread_while_others_hold_locks(pool: JudgePool) -> None:
    """200 of the 10,000. The judges are processes of their own: no thread or lock of ours is ever forked."""
    stop = threading.Event()
    lock = threading.Lock()

    def busy() -> None:
        while not stop.is_set():
            with lock:
                print(end="")

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    futures: list[Future[JudgeResult]] = []
    try:
        for n in range(200):
            submitter = threading.Thread(
                target=lambda n=n: futures.append(
                    pool.submit(program_of("call", unique(GOOD, 5000 + n)), suite_of("call"))
                )
            )
            submitter.start()
            submitter.join()
        assert {short(future.result()) for future in futures} == {"AC"}
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def judge_processes() -> list[int]:
    found = []
    for pid in children_of(os.getpid()):
        with contextlib.suppress(OSError):
            if b"services.reward.judge_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.parametrize("victim", ["worker", "init", "judge"])
def test_b61_a_killed_worker_or_judge_costs_no_reward(victim: str) -> None:
    with judge_at("namespaces"):
        pool = JudgePool(RewardConfig(workers=1))
    others = set(judge_processes())
    pool.start()
    try:
        mine = next(pid for pid in judge_processes() if pid not in others)
        slow = "import time\ndef f(a, b):\n    time.sleep(2)\n    return a + b"
        running = pool.submit(program_of("call", slow), suite_of("call", fresh_process=False, limits={"wall_s": 9}))
        worker = wait_for(lambda: next((pid for pid in children_of(mine) if len(descendants_of(pid)) >= 2), None))
        init = children_of(worker)[0]
        os.kill({"worker": worker, "init": init, "judge": mine}[victim], signal.SIGKILL)
        result = running.result(timeout=200)
        assert (short(result), result.reward, result.attempt) == ("AC", 1.0, 2), result
        assert short(pool.judge(program_of("stdin", GOOD), suite_of("stdin"))) == "AC"
        gone = {"worker": [worker, init], "init": [worker, init], "judge": [mine, worker, init]}[victim]
        wait_for(lambda: not any(map(is_alive, gone)) or None)
    finally:
        pool.close()


def wait_for(condition: Any, timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while (found := condition()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_b61_a_full_disk_is_not_the_candidates_fault(judge: Judge) -> None:
    """The box is memory of the sandbox, so a full disk of the host does not reach it. What is short of memory for good is an infra error."""
    boxed = "import os\nopen('x', 'wb').write(bytes(1 << 20))\nprint(os.statvfs('.').f_bavail * os.statvfs('.').f_bsize > 1 << 20)"
    assert program(judge, boxed, None, "True") == "AC"
    result = judge.judge(fenced("print(1)"), stdin_suite((None, "1"), limits={"memory_mib": 65536}))
    assert (short(result), result.reward) == ("IE", None)


def test_b61_a_worker_that_can_not_be_had_is_an_infra_error_and_comes_back(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = Judge(RewardConfig(), levels=("namespaces",))
    fresh.start()
    try:
        fresh.lab.drop()
        with monkeypatch.context() as broken:
            broken.setattr(fresh.lab, "_config", RewardConfig(python="/no/such/python"))
            result = fresh.judge(fenced("print(1)"), stdin_suite((None, "1")))
            assert (short(result), result.reward, result.repeatable) == ("IE", None, False)
        assert program(fresh, "print(1)", None, "1") == "AC"
    finally:
        fresh.close()


def test_b68_each_test_runs_once(judge: Judge) -> None:
    """A suite of asserts that count their calls, a checker that counts, a generator: where the count would show in the verdict."""
    counting = "n = 0\ndef f(x):\n    global n\n    n += 1\n    return n"
    asserts = {"kind": "asserts", "entry_point": "f", "code": "assert f(0) == 1\nassert f(0) == 2\nassert f(0) == 3"}
    assert short(judge.judge(fenced(counting), parse_suite(asserts))) == "AC"
    loop = {
        "kind": "check",
        "entry_point": "f",
        "code": "def check(c):\n    for i in range(1, 6):\n        assert c(0) == i",
    }
    assert short(judge.judge(fenced(counting), parse_suite(loop))) == "AC"
    assert function(judge, counting, *[([0], n) for n in (1, 2, 3)], fresh_process=False) == "AC"
    checker = {
        "kind": "checker",
        "checker": "n = 0\ndef check(i, o, a):\n    global n\n    n += 1\n    return n == int(a)",
        "cases": [{"answer": "1"}, {"answer": "2"}],
    }
    assert short(judge.judge(fenced("print()"), parse_suite(checker))) == "AC"


def test_b70_an_infra_error_has_no_reward_and_is_not_kept(pool: JudgePool) -> None:
    """What the trainer does with it: tests/unit/test_learner_advantages.py and the coordinator's own."""
    result = pool.judge(program_of("call", GOOD), suite_of("call", limits={"memory_mib": 65536}))
    assert (result.verdict, result.reward) == (Verdict.INFRA_ERROR, None)


def test_b84_verdicts_do_not_depend_on_the_load(pool: JudgePool) -> None:
    """Known-good solutions, alone and 16 times over."""
    kinds = list(SUITES)
    alone = [pool.judge(program_of(kind, GOOD), suite_of(kind)) for kind in kinds]
    with ThreadPoolExecutor(32) as threads:
        jobs = [(program_of(kinds[n % 6], unique(GOOD, 9000 + n)), suite_of(kinds[n % 6])) for n in range(16 * 6)]
        loaded = list(threads.map(lambda job: pool.judge(*job), jobs))
    assert {short(result) for result in alone + loaded} == {"AC"}
