"""The table of ``bench/hacks.py``: wrong programs against naive judges, and against ours."""

from __future__ import annotations

import pytest
from judge_harness import LEVELS, judge_at

from bench import hacks


def test_naive_judges_take_right_programs_no_plainly_wrong_ones_and_some_hacks() -> None:
    table = hacks.naive_table(hacks.HACKS | {"HONEST": hacks.HONEST, "WRONG": hacks.WRONG})
    for style, names in table.items():
        assert "HONEST" in names, style
        assert "WRONG" not in names, style
    passed = {style[0]: len(names) - 1 for style, names in table.items()}
    assert passed["A"] >= 10, "the hacks are real"
    assert passed["B"] >= 5
    assert passed["C"] >= 5
    assert passed["E"] >= 1
    assert passed["F"] >= 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", hacks.SUITES)
def test_no_hack_passes_ours(level: str, kind: str) -> None:
    with judge_at(level) as judge:
        assert hacks.ours(judge, kind, hacks.HONEST)
        assert not hacks.ours(judge, kind, hacks.WRONG)
        passed = [name for name, code in hacks.HACKS.items() if hacks.ours(judge, kind, code)]
        assert passed == []
        assert hacks.ours(judge, kind, hacks.HONEST)


def test_the_hacks_are_25_different_programs() -> None:
    assert len(set(hacks.HACKS.values())) == 25
    for name, code in hacks.HACKS.items():
        compile(code, name, "exec")
