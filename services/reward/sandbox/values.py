"""Values that cross the sandbox's border: exact types, tagged JSON, bounded; and the frames that carry them.

Used on both sides, so standard library only (a worker loads this file by path). Scalars ``None``, ``bool``, ``str`` and ints
below 2**63 are plain JSON; everything else is ``[tag, ...]``. Nothing here runs code of the other side: no pickle, no class
looked up by a name, subclasses are rebuilt from their base type. What has no encoding becomes an ``Opaque`` handle.
"""

from __future__ import annotations

import builtins
import itertools
import json
import sys
from collections import deque
from typing import Any

MAX_DEPTH = 64
MAX_NODES = 200_000
MAX_INT_BITS = 1 << 20
MAX_FRAME_BYTES = 8 << 20
_SMALL_INT = 1 << 63
_MAX_EXPONENT = 100_000
_MAX_COLLISIONS = 64  # elements of one set or dict that share a hash: more is an attack on the judge's time

_ITERATORS = tuple(
    {type(x) for x in (iter([]), iter(()), iter(set()), iter({}), iter(""), iter(range(0)), reversed([]), reversed(()))}
    | {map, filter, zip, enumerate, reversed, type(_ for _ in ())}
    | {item for item in vars(itertools).values() if isinstance(item, type) and hasattr(item, "__next__")}
)
_KEYS: type = type({}.keys())
_VALUES: type = type({}.values())
_ITEMS: type = type({}.items())
_SEQUENCES: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "z", deque: "q"}


class ValueRefused(ValueError):
    """A value has no encoding or passes a bound, or bytes do not decode to one."""


class Opaque:
    """A handle of an object that stays in the candidate's process. Equal to nothing but itself."""

    def __init__(self, number: int, type_name: str) -> None:
        self.number = number
        self.type_name = type_name


class Encoder:
    """``encode(value)`` gives the JSON tree. ``handles`` (candidate's side only) keeps objects that have no encoding."""

    def __init__(self, handles: list[Any] | None = None) -> None:
        self.handles = handles

    def encode(self, value: Any) -> Any:
        """The JSON tree of ``value``.

        Raises:
            ValueRefused: no encoding (and no handles here), too deep, or too large.
        """
        self.nodes = 0
        return self._encode(value, 0)

    def _encode(self, value: Any, depth: int) -> Any:
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            raise ValueRefused("The value is too deep or too large.")
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -_SMALL_INT < value < _SMALL_INT else self._large_int(value)
        if kind is float:
            return ["f", value.hex()]
        if kind in _SEQUENCES:
            return [_SEQUENCES[kind], [self._encode(item, depth + 1) for item in value]]
        if kind is dict:
            return ["d", [[self._encode(k, depth + 1), self._encode(v, depth + 1)] for k, v in value.items()]]
        return self._rare(value, kind, depth)

    @staticmethod
    def _large_int(value: int) -> list[str]:
        if value.bit_length() > MAX_INT_BITS:
            raise ValueRefused("The integer is too large.")
        return ["i", hex(value)]

    def _rare(self, value: Any, kind: type, depth: int) -> Any:
        if kind is bytes or kind is bytearray:
            return ["b" if kind is bytes else "y", value.hex()]
        if kind is complex:
            return ["c", value.real.hex(), value.imag.hex()]
        if kind is range and len(value) <= MAX_NODES and abs(value.start) < _SMALL_INT > abs(value.stop):
            return ["r", value.start, value.stop, value.step]
        if kind is _loaded("decimal", "Decimal"):
            return ["D", str(value)]
        if kind is _loaded("fractions", "Fraction"):
            return ["F", self._encode(value.numerator, depth + 1), self._encode(value.denominator, depth + 1)]
        for view, tag in ((_KEYS, "dk"), (_VALUES, "dv"), (_ITEMS, "di")):
            if kind is view:
                return [tag, self._encode(list(value), depth + 1)]
        if kind in _ITERATORS:
            return ["I", self._encode(self._drain(value), depth + 1)]
        if isinstance(value, Opaque):
            return ["o", value.number, value.type_name[:80]]
        return self._subclass(value, kind, depth)

    @staticmethod
    def _drain(value: Any) -> list[Any]:
        items = []
        for item in value:
            items.append(item)
            if len(items) > MAX_NODES:
                raise ValueRefused("The iterator is too long.")
        return items

    def _subclass(self, value: Any, kind: type, depth: int) -> Any:
        """A subclass as its base: its own ``__eq__``, ``__iter__`` and the like are never asked."""
        bases = type.__getattribute__(kind, "__mro__")
        if int in bases:
            return self._encode(int.__add__(value, 0), depth)
        if float in bases:
            return self._encode(float.__add__(value, 0.0), depth)
        if str in bases:
            return str.__getitem__(value, slice(None))
        for base in (list, tuple, set, frozenset, deque):
            if base in bases:
                return self._encode(base(base.__iter__(value)), depth)
        if dict in bases:
            return self._encode(dict(dict.items(value)), depth)
        if self.handles is None:
            raise ValueRefused(f"A {kind.__name__} can't cross the sandbox's border.")
        self.handles.append(value)
        return ["o", len(self.handles) - 1, kind.__name__[:80]]


