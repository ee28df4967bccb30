"""What the reward node's sandbox costs: executions and judgements a second, latency, growth; baselines beside it on the same programs.

    python -m bench.sandbox [--only a,b,c,d] [--rounds 5] [--quick] [--all]

a  trivial programs on standard input and output, each in full isolation, no verdict reused
b  the same through ZeroMQ: a coordinator's socket here, a reward node in a process of its own, TCP on the loopback interface
c  HumanEval completions against the reference harness, evalplus' checker, bubblewrap + python, and plain python
d  growth with workers, with tests of a program, and with load beside

Every figure is the median over the rounds and ``[least-most]`` of them; a round has each variant once, so that all meet the same machine.
``--quick`` is one small round, under a minute: it shows that everything runs, its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.baselines import BASELINES, missing
from bench.corpora import REFERENCE_S, ROOT, Completion, completions, fenced, sample, suite_of
from bench.load import burners
from protocol import messages as m
from protocol.codec import Received
from protocol.router import CoordinatorSocket
from protocol.suites import TestSuite, parse_suite
from protocol.verdicts import JudgeResult
from protocol.versions import VersionTag
from services.faults.processes import free_port
from services.reward.config import RewardConfig
from services.reward.pool import JudgePool

CORES = len(os.sched_getaffinity(0))
Job = tuple[str, TestSuite]
_UNIQUE = itertools.count()


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    many: int  # programs of a throughput
    few: int  # programs of a latency, one at a time
    human_eval: int  # completions of c for the judge
    baseline: int  # ... and for the baselines
    loaded: int  # completions of d for each load


FULL = Size(rounds=5, many=1500, few=300, human_eval=800, baseline=150, loaded=200)
QUICK = Size(rounds=1, many=120, few=20, human_eval=60, baseline=16, loaded=24)

# ---- programs ----

ECHO = parse_suite({"kind": "stdin", "cases": [{"input": "3\n", "output": "6\n"}]})
CALLS = [{"args": [n, 2], "expected": n + 2} for n in range(30)]


def stdin_job() -> Job:
    """A trivial program that nobody has judged yet."""
    return fenced(f"print(int(input()) * 2)  # {next(_UNIQUE)}"), ECHO


def tests_job(kind: str, count: int) -> Job:
    """A trivial program or function with ``count`` tests, each in a process of its own."""
    if kind == "stdin":
        cases = [{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in range(count)]
        return fenced(f"print(int(input()) * 2)  # {next(_UNIQUE)}"), parse_suite({"kind": "stdin", "cases": cases})
    suite = parse_suite({"kind": "call", "entry_point": "f", "cases": CALLS[:count]})
    return fenced(f"def f(a, b):\n    return a + b  # {next(_UNIQUE)}"), suite


def human_eval_job(row: Completion) -> Job:
    """A completion, with the time that the reference harness gives it."""
    return fenced(f"{row.program}\n# {next(_UNIQUE)}"), suite_of(row.task_id, REFERENCE_S)


# ---- measuring ----


@contextlib.contextmanager
def judges(workers: int = 0) -> Iterator[JudgePool]:
    """A started pool that keeps no verdict."""
    pool = JudgePool(RewardConfig(workers=workers, cache_size=0, max_queue=100_000))
    pool.start()
    try:
        yield pool
    finally:
        pool.close()


def all_at_once(pool: JudgePool, jobs: Sequence[Job]) -> tuple[float, list[JudgeResult]]:
    """Judgements a second with all of them waiting, and the results."""
    started = time.perf_counter()
    futures: list[Future[JudgeResult]] = [pool.submit(*job) for job in jobs]
    results = [future.result() for future in futures]
    return len(jobs) / (time.perf_counter() - started), results


def one_at_a_time(pool: JudgePool, jobs: Sequence[Job]) -> tuple[list[float], list[JudgeResult]]:
    """Seconds from completion to result, each alone."""
    seconds, results = [], []
    for job in jobs:
        started = time.perf_counter()
        results.append(pool.judge(*job))
        seconds.append(time.perf_counter() - started)
    return seconds, results


class Figures:
    """Values by name over the rounds."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = defaultdict(list)

    def add(self, name: str, value: float) -> None:
        """One round's."""
        self.values[name].append(value)

    def quantiles_ms(self, name: str, seconds: Sequence[float]) -> None:
        """Median and 95th percentile of one round."""
        self.add(f"{name} median", 1000 * statistics.median(seconds))
        self.add(f"{name} p95", 1000 * float(np.percentile(seconds, 95)))

    def text(self, name: str, digits: int = 0) -> str:
        """``231 [200-266]``; ``-`` where there is none."""
        values = self.values.get(name)
        if not values:
            return "-"
        low, high = min(values), max(values)
        return f"{statistics.median(values):.{digits}f} [{low:.{digits}f}-{high:.{digits}f}]"

    def ratio(self, ours: str, theirs: str) -> str:
        """Ours over theirs, round by round."""
        pairs = zip(self.values.get(ours, []), self.values.get(theirs, []), strict=False)
        ratios = Figures()
        for ours_value, theirs_value in pairs:
            ratios.add("", ours_value / theirs_value)
        return ratios.text("", 2)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned."""
    print(f"\n{title}")
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), flush=True)


def must_accept(results: Sequence[JudgeResult]) -> None:
    """Raises AssertionError where a program that is right was not accepted: then the figures are of something else."""
    wrong = [result for result in results if result.verdict != "accepted"]
    assert not wrong, wrong[0]


# ---- a: executions ----

_FORKS = """
import os, time
started = time.perf_counter()
for _ in range(1000):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
print(1000 / (time.perf_counter() - started))
"""


def forks_a_second() -> float:
    """What this machine gives at most: forks of a bare interpreter that do nothing, as many at a time as there are cores."""
    command = [RewardConfig().interpreter, "-I", "-S", "-c", _FORKS]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(CORES)]
    return sum(float(process.communicate()[0]) for process in running)


def section_a(size: Size) -> None:
    """Trivial programs through the pool."""
    figures = Figures()
    with judges() as pool:
        all_at_once(pool, [stdin_job() for _ in range(50)])
        for _ in range(size.rounds):
            seconds, results = one_at_a_time(pool, [stdin_job() for _ in range(size.few)])
            must_accept(results)
            figures.quantiles_ms("alone, to result", seconds)
            figures.quantiles_ms("alone, in worker", [result.wall_s for result in results])
            rate, results = all_at_once(pool, [stdin_job() for _ in range(size.many)])
            must_accept(results)
            figures.add("rate", rate)
            figures.quantiles_ms("full, in worker", [result.wall_s for result in results])
            figures.add("cpu", 1000 * statistics.median(result.cpu_s for result in results))
            figures.add("forks", forks_a_second())
        isolation = pool.isolation
    table(
        f"a  trivial programs on standard input and output, distinct sources, isolation {isolation}",
        ["what", "value", "unit"],
        [
            [f"executions, {CORES} workers", figures.text("rate"), "1/s"],
            *(
                [f"{name}, {which}", figures.text(f"{key} {which}", 2), "ms"]
                for name, key in (
                    ("one at a time: wall time in the worker", "alone, in worker"),
                    ("one at a time: completion to result", "alone, to result"),
                    ("all at once: wall time in the worker", "full, in worker"),
                )
                for which in ("median", "p95")
            ),
            ["all at once: CPU time of the program, median", figures.text("cpu", 2), "ms"],
            [f"for comparison: python forks that do nothing, {CORES} at a time", figures.text("forks"), "1/s"],
            ["executions / such forks", figures.ratio("rate", "forks"), ""],
        ],
    )


# ---- b: through ZeroMQ ----


class Coordinator:
    """As much of a coordinator as a reward node needs: it gives leases, and awaits their results."""

    def __init__(self, router: CoordinatorSocket) -> None:
        self._router = router
        self._suites: dict[str, TestSuite] = {}
        self._open: dict[str, asyncio.Future[JudgeResult]] = {}
        self._node = b""
        self.joined: asyncio.Future[m.Hello] = asyncio.get_running_loop().create_future()

    async def judge(self, completion: str, suite: TestSuite) -> JudgeResult:
        """One lease, to its result."""
        lease_id = f"lease-{next(_UNIQUE)}"
        self._suites[suite.content_hash] = suite
        future = self._open[lease_id] = asyncio.get_running_loop().create_future()
        lease = m.ScoreLease(
            lease_id=lease_id,
            group_id=0,
            sample_index=0,
            completion=completion,
            suite_hash=suite.content_hash,
            timeout_s=60,
        )
        self._router.send(self._node, lease)
        return await future

    async def shut_down(self) -> None:
        """Tell the node to leave."""
        self._router.send(self._node, m.Shutdown(reason="measured"))

    async def serve(self) -> None:
        """Answer the node, for ever."""
        while True:
            for sender, received in await self._router.recv():
                self._answer(sender, received)

    def _answer(self, sender: bytes, received: Received) -> None:
        match received.message:
            case m.Hello() as hello:
                self._node = sender
                welcome = m.Welcome(
                    run_uid="bench", tag=VersionTag(version=0), heartbeat_interval_s=2, node_timeout_s=30
                )
                self._router.send(sender, welcome, re=received.seq)
                if not self.joined.done():
                    self.joined.set_result(hello)
            case m.Heartbeat():
                self._router.send(sender, m.HeartbeatAck(), re=received.seq)
            case m.SuiteRequest() as request:
                data = {"json_utf8": np.frombuffer(self._suites[request.suite_hash].to_json(), dtype=np.uint8)}
                answer = m.Suite(suite_hash=request.suite_hash)
                self._router.send(sender, answer, re=received.seq, arrays=data)
            case m.ScoreResult() as result:
                self._router.send(sender, m.Ack(), re=received.seq)
                self._open.pop(result.lease_id).set_result(result.result)


@contextlib.asynccontextmanager
async def reward_node() -> AsyncIterator[tuple[Coordinator, m.Hello]]:
    """A coordinator's socket, and ``python -m services.reward`` that has joined it."""
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        address = f"tcp://127.0.0.1:{free_port()}"
        tasks = Path(folder) / "tasks.jsonl"
        task = {"task_id": "t", "prompt": "p", "tests": ECHO.model_dump(mode="json")}
        tasks.write_text(json.dumps(task) + "\n", encoding="utf-8")
        config = {
            "run": {"id": "bench", "dir": folder, "model": folder, "address": address, "log_level": "warning"},
            "coordinator": {"tasks": str(tasks), "max_steps": 1},
            "reward": {"cache_size": 0},
        }
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        router = CoordinatorSocket(address, "bench")
        coordinator = Coordinator(router)
        serving = asyncio.create_task(coordinator.serve())
        command = [sys.executable, "-m", "services.reward", "--config", str(path), "--node-id", "bench"]
        node = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)  # noqa: ASYNC220 (once, before any measuring)
        try:
            async with asyncio.timeout(60):
                hello = await coordinator.joined
            yield coordinator, hello
            await coordinator.shut_down()
            await asyncio.to_thread(node.wait, 20)
        finally:
            node.kill()
            node.wait()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            router.close()


