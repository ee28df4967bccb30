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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.baselines import BASELINES, missing
from bench.corpora import ROOT, Completion, completions, sample
from bench.load import burners
from bench.sandbox_node import Coordinator, reward_node
from bench.sandbox_parts import (
    CORES,
    FULL,
    QUICK,
    Figures,
    Job,
    Size,
    all_at_once,
    human_eval_job,
    judges,
    must_accept,
    one_at_a_time,
    stdin_job,
    table,
    tests_job,
)
from services.reward.config import RewardConfig
from services.reward.pool import JudgePool

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
