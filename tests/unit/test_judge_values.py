"""The border of the sandbox: what crosses it, what is refused, and which form a suite takes."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from enum import IntEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.graders.assert_plans import compile_suite
from services.reward.sandbox.values import (
    CandidateRaised,
    Decoder,
    Encoder,
    Opaque,
    ValueRefused,
    frame_size,
    pack,
    read_reply,
    unpack,
)

hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=20),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=4),
    max_leaves=8,
)
plain = st.recursive(
    hashable | st.complex_numbers(allow_nan=False) | st.fractions(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(hashable, inner, max_size=4) | st.sets(hashable, max_size=4)
    ),
    max_leaves=20,
)
trees: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.text(max_size=5)
    | st.sampled_from(list("fltszqdibycrDFIo")),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=20,
)


def through(value: Any) -> Any:
    return Decoder().decode(unpack(pack(Encoder().encode(value))[4:]))


def typed(value: Any) -> str:
    if isinstance(value, set | frozenset):
        return f"{type(value)}{sorted(map(typed, value))}"
    if isinstance(value, list | tuple):
        return f"{type(value)}{list(map(typed, value))}"
    if isinstance(value, dict):
        return f"{[(typed(k), typed(v)) for k, v in value.items()]}"
    return repr(value)


@given(plain)
def test_plain_values_come_back_equal_and_of_the_same_types(value: Any) -> None:
    assert through(value) == value
    assert typed(through(value)) == typed(value)


@pytest.mark.parametrize(
    "value",
    [math.inf, -math.inf, -0.0, 2**200, -(2**63), 2**63, Decimal("1.50"), range(3), "\ud800\0", bytearray(b"a")],
)
def test_edges_come_back_as_they_were(value: Any) -> None:
    assert repr(through(value)) == repr(value)


def test_nan_stays_nan_and_equals_nothing() -> None:
    assert math.isnan(through(math.nan))
    assert through(math.nan) != through(math.nan)


def test_iterators_and_views_keep_their_nature() -> None:
    assert list(through(map(str, [1, 2]))) == ["1", "2"]
    assert through(iter([1])) != [1]
    assert through({1: 2}.keys()) == {1}
    assert through({1: 2}.items()) == {(1, 2)}
    assert list(through({1: 2}.values())) == [2]
    assert through(deque([1])) == deque([1])
    assert through(deque([1])) != [1]


class Color(IntEnum):
    RED = 3


Point = namedtuple("Point", "x y")


class Seven(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class Liar(list):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([1, 2, 3])

    def __len__(self) -> int:
        return 3

    def __eq__(self, other: object) -> bool:
        return True


@pytest.mark.parametrize(
    ("value", "base"),
    [(Color.RED, 3), (Point(1, 2), (1, 2)), (Counter("aa"), {"a": 2}), (OrderedDict(a=1), {"a": 1}), (defaultdict(int, a=1), {"a": 1}),
     (Seven(7), 7), (Liar([9]), [9])],
)  # fmt: skip
def test_subclasses_cross_as_their_base_whatever_they_say(value: Any, base: Any) -> None:
    assert through(value) == base
    assert type(through(value)) is type(base)


def test_an_object_becomes_a_handle_that_equals_nothing() -> None:
    class AlwaysEqual:
        def __eq__(self, other: object) -> bool:
            return True

    handles: list[Any] = []
    came = Decoder().decode(Encoder(handles).encode([AlwaysEqual()]))[0]
    assert isinstance(came, Opaque)
    assert len(handles) == 1
    assert came != 3
    assert came != "x"
    with pytest.raises(ValueRefused):
        Encoder().encode(AlwaysEqual())


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [nested(200), [0] * 300_000, 1 << (1 << 21), itertools.count()], ids=["deep", "wide", "int", "endless"]
)
def test_values_past_a_bound_are_refused(value: Any) -> None:
    with pytest.raises(ValueRefused):
        Encoder([]).encode([value])


def test_a_list_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueRefused):
        Encoder().encode(value)


@given(trees)
def test_any_tree_decodes_or_is_refused(tree: Any) -> None:
    with contextlib.suppress(ValueRefused):
        Decoder().decode(tree)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_reply_or_are_refused(body: bytes) -> None:
    with pytest.raises((ValueRefused, CandidateRaised)):
        read_reply(body, Decoder())


@pytest.mark.parametrize(
    "body",
    [b"NaN", b"1.5", b"[" * 100_000, b"9" * 4000, b'["value",["r",0,9000000000,1],null]', b'["value",["s",[["l",[]]]],null]',
     b'["value",["f","nope"],null]', b'["value",1]', b'["value",["D","1e99999999999999999999"],null]', b"\xff"],
)  # fmt: skip
def test_hostile_replies_are_refused(body: bytes) -> None:
    with pytest.raises(ValueRefused):
        read_reply(body, Decoder())


def test_a_set_made_to_collide_is_refused_fast() -> None:
    prime = 2**61 - 1
    tree = ["s", [["i", hex(1 + prime * i)] for i in range(2, 50_000)]]
    with pytest.raises(ValueRefused, match="hash"):
        Decoder().decode(tree)


def test_a_frame_over_the_bound_is_refused() -> None:
    with pytest.raises(ValueRefused):
        frame_size(b"\xff\xff\xff\xff")
    with pytest.raises(ValueRefused):
        pack("x" * (9 << 20))


def test_a_raised_reply_names_a_builtin_or_becomes_exception() -> None:
    for name, expected in (
        ("ValueError", ValueError),
        ("print", Exception),
        ("nope", Exception),
        ("__import__", Exception),
    ):
        with pytest.raises(CandidateRaised) as info:
            read_reply(json.dumps(["raised", name, "x"]).encode(), Decoder())
        assert info.value.builtin is expected


# --- suites ---


@pytest.mark.parametrize(
    "code",
    ["assert f(1) == 2", "assert set(f([1])) == set([1])", "import math\nassert math.isclose(f(1), 0.5, rel_tol=1e-3)",
     "assert abs(f(2) - 1.5) < 10 ** -6", "assert not f(1)", "assert f(1)", "assert sorted(f(1)) == [1]", "assert f(f(1)) == 2",
     "assert f(1)[0] == 2, 'text'", "assert f('a' * 10) in (1, 2) and f(x=2) is None", "assert f(-1) == [[1]] * 2"],
)  # fmt: skip
def test_plain_asserts_are_evaluated_inline(code: str) -> None:
    suite = compile_suite("asserts", "f", code)
    assert suite.inline is not None
    assert len(suite.inline) == suite.num_asserts == 1


@pytest.mark.parametrize(
    "code",
    ["x = f(1)\nassert x == 2", "for i in range(3):\n    assert f(i) == i", "assert [f(i) for i in (1, 2)] == [1, 2]",
     "assert (lambda: f(1))() == 1", "assert f(1) * 10**9 == 1", "assert f(1).__class__", "import os\nassert f(1) == os.getpid()",
     "assert open('x') == f(1)", "assert eval('1') == f(1)", "assert f(1) == f'{f(2)}'"],
)  # fmt: skip
def test_anything_else_goes_to_the_tests_own_process(code: str) -> None:
    assert compile_suite("asserts", "f", code).inline is None


def test_names_that_the_tests_do_not_define_are_the_candidates() -> None:
    code = "import math\nK = 3\ndef helper(a):\n    return decode(a) + K\ndef check(candidate):\n    assert candidate(encode(1)) == helper(math.pi)"
    suite = compile_suite("check", "f", code)
    assert suite.names == ("decode", "encode", "f")
    assert suite.parameter == "candidate"


@pytest.mark.parametrize(
    ("kind", "code"),
    [("asserts", "x = 1"), ("asserts", "assert True"), ("asserts", "assert f(1) =="), ("check", "assert f(1) == 2"), ("asserts", "\0"),
     ("check", "def check(candidate):\n    pass"), ("check", "def check(a, b):\n    assert a(1) == b"), ("asserts", "(" * 500 + ")" * 500)],
)  # fmt: skip
def test_suites_that_test_nothing_or_do_not_parse_are_refused(kind: str, code: str) -> None:
    with pytest.raises(ValueError, match=r"tests|check|suite"):
        compile_suite(kind, "f", code)


@pytest.mark.parametrize(
    ("code", "ahead"),
    [
        ("assert f(1, 2) == 3\nassert f(3, 4) == 7", True),
        ("assert f([3, 1, 2]) == 6\nassert f(x='ab') is None", True),
        ("assert f('abc') == 'cba'\nassert f('cba') == 'abc'", False),
        ("assert f([1, 2]) == [3, 4]\nassert f([3, 4]) == [1, 2]", False),
        ("assert f(1)['key'] == (10, 20)\nassert f((10, 20)) == 1", False),
        ("assert f(3) == 123456\nassert f(123456) == 3", False),
        ("assert f(3) == 8\nassert g(8) == 3", False),
        ("assert f(f(1)) == 1", False),
        ("assert f(1) or f(2)", False),
        ("assert 1 < f(1) < f(2)", False),
        ("assert (f(1) if f(2) else 0) == 0", False),
        ("assert (f(1) == 1) and True", True),
    ],
)
def test_calls_are_sent_ahead_only_where_no_argument_tells_an_answer(code, ahead):
    plan = compile_suite("asserts", "f", code)
    assert plan.inline is not None
    assert (plan.calls is not None) is ahead