async def _through_zeromq(size: Size) -> None:
    figures = Figures()
    async with reward_node() as (coordinator, hello):
        for _ in range(50):
            await coordinator.judge(*stdin_job())
        for _ in range(size.rounds):
            seconds = []
            for _ in range(size.few):
                started = time.perf_counter()
                must_accept([await coordinator.judge(*stdin_job())])
                seconds.append(time.perf_counter() - started)
            figures.quantiles_ms("lease to result", seconds)
            for name, limit in (("capacity", hello.capacity), ("64", 64)):
                figures.add(f"rate {name}", await _rate(coordinator, size.many, limit))
    table(
        "b  the same through ZeroMQ: lease out, result in, TCP on the loopback interface",
        ["what", "value", "unit"],
        [
            ["one lease at a time, median", figures.text("lease to result median", 2), "ms"],
            ["one lease at a time, p95", figures.text("lease to result p95", 2), "ms"],
            [f"{hello.capacity} leases open, as many as the node asks for", figures.text("rate capacity"), "1/s"],
            ["64 leases open", figures.text("rate 64"), "1/s"],
        ],
    )


async def _rate(coordinator: Coordinator, count: int, limit: int) -> float:
    """Results a second with ``limit`` leases open at any time."""
    slots = asyncio.Semaphore(limit)

    async def one() -> None:
        async with slots:
            must_accept([await coordinator.judge(*stdin_job())])

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return count / (time.perf_counter() - started)


