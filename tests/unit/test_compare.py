"""What counts as a right answer: text and values."""

from __future__ import annotations

import math
import random
from collections import deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.suites import Compare
from services.reward.compare.text import text_problem
from services.reward.compare.values import value_problem
from services.reward.sandbox.values import Opaque

DEFAULT = Compare()
TOKENS = Compare(whitespace="tokens")
EXACT = Compare(whitespace="exact")
SHUFFLED = Compare(any_order=True)
LOOSE = Compare(ignore_case=True)
EVERY = [
    Compare(whitespace=whitespace, any_order=any_order, ignore_case=ignore_case)
    for whitespace in ("lines", "tokens", "exact")
    for any_order in (False, True)
    for ignore_case in (False, True)
]

tokens = st.text(alphabet="ab01.e-+nif", min_size=1, max_size=6)
lines = st.lists(tokens, min_size=1, max_size=4).map(" ".join)
texts = st.lists(lines, min_size=1, max_size=6)


def right(output: bytes | str, expected: str, compare: Compare = DEFAULT) -> bool:
    problem = text_problem(output.encode() if isinstance(output, str) else output, expected, compare)
    assert len(problem) < 400
    problem.encode("utf-8")
    return not problem


# --- text ---


@pytest.mark.parametrize(
    ("output", "expected"),
    [("5 3 1 \n", "5 3 1"), ("5 3 1", "5 3 1 \n"), ("5\n\n\n", "5\n"), ("5\r\n6\r\n", "5\n6\n"), ("", ""), ("\n \n", ""), ("a\n\nb", "a\n\nb\n"),
     ("a\tb", "a b"), ("  a", "a"), ("é\n", "é")],
)  # fmt: skip
def test_blanks_and_line_ends_do_not_count(output: str, expected: str) -> None:
    assert right(output, expected)


@pytest.mark.parametrize(
    ("output", "expected"),
    [("1 2", "1 2 3"), ("1 2 3 4", "1 2 3"), ("1\n2", "1\n2\n3"), ("1\n2\n3\n4", "1\n2\n3"), ("", "1\n2\n3"), ("1", ""), ("invalid", "valid"),
     ("valid", "invalid"), ("12", "1 2"), ("1 1 2", "1\n1\n2"), ("a\nb", "a\n\nb"), ("\na", "a"), ("a\u00a0b", "a b"), ("a\x1cb", "a b"),
     ("3\0", "3"), ("3 \0", "3"), ("yes", "Yes"), ("\ufeff3", "3"), ("a\rb", "a\nb")],
)  # fmt: skip
def test_whatever_else_differs_is_wrong(output: str, expected: str) -> None:
    assert not right(output, expected)


def test_line_breaks_are_blanks_in_token_mode_and_nothing_is_in_exact_mode() -> None:
    assert right("1 1 2", "1\n1\n2", TOKENS)
    assert not right("1 1", "1\n1\n2", TOKENS)
    assert not right("1 1 2 2", "1\n1\n2", TOKENS)
    assert right("a \nb", "a \nb", EXACT)
    assert not right("a \nb\n", "a \nb", EXACT)
    assert not right("a\r\n", "a\n", EXACT)
    assert not right("0.50", "0.5", EXACT)


@pytest.mark.parametrize(
    ("output", "expected"),
    [("0.33333333331", "0.333333333"), ("1e-12", "0.0"), ("-0.0", "0.0"), ("YES 0.5000001", "YES 0.5"), ("1", "1.0"), ("100000", "1e5"), ("1.", "1.0"),
     (".5", "0.5"), ("1e300", "1.0000000001E300"), ("+2.5", "2.5"), ("nan", "nan"), ("inf", "inf"), ("0." + "3" * 800, "0.333333333"),
     ("1e999", "1e999"), ("1.2.3", "1.2.3"), ("1000000.5", "1000001.0")],
)  # fmt: skip
def test_numbers_are_equal_within_the_tolerance_where_the_expected_one_is_a_float(output: str, expected: str) -> None:
    assert right(output, expected)


