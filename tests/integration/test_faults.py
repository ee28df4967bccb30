"""Every case of ``forebay faults`` as a test of its own, and a short soak."""

from __future__ import annotations

import pytest
from rich.console import Console

from services.faults.case import run_case
from services.faults.cases.table import all_cases
from services.faults.soak import Soak


def _params():
    for case in all_cases():
        slow = case.slow or case.real
        yield pytest.param(case, id=case.name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("case", _params())
def test_nothing_is_lost_or_trained_twice(tmp_path, case):
    result = run_case(case, tmp_path)
    if result.not_run:
        pytest.skip(result.why)
    assert result.passed, result.why
    assert (result.lost, result.duplicated) == (0, 0)


@pytest.mark.slow
def test_15_random_kills_lose_nothing(tmp_path):
    soak = Soak(tmp_path, seed=3)
    soak.run(num_kills=15, seconds=None, console=Console(quiet=True))
    assert soak.passed, f"{soak.problem}\n{soak.verdict}\n{soak.kills}"