def section_b(size: Size) -> None:
    """Trivial programs through a reward node."""
    asyncio.run(_through_zeromq(size))


# ---- c: HumanEval ----


def section_c(size: Size, *, everything: bool = False) -> None:
    """Real completions, and other ways to judge them."""
    rows = completions()
    if not rows:
        print("\nc  not measured: no ../shared/data, or the package human-eval is not installed")
        return
    ours = [row for row in rows if row.result != "timed out"] if everything else []
    ours = ours or sample(rows, size.human_eval, quick_only=True)
    same = sample(rows, size.baseline, quick_only=True)
    absent = missing()
    figures, wrong = Figures(), 0
    agreeing: dict[str, int] = {}
    with judges() as pool, tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        path = Path(folder) / "rows.json"
        kept = [{"task_id": row.task_id, "prompt": row.prompt, "completion": row.completion} for row in same]
        path.write_text(json.dumps(kept), encoding="utf-8")
        all_at_once(pool, [human_eval_job(row) for row in same[:50]])
        for _ in range(size.rounds):
            rate, results = all_at_once(pool, [human_eval_job(row) for row in ours])
            figures.add("ours", rate)
            wrong += _num_wrong(ours, [result.verdict == "accepted" for result in results])
            rate, results = all_at_once(pool, [human_eval_job(row) for row in same])
            figures.add("ours, same", rate)
            for name in BASELINES:
                if name not in absent:
                    wall_s, passed = _baseline(name, path)
                    figures.add(name, len(same) / wall_s)
                    agreeing[name] = len(same) - _num_wrong(same, passed)
    described = {
        "human-eval": "reference harness, human-eval 1.0.3, its 4 threads",
        "evalplus": f"evalplus' checker, {CORES} processes",
        "bwrap": f"bwrap --unshare-all + python, {CORES} at a time",
        "python": f"python, no isolation, {CORES} at a time",
    }
    table(
        f"c  HumanEval completions that do not time out ({len(ours)}; the baselines' {len(same)} among them)",
        ["what", "judgements/s", "ours / theirs on the same programs", "right"],
        [
            [f"judge pool, {CORES} workers, {len(ours)} programs", figures.text("ours"), "", f"{wrong} wrong"],
            [f"judge pool, {CORES} workers, {len(same)} programs", figures.text("ours, same"), "", ""],
            *(
                [described[name], absent[name], "", ""]
                if name in absent
                else [
                    described[name],
                    figures.text(name),
                    figures.ratio("ours, same", name),
                    f"{agreeing[name]} of {len(same)}",
                ]
                for name in BASELINES
            ),
            ["SandboxFusion", "no baseline", "its registry package is a client for a server that no registry has", ""],
        ],
    )


