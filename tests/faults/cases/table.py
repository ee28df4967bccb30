"""All cases, in the order in which they run."""

from __future__ import annotations

from tests.faults.case import Case
from tests.faults.cases import kills, machine, real, wire, work

STAGES = ("join", "generate", "judge", "train", "update", "commit", "whole run", "data", "machine")


def all_cases() -> list[Case]:
    """By stage. Names are unique."""
    cases = [*kills.CASES, *wire.CASES, *work.CASES, *machine.CASES, *real.CASES]
    assert len({case.name for case in cases}) == len(cases)
    return sorted(cases, key=lambda case: STAGES.index(case.stage))