class Decoder:
    """``decode(tree)`` is the inverse of ``Encoder.encode``, strict. ``resolve(number, type_name)`` gives what a handle means here."""

    def __init__(self, resolve: Any = Opaque) -> None:
        self.resolve = resolve

    def decode(self, tree: Any) -> Any:
        """The value of a JSON tree.

        Raises:
            ValueRefused: not a tree that ``Encoder`` makes, or past a bound.
        """
        self.nodes = 0
        try:
            return self._decode(tree, 0)
        except ValueRefused:
            raise
        except (ValueError, TypeError, IndexError, ArithmeticError, RecursionError, MemoryError) as error:
            raise ValueRefused(f"The bytes do not decode to a value ({type(error).__name__}).") from None

    def _decode(self, tree: Any, depth: int) -> Any:
        self.nodes += 1
        if depth > 2 * MAX_DEPTH or self.nodes > 2 * MAX_NODES:
            raise ValueRefused("The value is too deep or too large.")
        if tree is None or type(tree) in (bool, str, int):
            return tree
        if type(tree) is not list or not tree or type(tree[0]) is not str:
            raise ValueRefused("Not a tagged value.")
        tag, *rest = tree
        if tag == "f" and len(rest) == 1:
            return float.fromhex(_text(rest[0], 64))
        if tag in ("l", "t", "s", "z", "q", "d") and len(rest) == 1 and type(rest[0]) is list:
            return self._container(tag, rest[0], depth)
        return self._rare(tag, rest, depth)

    def _container(self, tag: str, items: list[Any], depth: int) -> Any:
        if tag == "d":
            pairs = [(self._decode(k, depth + 1), self._decode(v, depth + 1)) for k, v in items]
            _check_hashes([k for k, _ in pairs])
            return dict(pairs)
        values = [self._decode(item, depth + 1) for item in items]
        if tag == "l":
            return values
        if tag == "t":
            return tuple(values)
        if tag == "q":
            return deque(values)
        _check_hashes(values)
        return set(values) if tag == "s" else frozenset(values)

    def _rare(self, tag: str, rest: list[Any], depth: int) -> Any:
        if tag == "i" and len(rest) == 1:
            return int(_text(rest[0], MAX_INT_BITS // 4 + 8), 16)
        if tag in ("b", "y") and len(rest) == 1:
            data = bytes.fromhex(_text(rest[0], MAX_FRAME_BYTES))
            return data if tag == "b" else bytearray(data)
        if tag == "c" and len(rest) == 2:
            return complex(float.fromhex(_text(rest[0], 64)), float.fromhex(_text(rest[1], 64)))
        if tag == "r" and len(rest) == 3 and all(type(x) is int for x in rest):
            value = range(*rest)
            if len(value) > MAX_NODES:
                raise ValueRefused("The range is too long.")
            return value
        if tag == "D" and len(rest) == 1:
            from decimal import Decimal

            number = Decimal(_text(rest[0], 400))
            if number.is_finite() and abs(number.adjusted()) > _MAX_EXPONENT:  # as an int it would fill the memory
                raise ValueRefused("The exponent of a Decimal is too large.")
            return number
        if tag == "F" and len(rest) == 2:
            from fractions import Fraction

            return Fraction(_int(self._decode(rest[0], depth + 1)), _int(self._decode(rest[1], depth + 1)))
        if tag in ("I", "dk", "dv", "di") and len(rest) == 1:
            return _view(tag, self._decode(rest[0], depth + 1))
        if tag == "o" and len(rest) == 2 and type(rest[0]) is int:
            return self.resolve(rest[0], _text(rest[1], 80))
        raise ValueRefused("Unknown tag.")


def _loaded(module: str, name: str) -> type | None:
    """A type of a module that a value can only have where the module is loaded; loading it for every guest would cost."""
    return getattr(sys.modules.get(module), name, None)


def _view(tag: str, items: Any) -> Any:
    if type(items) is not list:
        raise ValueRefused("Not a list.")
    if tag == "I":
        return iter(items)
    if tag == "dv":
        return dict(enumerate(items)).values()
    _check_hashes([item[0] for item in items] if tag == "di" else items)
    return dict(items).items() if tag == "di" else dict.fromkeys(items).keys()


def _text(value: Any, limit: int) -> str:
    if type(value) is not str or len(value) > limit:
        raise ValueRefused("Not a text, or too long.")
    return value


def _int(value: Any) -> int:
    if type(value) is not int:
        raise ValueRefused("Not an integer.")
    return value


def _check_hashes(values: list[Any]) -> None:
    if len(values) > _MAX_COLLISIONS and len({hash(value) for value in values}) < len(values) - _MAX_COLLISIONS:
        raise ValueRefused("Too many elements share a hash.")


# --- frames: 4 bytes of length, then JSON ---


def pack(message: Any) -> bytes:
    """One frame.

    Raises:
        ValueRefused: longer than a frame may be.
    """
    body = dumps(message)
    return len(body).to_bytes(4, "big") + body


def dumps(message: Any) -> bytes:
    """The body of one frame. Raises as ``pack`` does."""
    body = _ENCODER.encode(message).encode("ascii")
    if len(body) > MAX_FRAME_BYTES:
        raise ValueRefused("The value is too large for a frame.")
    return body


def frame_size(head: bytes) -> int:
    """Length of the body that follows these 4 bytes.

    Raises:
        ValueRefused: over the bound.
    """
    size = int.from_bytes(head, "big")
    if size > MAX_FRAME_BYTES:
        raise ValueRefused("A frame is longer than allowed.")
    return size


def unpack(body: bytes) -> Any:
    """The JSON of one frame's body, with bounded integers and no floats or constants.

    Raises:
        ValueRefused: not such JSON.
    """
    try:
        return _DECODER.decode(body.decode("ascii"))
    except (ValueError, RecursionError, MemoryError):
        raise ValueRefused("A frame is not JSON of the expected form.") from None


def _parse_int(text: str) -> int:
    if len(text) > 20:
        raise ValueRefused("A plain integer is too long.")
    return int(text)


def _no_number(text: str) -> Any:
    raise ValueRefused("A plain float or constant.")


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_DECODER = json.JSONDecoder(parse_int=_parse_int, parse_float=_no_number, parse_constant=_no_number)


def shows_any(arguments: Any, expected: Any) -> bool:
    """Whether a value of ``expected`` that says something is among ``arguments`` (both are JSON trees of lists of values): who gets
    all arguments of a suite at once could read it there."""
    wanted = {dumps(tree) for tree in expected if _says_something(tree)}
    return bool(wanted) and any(dumps(tree) in wanted for tree in arguments)


def _says_something(tree: Any) -> bool:
    if isinstance(tree, str):
        return len(tree) > 1
    if isinstance(tree, list):
        return len(tree) < 2 or not isinstance(tree[1], list) or len(tree[1]) > 1
    return isinstance(tree, int) and not isinstance(tree, bool) and abs(tree) > 999


class CandidateRaised(Exception):
    """The candidate's function raised. ``builtin`` is the nearest built-in exception type."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}" if text else name)
        self.name = name
        found = getattr(builtins, name, None)
        self.builtin: type[BaseException] = (
            found if isinstance(found, type) and issubclass(found, BaseException) else Exception
        )


def describe(error: BaseException) -> tuple[str, str]:
    """Name of the nearest built-in exception type and the text, for the other side. Never raises."""
    name = next((c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins"), "Exception")
    try:
        return name, str(error)[:300]
    except BaseException:  # the text of a candidate's exception is the candidate's code
        return name, ""


def read_reply(body: bytes, decoder: Decoder) -> tuple[Any, Any]:
    """Value and changed arguments (or ``None``) of a reply to a call.

    Raises:
        CandidateRaised: the call raised.
        ValueRefused: not a reply.
    """
    reply = unpack(body)
    if type(reply) is list and len(reply) == 3 and reply[0] == "value":
        value = decoder.decode(reply[1])
        return value, None if reply[2] is None else decoder.decode(reply[2])
    if type(reply) is list and len(reply) == 3 and reply[0] == "raised":
        raise CandidateRaised(_text(reply[1], 80), _text(reply[2], 300))
    raise ValueRefused("Not a reply to a call.")