@pytest.mark.parametrize(
    ("output", "expected"),
    [("nan", "1.0"), ("inf", "1e300"), ("1e999", "1.0"), ("1e999", "1e998"), ("-inf", "-1e300"), ("infinity", "inf"), ("Infinity", "1.5"), ("1_0.0", "10.0"),
     ("0x1p0", "1.0"), ("0x10", "16.0"), ("True", "1.0"), ("１.0", "1.0"), ("1.0", "1"), ("1e0", "1"), ("01", "1"), ("+1", "1"), ("1.0000021", "1.0"),
     ("1.0", "nan"), ("1.0f", "1.0"), ("", "1.0"), (".", "0.0"), ("1.2.3", "1.2.4"), ("1,5", "1.5"), ("--1.0", "1.0"), ("1e5", "100000")],
)  # fmt: skip
def test_a_number_is_plain_and_an_integer_exact(output: str, expected: str) -> None:
    assert not right(output, expected)


def test_a_tolerance_of_infinite_reach_still_wants_a_number() -> None:
    far = Compare(rtol=1e300)
    assert right("2.0", "1e200", far)
    assert not right("inf", "1e200", far)
    assert not right("x", "1e200", far)


@given(st.floats(-1e6, 1e6), st.floats(-2, 2))
def test_the_edge_of_the_tolerance_is_where_the_formula_puts_it(expected: float, share: float) -> None:
    compare = Compare(atol=1e-3, rtol=1e-3)
    limit = max(1e-3, 1e-3 * abs(expected))
    value = expected + share * limit
    inside = abs(value - expected) <= limit
    spelled = repr(expected)  # always with a point or an exponent
    assert right(repr(value), spelled, compare) == inside
    assert (not value_problem(value, expected, compare, as_json=True)) == inside


def test_the_case_counts_unless_the_suite_says_otherwise() -> None:
    assert right("YES Straße", "yes STRASSE", LOOSE)
    assert not right("NO", "yes", LOOSE)
    assert right("YES", "yes", Compare(ignore_case=True, whitespace="exact"))


def test_lines_in_any_order_are_a_multiset() -> None:
    assert right("b\na\nb\n", "a\nb\nb", SHUFFLED)
    assert right("\nb\n\na", "a\n\nb", SHUFFLED)
    assert not right("a\na\nb", "a\nb\nb", SHUFFLED)
    assert not right("2 1", "1 2", SHUFFLED)
    assert right("2 1", "1\n2", Compare(any_order=True, whitespace="tokens"))
    assert right("0.30000001 b\n0.3 a", "0.3 b\n0.30000001 a", SHUFFLED)
    assert right("1 x\n2 y", "2.0 y\n1.0 x", SHUFFLED)
    assert not right("5.0\n6", "5\n6", SHUFFLED)
    assert not right("0.5\n0.5", "0.5\n0.6", SHUFFLED)


def test_many_lines_in_any_order_with_noise_in_them_are_found() -> None:
    rng = random.Random(1)
    rows = [(rng.choice([0.0, 0.5, 1 / 3]), rng.randrange(10**6), rng.random()) for _ in range(3000)]
    expected = "\n".join(f"{a:.9f} {b} {c:.9f}" for a, b, c in rows)
    rng.shuffle(rows)
    output = "\n".join(f"{a + rng.uniform(-4e-7, 4e-7):.12f} {b} {c:.12f}" for a, b, c in rows)
    assert right(output, expected, SHUFFLED)
    assert not right(output[:-14] + f"{rng.random() + 2:.12f}", expected, SHUFFLED)


@given(texts, st.sampled_from(EVERY))
def test_a_text_equals_itself(parts: list[str], compare: Compare) -> None:
    assert right("\n".join(parts), "\n".join(parts), compare)


