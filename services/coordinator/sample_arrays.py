"""A sample's arrays as one blob of the journal, and back."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np

from protocol.codec import Array

NAMES = ("prompt_ids", "completion_ids", "logprobs")
# Before the routed_experts, where a sample has some: layers, experts per token, bytes of each.
_ROUTED_EXPERTS = struct.Struct("<HHH")
_ROUTED_EXPERTS_DTYPES = {1: "|u1", 2: "<u2"}


def array_parts(arrays: Mapping[str, Array]) -> list[Array | bytes]:
    """What the blob of ``arrays`` (as in ``messages.SampleResult``) is, one after the other."""
    parts: list[Array | bytes] = [arrays[name] for name in NAMES]
    if (routed_experts := arrays.get("routed_experts")) is not None:
        parts += [_ROUTED_EXPERTS.pack(*routed_experts.shape[1:], routed_experts.itemsize), routed_experts]
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
    if len(blob) < end + _ROUTED_EXPERTS.size:
        raise ValueError(f"{len(blob)} bytes of arrays for {num_prompt} + {num_completion} tokens")
    layers, chosen, itemsize = _ROUTED_EXPERTS.unpack_from(blob, end)
    flat = np.frombuffer(blob, _ROUTED_EXPERTS_DTYPES[itemsize], -1, end + _ROUTED_EXPERTS.size)
    return {**arrays, "routed_experts": flat.reshape(num_prompt + num_completion - 1, layers, chosen)}
