"""What the sections of ``sandbox.py`` share: programs to judge, pools that judge them, and figures over rounds."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from bench.corpora import REFERENCE_S, Completion, fenced, suite_of
from protocol.suites import TestSuite, parse_suite
from protocol.verdicts import JudgeResult
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