def _num_wrong(rows: Sequence[Completion], passed: Sequence[bool]) -> int:
    return sum(row.passed != ours for row, ours in zip(rows, passed, strict=True))


def _baseline(name: str, path: Path) -> tuple[float, list[bool]]:
    command = [sys.executable, "-m", "bench.baselines", name, str(path)]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, check=True, text=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer["wall_s"], answer["passed"]


# ---- d: growth ----

WORKERS = (1, 2, 4)
TESTS = (1, 3, 10, 30)
LOADS = (0, 2, 8, 32)


def section_d(size: Size) -> None:
    """With workers, with tests, with load."""
    figures = Figures()
    with contextlib.ExitStack() as stack:
        pools = {workers: stack.enter_context(judges(workers)) for workers in WORKERS}
        for pool in pools.values():
            all_at_once(pool, [stdin_job() for _ in range(40)])
        for _ in range(size.rounds):
            for workers, pool in pools.items():
                rate, results = all_at_once(pool, [stdin_job() for _ in range(size.many // 2)])
                must_accept(results)
                figures.add(f"workers {workers}", rate)
    table(
        f"d  trivial programs by workers, on {CORES} cores",
        ["workers", "executions/s"],
        [[str(workers), figures.text(f"workers {workers}")] for workers in WORKERS],
    )
    with judges() as pool:
        _growth_with_tests(pool, size)
    _growth_with_load(size)


def _growth_with_tests(pool: JudgePool, size: Size) -> None:
    figures = Figures()
    for _ in range(size.rounds):
        for kind, count in itertools.product(("stdin", "call"), TESTS):
            jobs = [tests_job(kind, count) for _ in range(max(8, size.many // 5 // count))]
            rate, results = all_at_once(pool, jobs)
            must_accept(results)
            figures.add(f"{kind} {count}", rate)
            figures.add(f"{kind} {count} tests", rate * count)
    rows = [
        [kind, str(count), figures.text(f"{kind} {count}"), figures.text(f"{kind} {count} tests")]
        for kind, count in itertools.product(("stdin", "call"), TESTS)
    ]
    table("d  programs by tests, each test in a process of its own", ["kind", "tests", "programs/s", "tests/s"], rows)


def _growth_with_load(size: Size) -> None:
    """Real completions beside processes that burn CPU. Another reading of the clock must not become another verdict."""
    rows = sample(completions(), size.loaded)

    def jobs() -> list[Job]:
        return [human_eval_job(row) for row in rows] if rows else [stdin_job() for _ in range(size.loaded)]

    figures = Figures()
    first: list[str] = []
    changed = dict.fromkeys(LOADS, 0)
    with judges() as pool:
        all_at_once(pool, jobs()[:20])
        for _, load in itertools.product(range(min(size.rounds, 3)), LOADS):
            with burners(load):
                rate, results = all_at_once(pool, jobs())
            figures.add(str(load), rate)
            verdicts = [result.verdict.value for result in results]
            first = first or verdicts
            changed[load] += sum(a != b for a, b in zip(first, verdicts, strict=True))
    table(
        f"d  {len(jobs())} programs (HumanEval, those that time out among them) by busy processes beside",
        ["busy processes", "judgements/s", "verdicts changed"],
        [[str(load), figures.text(str(load)), str(changed[load])] for load in LOADS],
    )


SECTIONS: dict[str, Callable[[Size], None]] = {"a": section_a, "b": section_b, "c": section_c, "d": section_d}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="a,b,c,d", help="sections, with commas between")
    parser.add_argument("--rounds", type=int, default=0, help=f"default {FULL.rounds}")
    parser.add_argument("--quick", action="store_true", help="one small round")
    parser.add_argument("--all", action="store_true", help="c: all completions that do not time out, not a sample")
    args = parser.parse_args()
    size = QUICK if args.quick else FULL
    if args.rounds:
        size = Size(**{**vars(size), "rounds": args.rounds})
    print(
        f"{platform.machine()}, {CORES} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f} at the start, "
        f"{size.rounds} rounds; median [least-most]"
    )
    for name in args.only.split(","):
        if name == "c":
            section_c(size, everything=args.all)
        else:
            SECTIONS[name](size)


if __name__ == "__main__":
    main()
