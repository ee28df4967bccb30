"""Which experts the engine sent each token to, on its way from the samples to the router: routing replay. Pure, numpy only.

A mixture-of-experts model sends each token, in each layer, to the k experts with the highest logits. Engine and trainer round
differently, so at near ties they choose other experts, and their log-probs of the same token part by far more than by rounding. With
``run.routing_replay`` the engine says which experts it chose and the trainer chooses the same (Ma et al. 2025, arXiv:2510.11370);
their weights are its own, with gradient.

The routed_experts of a sample are uint8 or uint16 [P + C - 1, layers, k]: one row for each token but the last, whose forward pass nobody
needs. Within a micro-batch they are int16 [T, layers, k]; ``OWN`` there: the router chooses for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Routes = NDArray[np.unsignedinteger[Any]]
OWN = -1
MAX_EXPERTS = 1 << 15  # that int16 can tell apart


def place_routes(parts: Sequence[tuple[int, Routes | None]]) -> NDArray[np.int16] | None:
    """Segments of (length, their rows or none) one behind the other: int16 [T, layers, k], or none where no segment has any.

    >>> place_routes([(1, np.array([[[3, 0]]], np.uint8)), (2, None)]).tolist()
    [[[3, 0]], [[-1, -1]], [[-1, -1]]]
    """
    shape = next((rows.shape[1:] for _, rows in parts if rows is not None), None)
    if shape is None:
        return None
    placed = np.full((sum(length for length, _ in parts), *shape), OWN, np.int16)
    at = 0
    for length, rows in parts:
        if rows is not None:
            placed[at : at + length] = rows
        at += length
    return placed


def move_routes(
    routed_experts: NDArray[np.int16] | None, moved: NDArray[np.int64], total: int
) -> NDArray[np.int16] | None:
    """Row i goes to ``moved[i]`` of ``total``; the router chooses for the others."""
    if routed_experts is None:
        return None
    placed = np.full((total, *routed_experts.shape[1:]), OWN, np.int16)
    placed[moved] = routed_experts
    return placed


def routed_experts_problem(
    routed_experts: Routes | None, num_rows: int, *, num_layers: int, experts_per_token: int, num_experts: int
) -> str:
    """Why a sample's routed_experts can't be replayed in a model of these sizes (no experts: 0), or ''.

    An expert twice in a row is what an engine sends that has failed to note a layer: its buffer is all zeros.

    >>> routed_experts_problem(np.zeros((3, 2, 2), np.uint8), 3, num_layers=2, experts_per_token=2, num_experts=8)
    'routed_experts that name expert 0 twice for token 0 in layer 0'
    """
    if routed_experts is None:
        return ""
    wanted = (num_rows, num_layers, experts_per_token)
    if not num_experts or routed_experts.shape != wanted:
        return f"routed_experts of shape {list(routed_experts.shape)} for a model that takes {list(wanted) if num_experts else 'none'}"
    if routed_experts.size and int(routed_experts.max()) >= num_experts:
        return f"a route to expert {int(routed_experts.max())} of {num_experts}"
    twice = routed_experts[..., 1:] == routed_experts[..., :-1]
    if twice.any():
        token, layer, place = (int(i) for i in np.argwhere(twice)[0])
        return f"routed_experts that name expert {int(routed_experts[token, layer, place])} twice for token {token} in layer {layer}"
    return ""
