"""Reward arithmetic, and the metrics of readability that it starts from."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.reward.config import RewardWeights
from services.reward.rewards import READABILITY_SCALES, combine, correctness, efficiency, readability
from services.reward.sandbox import readability as guest
from services.reward.sandbox.readability import measure

shares = st.floats(0, 1)
numbers = st.floats() | st.integers(-(10**400), 10**400)
anything: st.SearchStrategy[Any] = (
    numbers
    | st.none()
    | st.booleans()
    | st.text(max_size=3)
    | st.lists(st.integers(), max_size=2)
    | st.complex_numbers()
)
weights = st.builds(RewardWeights, correctness=st.floats(0, 1, exclude_min=True), readability=shares, efficiency=shares)


def in_range(value: float) -> bool:
    return type(value) is float and math.isfinite(value) and 0 <= value <= 1


# --- correctness ---


def test_all_or_nothing_needs_every_test() -> None:
    assert correctness([1, 1], 2, "all") == 1.0
    assert correctness([1, 0.99], 2, "all") == 0.0
    assert correctness([1], 2, "all") == 0.0
    assert correctness([1, 1, 1], 2, "all") == 1.0
    assert correctness([1, 1, 0], 2, "all") == 0.0


def test_a_fraction_counts_the_tests_that_did_not_run() -> None:
    assert correctness([1, 0.5], 4, "fraction") == 0.375
    assert correctness([1, 1, 0, 0], 2, "fraction") == 0.5
    assert correctness([1] * 7, 7, "fraction") == 1.0
    assert correctness([0.1] * 10, 10, "fraction") == 0.1


def test_no_tests_earn_nothing() -> None:
    for mode in ("all", "fraction"):
        assert correctness([], 0, mode) == 0.0
        assert correctness([1], 0, mode) == 0.0
        assert correctness([1], -1, mode) == 0.0
        assert correctness([math.nan, math.inf], 2, mode) < 1.0


@given(st.lists(numbers, max_size=8), st.integers(-1, 10), st.sampled_from(["all", "fraction"]))
def test_correctness_is_a_share_and_full_only_if_all_passed(scores: list[float], num: int, mode: Any) -> None:
    value = correctness(scores, num, mode)
    assert in_range(value)
    if value == 1.0 and mode == "all":
        assert num >= 1
        assert len(scores) >= num
        assert all(score >= 1 for score in scores)


@given(st.lists(shares, min_size=1, max_size=8), st.integers(0, 7), st.sampled_from(["all", "fraction"]))
def test_a_better_score_never_lowers_correctness(scores: list[float], index: int, mode: Any) -> None:
    better = list(scores)
    better[index % len(scores)] = 1.0
    assert correctness(better, len(scores), mode) >= correctness(scores, len(scores), mode)


# --- efficiency ---


@pytest.mark.parametrize(
    ("cpu_s", "level"), [(0.1012, 1.0), (0.01, 1.0), (0.14, 1.0), (0.17, 0.8), (0.2, 0.6), (0.3, 0.4), (0.5, 0.2), (0.8, 0.0)]
)  # fmt: skip
def test_efficiency_has_six_levels_and_forgives_noise(cpu_s: float, level: float) -> None:
    assert efficiency(cpu_s, 0.1012, 0.0012) == level


def test_times_that_cannot_be_told_from_none_are_as_fast() -> None:
    assert efficiency(0.0014, 0.0012, 0.0012) == 1.0
    assert efficiency(0.0021, 0.0012, 0.0012) == 1.0
    assert efficiency(0.0012, 0.0013, 0.005) == 1.0
    assert efficiency(0.1, 0.0012, 0.0012) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, -math.inf, None, "1", True])
def test_times_that_are_none_earn_nothing(bad: Any) -> None:
    assert efficiency(bad, 0.1, 0.001) == efficiency(0.1, bad, 0.001) == efficiency(0.1, 0.1, bad) == 0.0
    assert efficiency(0, 0.1, 0.001) == efficiency(0.1, 0, 0.001) == 0.0


@given(anything, anything, anything)
def test_efficiency_is_a_level_for_any_values(cpu_s: Any, solution_cpu_s: Any, baseline_s: Any) -> None:
    value = efficiency(cpu_s, solution_cpu_s, baseline_s)
    assert in_range(value)
    assert value in {0.0, 0.2, 0.4, 0.6, 0.8, 1.0}


@given(st.floats(1e-6, 100), st.floats(1e-6, 100), st.floats(1e-6, 100), st.floats(0, 0.01))
def test_a_faster_program_never_earns_less(a: float, b: float, solution: float, baseline: float) -> None:
    assert efficiency(min(a, b), solution, baseline) >= efficiency(max(a, b), solution, baseline)
    assert efficiency(solution, solution, baseline) == 1.0


# --- combine ---


@given(st.dictionaries(st.sampled_from(["readability", "efficiency", "other"]), anything), anything, weights)
def test_a_reward_is_a_share_for_any_parts(parts: dict[str, Any], correct: Any, its: RewardWeights) -> None:
    assert in_range(combine({**parts, "correctness": correct}, its))


@given(shares, shares, shares, shares, weights)
def test_a_reward_grows_with_correctness(a: float, b: float, pretty: float, fast: float, its: RewardWeights) -> None:
    low, high = sorted([a, b])
    rest = {"readability": pretty, "efficiency": fast}
    assert combine({"correctness": low, **rest}, its) <= combine({"correctness": high, **rest}, its)


@given(shares, shares, weights)
def test_wrong_code_earns_nothing_by_its_looks_and_a_perfect_program_all(
    pretty: float, fast: float, its: RewardWeights
) -> None:
    assert combine({"correctness": 0.0, "readability": pretty, "efficiency": fast}, its) == 0.0
    assert combine({"correctness": 1.0, "readability": 1.0, "efficiency": 1.0}, its) == pytest.approx(1.0)
    assert combine({"correctness": 1.0}, its) == 1.0


def test_the_mean_is_over_the_parts_that_are_there() -> None:
    its = RewardWeights(correctness=1.0, readability=0.5, efficiency=0.5)
    assert combine({"correctness": 0.5}, its) == 0.5
    assert combine({"correctness": 0.5, "readability": 1.0}, its) == 0.5
    assert combine({"correctness": 1.0, "readability": 0.0}, its) == pytest.approx(1 / 1.5)
    assert combine({"correctness": 1.0, "readability": 1.0, "efficiency": 0.0}, its) == 0.75
    assert combine({"correctness": 1.0, "efficiency": 0.0}, RewardWeights()) == 1.0
    with pytest.raises(KeyError):
        combine({"readability": 1.0}, its)


# --- readability: the share ---


PERFECT = dict.fromkeys(READABILITY_SCALES, 0.0)


def test_no_fault_is_one_and_each_metric_costs_its_weight() -> None:
    total = sum(scale.weight for scale in READABILITY_SCALES.values())
    assert readability(PERFECT) == 1.0
    assert readability({}) == 0.0
    for name, scale in READABILITY_SCALES.items():
        assert readability({**PERFECT, name: scale.good}) == 1.0
        for worst in (scale.bad, 10**400, math.inf, math.nan, -1, None, "0", True, 0j, [0]):
            assert readability({**PERFECT, name: worst}) == pytest.approx(1 - scale.weight / total)
        assert readability({**PERFECT, name: (scale.good + scale.bad) / 2}) == pytest.approx(
            1 - scale.weight / total / 2
        )


@given(st.dictionaries(st.sampled_from([*READABILITY_SCALES, "other"]), anything) | anything)
def test_readability_is_a_share_for_any_values(metrics: Any) -> None:
    assert in_range(readability(metrics))


@given(st.sampled_from(sorted(READABILITY_SCALES)), st.floats(0, 200), st.floats(0, 200))
def test_a_worse_metric_never_earns_more(name: str, a: float, b: float) -> None:
    assert readability({**PERFECT, name: min(a, b)}) >= readability({**PERFECT, name: max(a, b)})


# --- readability: the metrics ---


def metrics(source: str) -> dict[str, float]:
    found = measure(textwrap.dedent(source))
    assert set(found) == set(READABILITY_SCALES)
    assert all(type(value) is float and math.isfinite(value) and value >= 0 for value in found.values())
    return found


CLEAN = '''
from collections import Counter


def most_common_word(text: str) -> str:
    """The word that occurs most often; the first of them."""
    counts = Counter(text.lower().split())
    best = ""
    for word, count in counts.items():
        if count > counts[best]:
            best = word
    return best


print(most_common_word(input()))
'''


def test_a_clean_program_has_full_marks() -> None:
    assert readability(metrics(CLEAN)) == 1.0
    assert readability(metrics("")) == 1.0


@pytest.mark.parametrize(
    ("name", "source", "value"),
    [
        ("longest_function", "def f():\n" + "    value = 1\n" * 30, 30),
        ("longest_function", "value = 1\n" * 30 + "def f():\n    return 1\n", 30),
        ("longest_function", "if a:\n    if b:\n        c()\n", 3),
        ("max_complexity", "def f(aa):\n    if aa and aa > 1 or aa < 0:\n        return 1\n    return [b for b in aa if b]\n", 6),
        ("max_complexity", "def f(aa):\n    def g():\n        while aa: pass\n    return 1 if aa else 2\n", 2),
        ("max_nesting", "for i in a:\n    for j in b:\n        if i:\n            c()\n", 3),
        ("max_nesting", "if a:\n    b()\nelif c:\n    d()\nelif e:\n    f()\nelse:\n    g()\n", 1),
        ("max_nesting", "class A:\n    def f(self):\n        def g():\n            try:\n                pass\n            except E:\n                h()\n", 1),
        ("largest_expression", "total = " + " + ".join(["a"] * 50), 100),
        ("largest_expression", "table = [" + "(1, 2), " * 100 + "]", 1),
        ("long_lines", "# " + "x" * 99 + "\nword = '" + "y" * 91 + "'\nvalue = 1\n", 1),
        ("joined_statements", "aa = 1; bb = 2; cc = 3\nif aa: bb()\n", 3),
        ("poor_names", "a = 1\nb, c = 1, 2\nfor i in a:\n    pass\nx = [y for y in a]\nf = lambda z: z\n", 5),
        ("poor_names", "def doIt(n, nums, *, K): pass\nclass my_class: pass\nmyVar = 1\nMAX_SIZE = Point = 2\n_ = 0\n", 5),
        ("unused_names", "import os, sys as system\nfrom x import y, z as w\nprint(y)\n", 3),
        ("unused_names", "from __future__ import annotations\nimport os.path\nprint(os.path)\n", 0),
        ("unused_names", "def f():\n    left = 1\n    first, second = 1, 2\n    return first\n", 1),
        ("unused_names", "class A:\n    size: int = 3\nprint(A().size)\n", 0),
        ("bare_excepts", "try:\n    a()\nexcept:\n    b()\ntry:\n    a()\nexcept KeyError:\n    pass\ntry:\n    a()\nexcept OSError:\n    b()\n", 2),
        ("repeated_statements", "items.append(first)\n" * 4 + "a = 1\n" * 9, 3),
        ("repeated_statements", "value = compute(1); value = compute(1)\n", 1),
        ("undocumented", "def f():\n" + "    a()\n" * 8 + "def g():\n    '''Doc.'''\n" + "    a()\n" * 8 + "def h():\n    a()\n", 1),
        ("padding", "# a\n" * 9 + "value = 1\n", 8),
        ("padding", "def f():\n    '''Doc.\n\n    More.\n    '''\n    return 1\n", 1),
        ("padding", "value = 1  # a\n" * 3, 0),
    ],
)  # fmt: skip
def test_each_metric_counts_what_it_says(name: str, source: str, value: float) -> None:
    assert metrics(source)[name] == value


MESS = "import os\ndef F(a,b):\n  x=1;y=2\n  try:\n    if a:\n      if b:\n        for i in a:\n          while b:\n            if i:\n              return x\n  except: pass\n"


@pytest.mark.parametrize(
    "padding", ["# A helpful comment.\n" * 50, '"""Text."""\n' * 30, "value = 1\n" * 40, CLEAN * 5]
)
def test_what_is_added_around_a_mess_makes_nothing_better(padding: str) -> None:
    before, after = metrics(MESS), metrics(MESS + padding)
    assert all(after[name] >= before[name] for name in before)
    assert readability(after) <= readability(before) < 0.9


def statements() -> st.SearchStrategy[str]:
    lines = st.sampled_from(["aa = 1\n", "import os\n", "x = y = 2\n", "def f(n):\n    return n\n", "for i in range(3):\n    print(i)\n", "# note\n",
                             "try:\n    go()\nexcept:\n    pass\n", "'''doc'''\n", "class A:\n    b: int = 1\n", "a; b\n", "with f() as g: g.h()\n"])  # fmt: skip
    return st.lists(lines, max_size=8).map("".join)


@settings(max_examples=50)
@given(statements(), statements())
def test_metrics_never_fall_when_code_is_added_but_for_padding_and_names_that_are_read_now(a: str, b: str) -> None:
    before, after = metrics(a), metrics(a + b)
    assert all(after[name] >= before[name] for name in before if name not in ("padding", "unused_names"))


@given(st.text(alphabet="ab =\n\t():[]'\"#\\\0\r\f;.if1\u2028", max_size=60))
def test_any_text_is_measured_or_is_no_program(source: str) -> None:
    found = measure(source)
    assert not found or set(found) == set(READABILITY_SCALES)


@pytest.mark.parametrize(
    "source", ["def", "\0", "(" * 300 + ")" * 300, "-" * 100_000 + "1", "\ud800", "x = '\\d'\n" + "1+" * 20_000 + "1"],
    ids=["syntax", "nul", "brackets", "minus", "surrogate", "sum"],
)  # fmt: skip
def test_a_program_that_does_not_parse_has_no_metrics(source: str) -> None:
    assert measure(source) in ({}, measure(source))
    assert in_range(readability(measure(source)))


@pytest.mark.timeout(60)  # what grows faster than its input takes hours
def test_a_large_program_is_measured_in_bounded_time() -> None:
    source = "".join(f"def helper_{i}(value):\n    total = value + {i}\n    return total * 2\n\n\n" for i in range(700))
    assert metrics(source)["longest_function"] == 2
    assert metrics("x=1;" * 16_000 + "\n")["joined_statements"] == 15_999
    assert measure(source * 2) == {}


def test_the_guests_file_loads_alone_and_without_ast() -> None:
    path = Path(str(guest.__file__))
    code = f"import sys\nsource = open({str(path)!r}).read()\nscope = {{}}\nexec(compile(source, 'r', 'exec'), scope)\nassert 'ast' not in sys.modules\nprint(scope['measure']('a = 1')['poor_names'])"
    shown = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "1.0\n"