@given(texts, texts)
def test_without_numbers_it_does_not_matter_which_text_is_the_expected_one(a: list[str], b: list[str]) -> None:
    first, second = ("\n".join(part).replace(".", "x").replace("e", "x") for part in (a, b))
    assert right(first, second) == right(second, first) == (first == second)


@given(texts, st.randoms(use_true_random=False))
def test_any_order_takes_every_permutation(parts: list[str], rng: random.Random) -> None:
    moved = list(parts)
    rng.shuffle(moved)
    assert right("\n".join(moved), "\n".join(parts), SHUFFLED)
    assert right(" ".join(moved), "\n".join(parts), Compare(any_order=True, whitespace="tokens"))


@given(texts, st.data(), st.sampled_from(EVERY))
def test_a_line_dropped_doubled_or_cut_is_wrong(parts: list[str], data: st.DataObject, compare: Compare) -> None:
    index = data.draw(st.integers(0, len(parts) - 1))
    expected = "\n".join(parts)
    assert not right("\n".join(parts[:index] + parts[index + 1 :]), expected, compare)
    assert not right("\n".join([*parts[: index + 1], *parts[index:]]), expected, compare)
    assert not right("\n".join([*parts, "x"]), expected, compare)
    assert not right("\n".join([*parts[:-1], parts[-1] + "x"]), expected, compare)


@given(st.binary(max_size=200), st.text(max_size=50), st.sampled_from(EVERY))
def test_any_bytes_are_right_or_wrong(output: bytes, expected: str, compare: Compare) -> None:
    right(output, expected, compare)


def test_an_output_that_is_not_utf8_is_wrong_whatever_is_expected() -> None:
    for compare in EVERY:
        assert not right(b"\xff\xfe3\n", "3", compare)
        assert not right(b"\xed\xa0\x80", "\ud800", compare)
        assert not right(b"3", "\ud800", compare)


def test_the_sentence_says_where_and_what() -> None:
    assert text_problem(b"1\n2 5\n", "1\n2 6", DEFAULT) == "Line 2: '5', expected '6'."
    assert text_problem(b"1\n", "1\n2", DEFAULT) == "The output has 1 line, expected 2."
    assert text_problem(b"1 2", "1", DEFAULT) == "Line 1 has more than the expected 1 token."
    assert text_problem(b"a\0" * 500, "b", DEFAULT).startswith("Line 1: 'a\\x00a")
    assert text_problem(b"a", "a\n", EXACT) == "Line 1: 'a', expected 'a\\n'."
    assert text_problem(b"a\nc", "a\nb", SHUFFLED) == "No line of the output is 'b'."


@pytest.mark.parametrize(
    ("output", "expected"),
    [(b"1" * 10**6, "3"), (b"1" * 10**6, "3.0"), (b"1" * 10**6, "1" * (10**6 - 1) + "2"), (b"0." + b"1" * 10**6, "0." + "1" * (10**6 - 1)),
     (b"a " * 500_000, "a"), (b"\n" * 10**6, "a"), (b"a\n" * 500_000, "a"), (b" " * 10**6, "a"), (b"-" * 10**6, "1.0"), (b"1e" * 500_000, "1.0")],
)  # fmt: skip
@pytest.mark.parametrize("compare", EVERY, ids=str)
@pytest.mark.timeout(60)  # what grows faster than its input takes hours
def test_a_megabyte_against_a_short_answer_costs_little(output: bytes, expected: str, compare: Compare) -> None:
    assert not right(output, expected, compare)


@pytest.mark.timeout(60)  # what grows faster than its input takes hours
def test_the_time_for_a_long_answer_grows_with_its_length_only() -> None:
    values = [f"{random.Random(2).random():.9f} {i % 7}" for i in range(10_000)]
    noisy = "\n".join(value.replace(" ", "1 ") for value in reversed(values))
    right(noisy, "\n".join(values), SHUFFLED)
    right("\n".join(f"0.5{i:06}" for i in range(10_000)), "\n".join("0.5" for _ in range(10_000)), SHUFFLED)


