"""Messages <-> ZeroMQ frames: ``[header, array, array, ...]``.

The header is msgpack of ``Header``; each array is one frame of raw little-endian bytes that ``Header.arrays`` describes by
(name, dtype, shape). Reading an array makes a NumPy view of the frame, no copy. There is no pickle, and kinds are looked up
in a fixed table, so bytes from the wire never choose what code runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
from pydantic import ValidationError

from common.errors import ProtocolError
from protocol.messages import PROTOCOL_VERSION, Message, all_messages

Array = np.ndarray[Any, np.dtype[Any]]

MAX_HEADER_BYTES = 32 << 20
MAX_ARRAY_BYTES = 1 << 30
MAX_ARRAYS = 16
DTYPES = {"int32": "<i4", "int64": "<i8", "float32": "<f4", "uint8": "|u1"}

_KINDS = all_messages()


@dataclass(frozen=True, slots=True)
class Header:
    """Frame 0. ``seq`` numbers the sender's messages; ``re`` is the ``seq`` that this one answers (0: none)."""

    kind: str
    run_id: str
    seq: int
    re: int
    body: dict[str, Any]
    arrays: list[tuple[str, str, list[int]]]


@dataclass(frozen=True, slots=True)
class Received:
    """A decoded message with its arrays (read-only views of the frames)."""

    message: Message
    run_id: str
    seq: int
    re: int
    arrays: dict[str, Array] = field(default_factory=dict)


def encode(
    message: Message, *, run_id: str, seq: int = 0, re: int = 0, arrays: Mapping[str, Array] | None = None
) -> list[bytes | memoryview]:
    """Frames of ``message``.

    Raises:
        ProtocolError: the arrays are not those that the message's class declares, or of a dtype that doesn't travel.
    """
    arrays = arrays or {}
    if set(arrays) != set(message.arrays):
        raise ProtocolError(f"{message.kind} travels with arrays {message.arrays}, not {sorted(arrays)}.")
    specs, buffers = [], []
    for name in message.arrays:
        array = arrays[name]
        if array.dtype.name not in DTYPES:
            raise ProtocolError(
                f"{message.kind}.{name}: dtype {array.dtype} doesn't travel; one of {sorted(DTYPES)} does."
            )
        contiguous = np.ascontiguousarray(array, dtype=DTYPES[array.dtype.name])
        specs.append((name, array.dtype.name, list(array.shape)))
        buffers.append(contiguous.data.cast("B") if contiguous.size else b"")
    header = {
        "protocol": PROTOCOL_VERSION,
        "kind": message.kind,
        "run_id": run_id,
        "seq": seq,
        "re": re,
        "body": message.model_dump(),
        "arrays": specs,
    }
    return [msgpack.packb(header, use_bin_type=True), *buffers]


def decode(frames: Sequence[bytes | memoryview]) -> Received:
    """The message in ``frames``.

    Raises:
        ProtocolError: anything that isn't a message of this protocol version; the reason is fit to send back.
    """
    header = _decode_header(frames)
    cls = _KINDS.get(header.kind)
    if cls is None:
        raise ProtocolError(f"Unknown message kind {header.kind[:64]!r}.")
    names = tuple(spec[0] for spec in header.arrays)
    if names != cls.arrays or len(frames) != 1 + len(names):
        raise ProtocolError(
            f"{header.kind} must come with arrays {cls.arrays}; got {names} in {len(frames) - 1} frames."
        )
    try:
        message = cls.model_validate(header.body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ProtocolError(f"{header.kind}: field {'.'.join(map(str, first['loc']))}: {first['msg']}.") from None
    arrays = {
        name: _view(header.kind, name, spec, frame)
        for (name, *spec), frame in zip(header.arrays, frames[1:], strict=True)
    }
    return Received(message, header.run_id, header.seq, header.re, arrays)


def _decode_header(frames: Sequence[bytes | memoryview]) -> Header:
    if not frames:
        raise ProtocolError("An empty message.")
    if len(frames[0]) > MAX_HEADER_BYTES or len(frames) > 1 + MAX_ARRAYS:
        raise ProtocolError(f"Header of {len(frames[0])} bytes with {len(frames) - 1} arrays is over the bounds.")
    try:
        raw = msgpack.unpackb(frames[0], raw=False, strict_map_key=True)
    except Exception as error:  # msgpack raises many types on hostile bytes; all of them mean one thing
        raise ProtocolError(f"The header is not msgpack: {type(error).__name__}.") from None
    if not isinstance(raw, dict):
        raise ProtocolError(f"The header is malformed: a {type(raw).__name__}, not a map.")
    if raw.get("protocol") != PROTOCOL_VERSION:
        raise ProtocolError(
            f"Protocol version {str(raw.get('protocol'))[:20]} met version {PROTOCOL_VERSION}: "
            "all processes of a run must be of the same Forebay release."
        )
    # By hand, not a model: every message passes here, and five fields of plain types need no more.
    for name, (kind, default) in _HEADER_FIELDS.items():
        if type(raw.setdefault(name, default)) is not kind:
            raise ProtocolError(f"The header is malformed: {name} must be {kind.__name__}.")
    if not all(_is_array_spec(spec) for spec in raw["arrays"]):
        raise ProtocolError("The header is malformed: arrays must be of (name, dtype, shape).")
    return Header(**{name: raw[name] for name in _HEADER_FIELDS})


_HEADER_FIELDS: dict[str, tuple[type, Any]] = {
    "kind": (str, None),
    "run_id": (str, None),
    "seq": (int, 0),
    "re": (int, 0),
    "body": (dict, {}),
    "arrays": (list, []),
}


def _is_array_spec(spec: Any) -> bool:
    return (
        isinstance(spec, list)
        and len(spec) == 3
        and type(spec[0]) is type(spec[1]) is str
        and isinstance(spec[2], list)
        and all(type(size) is int for size in spec[2])
    )


def _view(kind: str, name: str, spec: Sequence[Any], frame: bytes | memoryview) -> Array:
    dtype_name, shape = spec
    dtype = DTYPES.get(dtype_name)
    if dtype is None or any(size < 0 for size in shape):
        raise ProtocolError(f"{kind}.{name}: dtype {str(dtype_name)[:16]!r} with shape {shape} doesn't travel.")
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    if len(frame) != expected or expected > MAX_ARRAY_BYTES:
        raise ProtocolError(f"{kind}.{name}: {len(frame)} bytes, but {dtype_name}{shape} takes {expected}.")
    array = np.frombuffer(frame, dtype=dtype).reshape(shape)
    array.flags.writeable = False
    return array
