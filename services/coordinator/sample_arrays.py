"""A sample's arrays as one blob of the journal, and back."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np

from protocol.codec import Array

NAMES = ("prompt_ids", "completion_ids", "logprobs")
# Before the routes, where a sample has some: layers, experts per token, bytes of each.
_ROUTES = struct.Struct("<HHH")
_ROUTE_DTYPES = {1: "|u1", 2: "<u2"}


def array_parts(arrays: Mapping[str, Array]) -> list[Array | bytes]:
    """What the blob of ``arrays`` (as in ``messages.SampleResult``) is, one after the other."""
    parts: list[Array | bytes] = [arrays[name] for name in NAMES]
    if (routes := arrays.get("routes")) is not None:
        parts += [_ROUTES.pack(*routes.shape[1:], routes.itemsize), routes]
    return parts


def unpack_arrays(blob: bytes, *, num_prompt: int, num_completion: int) -> dict[str, Array]:
    """Views of the blob.

    Raises:
        ValueError: it is not of that many tokens.
    """
    end = 4 * (num_prompt + 2 * num_completion)
    arrays: dict[str, Array] = {
        "prompt_ids": np.frombuffer(blob, "<i4", num_prompt),
        "completion_ids": np.frombuffer(blob, "<i4", num_completion, 4 * num_prompt),
        "logprobs": np.frombuffer(blob, "<f4", num_completion, 4 * (num_prompt + num_completion)),
    }
    if len(blob) == end:
        return arrays
    if len(blob) < end + _ROUTES.size:
        raise ValueError(f"{len(blob)} bytes of arrays for {num_prompt} + {num_completion} tokens")
    layers, chosen, itemsize = _ROUTES.unpack_from(blob, end)
    flat = np.frombuffer(blob, _ROUTE_DTYPES[itemsize], -1, end + _ROUTES.size)
    return {**arrays, "routes": flat.reshape(num_prompt + num_completion - 1, layers, chosen)}
