"""Whether a function's answer is the expected value."""

from __future__ import annotations

import copy
import math
from collections import deque
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

from protocol.suites import Compare
from services.reward.compare.matching import close, coarse, unmatched

_MAX_DEPTH = 130  # of values; the sandbox's border lets 128 through
_MAX_DECIMAL_BITS = 20_000  # of an int that a Decimal is compared with: the conversion is quadratic
_MAX_SHOWN_CHARS = 60


class _Difference(NamedTuple):
    path: str
    value: Any
    expected: Any


class _Incomparable(Exception):
    """A value has no order: an object of the candidate's, or one too deep."""


def value_problem(value: Any, expected: Any, compare: Compare, *, as_json: bool) -> str:
    """Why ``value`` isn't ``expected``, or "". Both are plain values; anything else (``Opaque``) equals nothing, itself included.

    Types count as they do for ``==``, but ``bool`` is no number and NaN equals NaN. Numbers are exact unless the expected one is a float
    or complex. A list, a tuple, a deque, a range and an iterator each equal their own kind only; a set equals a frozenset and dict views.
    Dict keys have no tolerance. ``as_json``, where the expected value could only be written as JSON: a tuple is a list, and a key that
    is a number, a bool or None is its JSON text. ``any_order`` is about the items of the expected list or tuple itself; ``as_json``,
    a set is an answer to such a list too.
    """
    try:
        if compare.any_order and type(expected) in (list, tuple):
            found = _any_order_difference(value, expected, compare, as_json)
        else:
            found = _difference(value, expected, compare, as_json, 0)
    except _Incomparable:
        return "The answer holds an object that can't be compared, or is too deep."
    except (ArithmeticError, ValueError, TypeError, RecursionError, MemoryError) as error:
        # Decimal and huge ints have corners that raise; whatever can't be compared is not equal.
        return f"The answer can't be compared ({type(error).__name__})."
    if found is None:
        return ""
    where = f"At {found.path.strip()[:100]}" if found.path else "The answer"
    return f"{where}: {_described(found.value)}, expected {_described(found.expected)}."


def _difference(value: Any, expected: Any, compare: Compare, as_json: bool, depth: int) -> _Difference | None:
    """The first difference, or ``None``."""
    if depth > _MAX_DEPTH:
        raise _Incomparable
    kind = _kind(expected, as_json)
    if kind and kind == _kind(value, as_json):
        if kind in _SEQUENCES:
            return _sequence_difference(value, expected, compare, as_json, depth)
        if kind == "dict":
            return _dict_difference(value, expected, compare, as_json, depth)
        if kind == "set":
            return _set_difference(value, expected, compare, as_json, depth)
        if _same_scalar(kind, value, expected, compare):
            return None
    return _Difference("", value, expected)


_ITERATOR: Any = type(iter([]))
_SEQUENCES = frozenset({"list", "tuple", "deque", "range", "iterator", "values"})
_KINDS: dict[type, str] = {
    type(None): "none", bool: "bool", int: "number", float: "number", complex: "number", Decimal: "number", Fraction: "number",
    str: "str", bytes: "bytes", bytearray: "bytes", list: "list", tuple: "tuple", deque: "deque", range: "range",
    _ITERATOR: "iterator", type({}.values()): "values", dict: "dict",
    set: "set", frozenset: "set", type({}.keys()): "set", type({}.items()): "set",
}  # fmt: skip


def _kind(value: Any, as_json: bool) -> str:
    """What can be equal has one name; "" equals nothing."""
    kind = _KINDS.get(type(value), "")
    return "list" if as_json and kind == "tuple" else kind


def _items(value: Any) -> list[Any]:
    """The items of a sequence. An iterator is left as it was."""
    return list(copy.copy(value) if type(value) is _ITERATOR else value)


def _same_scalar(kind: str, value: Any, expected: Any, compare: Compare) -> bool:
    if kind == "number":
        return _same_number(value, expected, compare)
    if kind == "str" and compare.ignore_case:
        return str(value).casefold() == str(expected).casefold()
    return bool(value == expected)


def _same_number(value: Any, expected: Any, compare: Compare) -> bool:
    if _is_nan(value) or _is_nan(expected):  # first: to compare a signalling one raises
        return _is_nan(value) and _is_nan(expected)
    if type(expected) is complex or (type(expected) is float and type(value) is complex):
        a, b = complex(value), complex(expected)
        return close(a.real, b.real, compare) and close(a.imag, b.imag, compare)
    if Decimal in (type(value), type(expected)) and max(_num_bits(value), _num_bits(expected)) > _MAX_DECIMAL_BITS:
        return False
    if value == expected:
        return True
    if type(expected) is not float:
        return False
    try:
        return close(float(value), expected, compare)
    except OverflowError:
        return False


def _num_bits(value: Any) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length()) if type(value) in (int, Fraction) else 0


def _is_nan(value: Any) -> bool:
    return (type(value) is float and math.isnan(value)) or (type(value) is Decimal and value.is_nan())


def _sequence_difference(value: Any, expected: Any, compare: Compare, as_json: bool, depth: int) -> _Difference | None:
    ours, theirs = _items(value), _items(expected)
    if len(ours) != len(theirs):
        return _Difference("", value, expected)
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if found := _difference(a, b, compare, as_json, depth + 1):
            return found._replace(path=f"[{index}]{found.path}")
    return None


