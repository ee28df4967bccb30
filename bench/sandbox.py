"""Judgements a second of the reward node's sandbox, against plain ``python`` processes that isolate nothing, in the same run.

    python -m bench.sandbox [--workers N] [--rounds 5] [--jobs 200]

Three workloads: a trivial function with three asserts the judge evaluates itself (inline), the same with tests in their own process
(remote), and the canonical MBPP solutions where ``../shared/data`` has them. Prints one row each: median over the rounds, and its range.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from protocol.suites import AssertSuite, CheckSuite, Limits, TestSuite
from services.reward.config import RewardConfig
from services.reward.judge import Judge

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "mbpp_sanitized.jsonl"
SOLUTION = "def f(a, b):\n    return a + b\n"
ASSERTS = "assert f(1, 2) == 3\nassert f(2, 2) == 4\nassert f(0, 0) == 0\n"
Job = tuple[str, TestSuite]


def mbpp() -> list[Job]:
    """Canonical solutions with their suites; without the slow one and the one whose check calls itself. Empty without the data."""
    if not DATA.exists():
        return []
    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["entry_point"] not in ("amicable_numbers_sum", "rev")]
    jobs = []
    for row in rows:
        head = re.sub(r"^    '''.*?'''\n", "", row["prompt"], flags=re.DOTALL | re.MULTILINE)
        suite = CheckSuite(
            kind="check", entry_point=row["entry_point"], code=row["test"], limits=Limits(cpu_s=10, wall_s=30)
        )
        jobs.append((head + row["canonical_solution"], suite))
    return jobs


def per_second(run: Callable[[Job], object], jobs: list[Job], workers: int) -> float:
    """Jobs a second over ``workers`` threads."""
    with ThreadPoolExecutor(workers) as pool:
        started = time.perf_counter()
        list(pool.map(run, jobs))
        return len(jobs) / (time.perf_counter() - started)


def plain_python(python: str, job: Job) -> None:
    """The baseline: one interpreter a job, candidate and asserts in one process, pass by exit code."""
    code, suite = job
    call = f"\ncheck({suite.entry_point})" if suite.kind == "check" else ""
    subprocess.run(
        [python, "-c", f"import math\n{code}\n{suite.code}{call}"], check=False, capture_output=True, timeout=60
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=0, help="judgements at a time; 0: one per core")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=200, help="jobs a round of the trivial workloads")
    args = parser.parse_args()
    config = RewardConfig(workers=args.workers)
    judge = Judge(config)
    judge.start()
    inline = AssertSuite(kind="asserts", entry_point="f", code=ASSERTS)
    remote = AssertSuite(kind="asserts", entry_point="f", code=f"for _ in range(1):\n    pass\n{ASSERTS}")
    workloads = {
        "trivial, inline": [(SOLUTION, inline)] * args.jobs,
        "trivial, remote": [(SOLUTION, remote)] * args.jobs,
    }
    workloads |= {"MBPP canonical": jobs} if (jobs := mbpp()) else {}
    print(
        f"{config.num_workers} workers, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, isolation {judge.isolation}"
    )
    try:
        for name, jobs in workloads.items():
            ours, theirs, wrong = [], [], 0
            for _ in range(args.rounds):  # interleaved, so that both meet the same load of the machine

                def judged(job: Job) -> None:
                    nonlocal wrong
                    wrong += judge.judge(f"```python\n{job[0]}\n```", job[1]).reward != 1.0

                ours.append(per_second(judged, jobs, config.num_workers))
                sample = jobs[:100]
                theirs.append(per_second(lambda job: plain_python(config.interpreter, job), sample, config.num_workers))
            a, b = statistics.median(ours), statistics.median(theirs)
            ranges = f"[{min(ours):.0f}-{max(ours):.0f}] against [{min(theirs):.0f}-{max(theirs):.0f}]"
            print(f"{name:<16} {a:6.0f}/s   plain python {b:5.0f}/s   x{a / b:.1f}   {ranges}   wrong {wrong}")
    finally:
        judge.close()


if __name__ == "__main__":
    main()