# --- values ---


def same(value: Any, expected: Any, compare: Compare = DEFAULT, *, as_json: bool = False) -> bool:
    problem = value_problem(value, expected, compare, as_json=as_json)
    assert len(problem) < 400
    return not problem


NAN = math.nan


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1.0, 1), (1, 1.0), (0.1 + 0.2, 0.3), (NAN, NAN), (math.inf, math.inf), ([NAN], [NAN]), ({1: 2, 3: 4}, {3: 4, 1: 2}), ({1.0: 2}, {1: 2}),
     ({0.1 + 0.2, 1.0}, {0.3, 1}), (frozenset({1}), {1}), ({1: 2}.keys(), {1}), (deque([0.1 + 0.2]), deque([0.3])), (iter([0.1 + 0.2]), iter([0.3])),
     ({1: 0}.values(), {2: 0}.values()), (1 + 1e-9j, 1 + 0j), (1, 1 + 0j), (Decimal("0.3"), 0.1 + 0.2), (Fraction(1, 3), 1 / 3), (Decimal(1), 1),
     (Fraction(1, 2), Decimal("0.5")), (bytearray(b"a"), b"a"), (range(3), range(0, 3, 1)), ([[1, (2.0000000001,)]], [[1.0, (2.0,)]]), ({(0, NAN)}, {(0, NAN)}),
     (None, None), (10**400, 10**400), ("\ud800\0", "\ud800\0"), ({}, {}), (Decimal("NaN"), Decimal("sNaN")), (Decimal("NaN"), NAN)],
)  # fmt: skip
def test_values_that_are_the_same(value: Any, expected: Any) -> None:
    assert same(value, expected)
    assert same([value], [expected])


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, 1), (1, True), (False, 0), ({True: 1}, {1: 1}), ({True}, {1}), (0.1 + 0.2, Fraction(3, 10)), (2.0000000001, 2), (NAN, 1.0), (1.0, NAN), (NAN, None),
     (math.inf, 1e308), (math.inf, -math.inf), (10**400, 1e308), (10**400, math.inf), ("1", 1), (b"a", "a"), ((1, 2), [1, 2]), ([1, 2], {1, 2}), (deque([1]), [1]), (range(2), [0, 1]),
     (iter([1]), [1]), ([1], iter([1])), ([1, 2], [1, 2, 3]), ([1, 2, 3], [1, 2]), ([2, 1], [1, 2]), ({1: 2}, {"1": 2}), ({1: 2}, {1: 3}), ({1: 2}, {2: 2}),
     ({1: 2, 2: 3}, {1: 2}), ("", None), ([], None), (0, None), ({}, set()), ({0.1 + 0.2: 1}, {0.3: 1}), (Decimal("sNaN"), 1.0), (1, Decimal("sNaN")),
     (Decimal("1e999999999"), 1.0), (Decimal("1e999999999"), 1), (Decimal("1e999999999"), Fraction(1, 3)), ({1, 2}, {1, 3}), ({1.0, 2.0}, {1.0, 1.5}), ("a", "A"),
     (Opaque(0, "x"), Opaque(0, "x")), ([Opaque(0, "x")], [1])],
)  # fmt: skip
@pytest.mark.parametrize("compare", [DEFAULT, Compare(any_order=False, atol=0, rtol=0)], ids=["default", "strict"])
def test_values_that_are_not_the_same(value: Any, expected: Any, compare: Compare) -> None:
    assert not same(value, expected, compare)
    assert not same([value], [expected], compare)
    assert not same([[value]], [[expected]], SHUFFLED)


def test_an_object_equals_nothing_not_even_itself() -> None:
    handle = Opaque(0, "Thing")
    for compare in (DEFAULT, SHUFFLED):
        assert not same(handle, handle, compare)
        assert not same([handle], [handle], compare)
        assert not same({handle}, {handle}, compare)
        assert not same({handle: 1}, {handle: 1}, compare)
        assert not same([{1: [handle]}], [{1: [handle]}], compare)