def _dict_difference(value: Any, expected: Any, compare: Compare, as_json: bool, depth: int) -> _Difference | None:
    if len(value) != len(expected):
        return _Difference("", value, expected)

    def pairs(mapping: dict[Any, Any]) -> list[tuple[Any, Any, Any]]:
        keyed = [(_key(_json_key(k) if as_json else k, compare, as_json, depth + 1), k, v) for k, v in mapping.items()]
        return sorted(keyed, key=lambda pair: pair[0])

    for (key, name, item), (other_key, other_name, other) in zip(pairs(value), pairs(expected), strict=True):
        if key != other_key:
            return _Difference(".keys()", name, other_name)
        if found := _difference(item, other, compare, as_json, depth + 1):
            return found._replace(path=f"[{_described(other_name)}]{found.path}")
    return None


def _json_key(key: Any) -> Any:
    """A dict key as ``json.dumps`` would write it."""
    if key is None or type(key) is bool:
        return {None: "null", True: "true", False: "false"}[key]
    if type(key) is int:
        return str(key) if key.bit_length() < 4096 else key  # longer ones might not convert, and are no one's key
    return repr(key) if type(key) is float else key


def _set_difference(value: Any, expected: Any, compare: Compare, as_json: bool, depth: int) -> _Difference | None:
    ours, theirs = list(value), list(expected)
    if len(ours) != len(theirs):
        return _Difference("", value, expected)
    return _shuffled_difference(ours, theirs, compare, as_json, depth)


def _any_order_difference(value: Any, expected: Any, compare: Compare, as_json: bool) -> _Difference | None:
    same = _kind(value, as_json) == _kind(expected, as_json) or (as_json and _kind(value, as_json) == "set")
    if not same or len(value) != len(expected):
        return _Difference("", value, expected)
    return _shuffled_difference(list(value), list(expected), compare, as_json, 0)


def _shuffled_difference(
    ours: list[Any], theirs: list[Any], compare: Compare, as_json: bool, depth: int
) -> _Difference | None:
    extra, missing = _without_common(
        sorted(((_key(item, compare, as_json, depth + 1), item) for item in ours), key=lambda pair: pair[0]),
        sorted(((_key(item, compare, as_json, depth + 1), item) for item in theirs), key=lambda pair: pair[0]),
    )
    missed = unmatched(
        sorted(extra, key=lambda item: _key(item, compare, as_json, depth + 1, rounded=True)),
        sorted(missing, key=lambda item: _key(item, compare, as_json, depth + 1, rounded=True)),
        lambda a, b: _difference(a, b, compare, as_json, depth + 1) is None,
    )
    return _Difference(" any item", _Missing, missed[0]) if missed else None


class _Missing:
    """Stands for the item that isn't there."""


def _without_common(ours: list[tuple[Any, Any]], theirs: list[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Two sorted lists of (key, item) without the pairs of equal keys. No hashing: a candidate could choose values that collide."""
    extra, missing = [], []
    i = j = 0
    while i < len(ours) and j < len(theirs):
        a, b = ours[i][0], theirs[j][0]
        if a == b:
            i, j = i + 1, j + 1
        elif a < b:
            extra.append(ours[i][1])
            i += 1
        else:
            missing.append(theirs[j][1])
            j += 1
    return extra + [item for _, item in ours[i:]], missing + [item for _, item in theirs[j:]]


def _key(value: Any, compare: Compare, as_json: bool, depth: int, *, rounded: bool = False) -> Any:
    """A key that all plain values can be sorted by; equal keys, equal values (except ``rounded``, which is for sorting only).

    Raises:
        _Incomparable: not a plain value, or too deep.
    """
    if depth > _MAX_DEPTH:
        raise _Incomparable
    kind = _kind(value, as_json)
    if kind == "number":
        return _number_key(value, compare, rounded)
    if kind == "str":
        return (kind, value.casefold() if compare.ignore_case else value)
    if kind in ("none", "bool", "bytes"):
        return (kind, bytes(value) if kind == "bytes" else bool(value))
    if kind in _SEQUENCES:
        return (kind, [_key(item, compare, as_json, depth + 1, rounded=rounded) for item in _items(value)])
    if kind == "set":
        return (kind, sorted(_key(item, compare, as_json, depth + 1, rounded=rounded) for item in value))
    if kind == "dict":
        keys = [_key(_json_key(k) if as_json else k, compare, as_json, depth + 1) for k in value]
        items = [_key(item, compare, as_json, depth + 1, rounded=rounded) for item in value.values()]
        return (kind, sorted(zip(keys, items, strict=True)))
    raise _Incomparable


def _number_key(value: Any, compare: Compare, rounded: bool) -> Any:
    """Numbers sort by value; those that have no place in that order come by themselves."""
    if type(value) is complex:
        if value.imag:
            return ("number, complex", [_number_key(part, compare, rounded) for part in (value.real, value.imag)])
        value = value.real
    if _is_nan(value):
        return ("number, nan", 0)
    if type(value) is Decimal:
        if not value.is_finite() or abs(value.adjusted()) > 1000:
            return ("number, decimal", str(value))
        value = Fraction(value)  # a Decimal and a Fraction have no order
    return ("number", coarse(value, compare) if rounded and type(value) is float else value)


def _described(value: Any) -> str:
    """A short text for any value, hostile or not."""
    kind = type(value)
    if value is _Missing:
        return "not there"
    if kind is int and value.bit_length() > 200:
        return f"an int of {value.bit_length()} bits"
    if value is None or kind in (bool, int, float, complex):
        return repr(value)
    if kind in (str, bytes, bytearray):
        return repr(value[:_MAX_SHOWN_CHARS]) + ("" if len(value) <= _MAX_SHOWN_CHARS else f"... ({len(value)} long)")
    if kind in (Decimal, Fraction):
        return f"a {kind.__name__}"
    if kind in _KINDS and hasattr(kind, "__len__"):
        return f"a {kind.__name__} of {len(value)}"
    return "an iterator" if kind is _ITERATOR else "an object"
