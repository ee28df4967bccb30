"""Messages <-> ZeroMQ frames: ``[header, array, array, ...]``.

The header is a msgpack map (see ``_decode_header``); each array is one frame of raw little-endian bytes that it describes by
(name, dtype, shape). The last four bytes of the header's frame are a checksum of all that is sent: TCP's own is weak, and
a flipped bit in a token id would be trained on. Reading an array makes a NumPy view of the frame, no copy. There is no pickle, and kinds are looked up
in a fixed table, so bytes from the wire never choose what code runs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping, Sequence
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
_CHECKSUM_BYTES = 4
DTYPES = {"int32": "<i4", "int64": "<i8", "float32": "<f4", "uint8": "|u1", "uint16": "<u2"}

_KINDS = all_messages()
_PACKER = msgpack.Packer(use_bin_type=True)  # for any thread: it packs without letting go of the interpreter's lock
_PLAIN = (str, int, float, bool, list[str], list[int], dict[str, float])
# Messages whose fields are what msgpack knows already: nothing of them needs to be taken apart.
_FLAT = {cls for cls in _KINDS.values() if all(field.annotation in _PLAIN for field in cls.model_fields.values())}
_NUMPY_DTYPES = {name: np.dtype(code) for name, code in DTYPES.items()}


@dataclass(slots=True)
class Received:
    """A decoded message with its arrays (read-only views of the frames). Not frozen: that would make it four times as slow to build."""

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
    names = message.arrays if len(arrays) == len(message.arrays) else _with_optional(type(message), arrays)
    if arrays.keys() != set(names):
        raise ProtocolError(f"{message.kind} travels with arrays {message.arrays}, not {sorted(arrays)}.")
    specs, buffers = [], []
    for name in names:
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
        "body": message.__dict__ if type(message) in _FLAT else message.model_dump(),
        "arrays": specs,
    }
    return seal(_PACKER.pack(header), buffers)


def seal(header: bytes, arrays: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """The frames of a packed header and its arrays: the header's ends with a checksum (CRC-32, 4 bytes) of itself and of them."""
    return [header + _checksum(header, arrays).to_bytes(_CHECKSUM_BYTES, "little"), *arrays]


def peek(header_frame: bytes | memoryview) -> dict[str, Any]:
    """The header's map as it stands there, checked by nobody: for who passes messages on, and for tests. Raises what msgpack raises."""
    return dict(msgpack.unpackb(header_frame[:-_CHECKSUM_BYTES], raw=False))


def _checksum(header: bytes | memoryview, arrays: Sequence[bytes | memoryview]) -> int:
    checksum = zlib.crc32(header)
    for array in arrays:
        checksum = zlib.crc32(array, checksum)
    return checksum


class ForeignPeer(ProtocolError):
    """The sender is of another run or another protocol version: no message of its will ever be good. Others may be, when sent again."""


def decode(frames: Sequence[bytes | memoryview]) -> Received:
    """The message in ``frames``.

    Raises:
        ProtocolError: anything that isn't a message of this protocol version; the reason is fit to send back.
    """
    kind, run_id, seq, re, body, specs = _decode_header(frames)
    cls = _KINDS.get(kind)
    if cls is None:
        raise ProtocolError(f"Unknown message kind {kind[:64]!r}.")
    names = cls.arrays
    if len(specs) > len(names):
        names = _with_optional(
            cls, {spec[0] for spec in specs if isinstance(spec, list) and spec[:1] and type(spec[0]) is str}
        )
    if len(specs) != len(names) or len(frames) != 1 + len(specs):
        raise ProtocolError(
            f"{kind} must come with arrays {cls.arrays}; its header tells of {len(specs)}, and there are {len(frames) - 1} frames."
        )
    try:
        message = cls.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ProtocolError(f"{kind}: field {'.'.join(map(str, first['loc']))}: {first['msg']}.") from None
    arrays = {name: _view(kind, name, spec, frame) for name, spec, frame in zip(names, specs, frames[1:], strict=True)}
    return Received(message, run_id, seq, re, arrays)


def _with_optional(cls: type[Message], given: Collection[str]) -> tuple[str, ...]:
    """The arrays that must come, and the optional ones that are given, in the order in which they travel."""
    return (*cls.arrays, *(name for name in cls.optional_arrays if name in given))


def _decode_header(frames: Sequence[bytes | memoryview]) -> tuple[str, str, int, int, dict[str, Any], list[Any]]:
    """Frame 0: (kind, run_id, seq, re, body, arrays). ``seq`` numbers the sender's messages; ``re`` is the ``seq`` that this one
    answers (0: none); ``arrays`` has (name, dtype, shape) of each other frame.

    By hand and not by a model: every message passes here, and six fields of plain types need no more.
    """
    if not frames:
        raise ProtocolError("An empty message.")
    if len(frames[0]) > MAX_HEADER_BYTES or len(frames) > 1 + MAX_ARRAYS:
        raise ProtocolError(f"Header of {len(frames[0])} bytes with {len(frames) - 1} arrays is over the bounds.")
    header = memoryview(frames[0])[:-_CHECKSUM_BYTES]
    if _checksum(header, frames[1:]).to_bytes(_CHECKSUM_BYTES, "little") != frames[0][-_CHECKSUM_BYTES:]:
        raise ProtocolError("A message fails its checksum: it was damaged on its way, or is none of ours.")
    try:
        raw = msgpack.unpackb(header, raw=False, strict_map_key=True)
    except Exception as error:  # msgpack raises many types on hostile bytes; all of them mean one thing
        raise ProtocolError(f"The header is not msgpack: {type(error).__name__}.") from None
    if not isinstance(raw, dict):
        raise ProtocolError(f"The header is malformed: a {type(raw).__name__}, not a map.")
    if raw.get("protocol") != PROTOCOL_VERSION:
        raise ForeignPeer(
            f"Protocol version {str(raw.get('protocol'))[:20]} met version {PROTOCOL_VERSION}: "
            "all processes of a run must be of the same Forebay release."
        )
    fields = raw.get("kind"), raw.get("run_id"), raw.get("seq", 0), raw.get("re", 0), raw.get("body"), raw.get("arrays")
    if tuple(map(type, fields)) != _HEADER_TYPES:
        raise ProtocolError(f"The header is malformed: its fields are {[type(value).__name__ for value in fields]}.")
    return fields  # type: ignore[return-value]


_HEADER_TYPES = (str, str, int, int, dict, list)


def _view(kind: str, name: str, spec: Any, frame: bytes | memoryview) -> Array:
    match spec:
        case [str() as own_name, str() as dtype_name, list() as shape] if own_name == name:
            pass
        case _:
            raise ProtocolError(f"{kind}.{name}: its frame is described by {str(spec)[:100]}.")
    dtype = _NUMPY_DTYPES.get(dtype_name)
    if dtype is None or not all(type(size) is int and size >= 0 for size in shape):
        raise ProtocolError(f"{kind}.{name}: dtype {dtype_name[:16]!r} with shape {shape} doesn't travel.")
    expected = math.prod(shape) * dtype.itemsize
    if len(frame) != expected or expected > MAX_ARRAY_BYTES:
        raise ProtocolError(f"{kind}.{name}: {len(frame)} bytes, but {dtype_name}{shape} takes {expected}.")
    array = np.frombuffer(frame, dtype=dtype)
    if len(shape) != 1:
        array = array.reshape(shape)
    if array.flags.writeable:
        array.flags.writeable = False
    return array