def test_what_json_cannot_say_is_forgiven_where_the_suite_came_as_json() -> None:
    for value, expected in [
        ((1, (2, 3)), [1, [2, 3]]),
        ({1: (2,)}, {"1": [2]}),
        ({None: 1, True: 2, 1.5: 3}, {"null": 1, "true": 2, "1.5": 3}),
        ([{1: 2}], [{"1": 2}]),
    ]:
        assert same(value, expected, as_json=True)
        assert not same(value, expected)
    for value, wrong in [
        ({1, 2}, [1, 2]),
        ({1: 0, "1": 0}, {"1": 0}),
        ({"1": 0}, {"true": 0}),
        ({10**5000: 1}, {"1": 1}),
        (deque([1]), [1]),
        (iter([1]), [1]),
        (True, 1),
        ("1", 1),
    ]:
        assert not same(value, wrong, as_json=True)


def test_any_order_is_about_the_outer_list_only() -> None:
    assert same([[1, 2], [3, 4]], [[3, 4], [1, 2]], SHUFFLED)
    assert not same([[2, 1]], [[1, 2]], SHUFFLED)
    assert not same([1, 1, 2], [1, 2, 2], SHUFFLED)
    assert not same([1, 2], [1, 2, 2], SHUFFLED)
    assert not same([True], [1], SHUFFLED)
    assert same([{"a": [1]}, {2}, None, "x"], ["x", None, {2}, {"a": [1]}], SHUFFLED)
    assert same([(0.3, "b"), (0.1 + 0.2, "a")], [(0.1 + 0.2, "b"), (0.3, "a")], SHUFFLED)
    assert same([[1e-16, "b"], [0.0, "a"]], [[0.0, "a"], [0.0, "b"]], SHUFFLED)
    assert same({(1, 2), (3, 4)}, [[3, 4], [1, 2]], SHUFFLED, as_json=True)
    assert not same({1, 2}, [1, 2], SHUFFLED)
    assert same((2, 1), [1, 2], SHUFFLED, as_json=True)
    assert not same((2, 1), [1, 2], SHUFFLED)
    assert same(5, 5, SHUFFLED)
    assert same(
        [Decimal("1.5"), Fraction(1, 3), math.inf, NAN], [NAN, Decimal("1.50"), Fraction(1, 3), math.inf], SHUFFLED
    )


def test_case_of_strings_is_ignored_where_the_suite_says_so() -> None:
    assert same(["Yes", {"A": "b"}], ["yes", {"a": "B"}], LOOSE)
    assert same(["B", "a"], ["A", "b"], Compare(any_order=True, ignore_case=True))
    assert not same(b"A", b"a", LOOSE)


hashables = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4) | st.fractions()
    | st.decimals(allow_nan=False) | st.just(Decimal("NaN")) | st.complex_numbers(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
values = st.recursive(
    hashables,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(hashables, inner, max_size=3) | st.sets(hashables, max_size=3)
        | st.builds(deque, st.lists(inner, max_size=3)) | st.builds(iter, st.lists(inner, max_size=3))
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=60)
@given(values, st.sampled_from([DEFAULT, SHUFFLED, LOOSE]), st.booleans())
def test_a_value_equals_itself(value: Any, compare: Compare, as_json: bool) -> None:
    assert same(value, value, compare, as_json=as_json)


@given(values, values, st.sampled_from([DEFAULT, SHUFFLED]), st.booleans())
def test_any_two_values_are_the_same_or_not(a: Any, b: Any, compare: Compare, as_json: bool) -> None:
    same(a, b, compare, as_json=as_json)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(alphabet="ab", max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet="ab", max_size=1), inner, max_size=2),
    max_leaves=6,
)


@pytest.mark.parametrize("expected", [[None], [None, None], [False, None], [[], None]])
@pytest.mark.parametrize("value", [[False], [0, None], [None, False], ["", None], [None, []]])
def test_a_missing_none_is_missing_in_any_order(value: Any, expected: Any) -> None:
    assert same(value, expected, SHUFFLED) == (sorted(map(repr, value)) == sorted(map(repr, expected)))


@given(plain, plain, st.sampled_from([DEFAULT, SHUFFLED]))
@example([None, None], [None, False], SHUFFLED)
def test_without_floats_it_does_not_matter_which_value_is_the_expected_one(a: Any, b: Any, compare: Compare) -> None:
    assert same(a, b, compare) == same(b, a, compare)
    assert same(a, b, compare, as_json=True) == same(b, a, compare, as_json=True)


@settings(max_examples=60)
@given(st.lists(values, max_size=6), st.randoms(use_true_random=False))
def test_any_order_of_values_takes_every_permutation(items: list[Any], rng: random.Random) -> None:
    moved = list(items)
    rng.shuffle(moved)
    assert same(moved, items, SHUFFLED)


@settings(max_examples=60)
@given(st.lists(values, min_size=1, max_size=6), st.data(), st.sampled_from([DEFAULT, SHUFFLED]))
def test_an_item_dropped_or_doubled_is_wrong(items: list[Any], data: st.DataObject, compare: Compare) -> None:
    index = data.draw(st.integers(0, len(items) - 1))
    assert not same(items[:index] + items[index + 1 :], items, compare)
    assert not same([*items[: index + 1], *items[index:]], items, compare)


def test_comparing_does_not_use_an_iterator_up() -> None:
    value, expected = iter([1, 2, 3]), iter([2, 3])
    next(value)
    assert same(value, expected)
    assert same(value, expected)


def test_values_too_deep_or_that_hold_themselves_are_wrong_and_nothing_raises() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    knot: list[Any] = []
    knot.append(knot)
    for compare in (DEFAULT, SHUFFLED):
        assert not same(deep, deep, compare)
        assert not same(knot, knot, compare)


@pytest.mark.timeout(60)  # what grows faster than its input takes hours
def test_a_huge_int_against_a_decimal_is_wrong_without_being_written_out() -> None:
    assert not same((1 << (1 << 20)) - 1, Decimal(1))
    assert not same(Decimal("1e315652"), 1 << (1 << 20))
    assert not same(Fraction(1 << (1 << 20), 3), Decimal(1))


def test_the_sentence_says_where_in_the_value_and_what() -> None:
    assert value_problem([1, {"k": [2]}], [1, {"k": [3]}], DEFAULT, as_json=True) == "At [1]['k'][0]: 2, expected 3."
    assert value_problem([1], [2], SHUFFLED, as_json=True) == "At any item: not there, expected 2."
    assert value_problem((1,), [1], DEFAULT, as_json=False) == "The answer: a tuple of 1, expected a list of 1."
    assert value_problem(10**5000, 1, DEFAULT, as_json=False) == "The answer: an int of 16610 bits, expected 1."
    assert value_problem("x" * 1000, Opaque(0, "T"), DEFAULT, as_json=False).endswith(
        "(1000 long), expected an object."
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [([i * (2**61 - 1) for i in range(20_000)], [1] * 20_000), ([0.5 + i * 1e-12 for i in range(20_000)], [0.5] * 20_000),
     ([[i, i / 3] for i in range(10_000)], [[i, i / 3 + 1e-9] for i in reversed(range(10_000))]), ([10**3000 + i for i in range(3000)], [2] * 3000),
     ([float("nan")] * 20_000, [1.0] * 20_000)],
    ids=["collide", "crowded", "noisy", "huge", "nan"],
)  # fmt: skip
@pytest.mark.timeout(60)  # what grows faster than its input takes hours
def test_long_lists_in_any_order_take_bounded_time(value: Any, expected: Any) -> None:
    value_problem(value, expected, SHUFFLED, as_json=True)
