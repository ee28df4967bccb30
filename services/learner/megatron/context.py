"""Context parallelism: the ranks of a group share the tokens of each sequence.

Each segment of a micro-batch is padded at its end to a multiple of 2c positions (c ranks) and cut into 2c equal chunks; rank r has
chunks r and 2c - 1 - r, so that causal attention costs each rank the same. That is the cut of Megatron and Transformer Engine, whose
attention passes keys and values around the ring of ranks. Ours gathers them instead.

    positions --align, cut--> this rank's positions --layers--> its rows --gather_rows--> all rows, on every rank

Every rank then computes the loss of all rows, also where a sequence's tokens are weighted together, but its gradient reaches only its own
rows, and one rank alone counts the tokens: the sum of the ranks' gradients is that of the whole, once.

Legend: T = positions, t = those of this rank, h = heads, g = key-value heads, d = head size; L = loss rows, l = those of this rank.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from services.learner.megatron.mcore import gather_from_sequence_parallel_region, parallel_state
from services.learner.packing import MicroBatch
from services.learner.routed_experts import move_routes


def align(batch: MicroBatch, num_ranks: int, *, total: int) -> MicroBatch:
    """``batch`` with every segment padded to a multiple of ``2 num_ranks``, and all of it to one of ``total``, itself such a multiple.

    What pads a segment stands behind its tokens, so that under causal attention it changes none of them, and asks for no log-prob.
    """
    assert total % (2 * num_ranks) == 0, (total, num_ranks)
    assert not batch.shared, "shared prefixes and context parallelism"
    lengths = np.diff(batch.cu_seqlens)
    padded = -(-lengths // (2 * num_ranks)) * 2 * num_ranks
    padded[-1] += -padded.sum() % total
    starts = np.cumsum([0, *padded])
    # Where each old position goes.
    moved = np.concatenate([start + np.arange(n) for start, n in zip(starts, lengths, strict=False)])
    tokens = np.zeros(starts[-1], np.int64)
    tokens[moved] = batch.tokens
    positions = np.concatenate([np.arange(n) for n in padded]).astype(np.int64)
    positions[moved] = batch.position_ids
    return dataclasses.replace(
        batch,
        tokens=tokens,
        position_ids=positions,
        cu_seqlens=starts.astype(np.int32),
        loss_positions=moved[batch.loss_positions],
        routed_experts=move_routes(batch.routed_experts, moved, int(starts[-1])),
    )


def positions_of(cu_seqlens: NDArray[np.int32], rank: int, num_ranks: int) -> NDArray[np.int64]:
    """Which positions of an aligned micro-batch the rank has, in its order.

    >>> positions_of(np.array([0, 4, 12], np.int32), 0, 2).tolist()
    [0, 3, 4, 5, 10, 11]
    """
    mine = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        chunk = (end - start) // (2 * num_ranks)
        for j in (rank, 2 * num_ranks - 1 - rank):
            mine.append(np.arange(start + j * chunk, start + (j + 1) * chunk))
    return np.concatenate(mine)


@dataclass(frozen=True)
class ContextCut:
    """This rank's part of an aligned micro-batch. All indices are int64.

    ``positions``: [t], of all T. ``lengths``: of all segments. ``order``: [T], where each position is among those that the ranks'
    parts, one behind the other, make up. ``rows``: [l], its loss rows of all ``num_rows``; ``row_positions``: [max(l, 1)], where in
    its own part they are read (somewhere, where it has none).
    """

    rank: int
    num_ranks: int
    positions: NDArray[np.int64]
    lengths: tuple[int, ...]
    order: Tensor
    rows: Tensor
    num_rows: int
    row_positions: Tensor

    @classmethod
    def of(cls, batch: MicroBatch, rank: int, num_ranks: int, device: torch.device) -> ContextCut:
        """Of an aligned micro-batch."""
        parts = [positions_of(batch.cu_seqlens, r, num_ranks) for r in range(num_ranks)]
        order = np.argsort(np.concatenate(parts))
        at = np.full(len(batch.tokens), -1, np.int64)
        at[parts[rank]] = np.arange(len(parts[rank]))
        local = at[batch.loss_positions]
        rows = np.flatnonzero(local >= 0)

        def move(array: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(array).to(device)

        return cls(
            rank=rank,
            num_ranks=num_ranks,
            positions=parts[rank],
            lengths=tuple(np.diff(batch.cu_seqlens).tolist()),
            order=move(order),
            rows=move(rows),
            num_rows=len(local),
            row_positions=move(local[rows] if len(rows) else np.zeros(1, np.int64)),
        )


def gather_rows(mine_l: Tensor, cut: ContextCut) -> Tensor:
    """[..., max(l, 1)] of each rank to [..., L] on all. The gradient of this rank's rows comes back; that of others' stays theirs."""
    return _GatherRows.apply(mine_l, cut)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine_l: Tensor, cut: ContextCut) -> Tensor:
        ctx.cut, ctx.num_given = cut, mine_l.shape[-1]
        all_L = mine_l.new_zeros(*mine_l.shape[:-1], cut.num_rows)
        all_L[..., cut.rows] = mine_l[..., : len(cut.rows)]
        dist.all_reduce(all_L, group=parallel_state.get_context_parallel_group())
        return all_L

    @staticmethod
    def backward(ctx: Any, grad_L: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        mine_l = grad_L.new_zeros(*grad_L.shape[:-1], ctx.num_given)
        mine_l[..., : len(ctx.cut.rows)] = grad_L[..., ctx.cut.rows]
        return mine_l, None


def context_attention(query_thd: Tensor, key_tgd: Tensor, value_tgd: Tensor, cut: ContextCut, scale: float) -> Tensor:
    """Causal attention within each segment to the keys and values of all ranks. Queries and keys are rotated. Returns [t, h, d]."""
    both_tge = torch.cat((key_tgd, value_tgd), dim=-1)
    group = parallel_state.get_context_parallel_group()
    both_Tge = gather_from_sequence_parallel_region(both_tge, group=group).index_select(0, cut.order)
    key_Tgd, value_Tgd = both_Tge.chunk(2, dim=-1)
    out, at, start = [], 0, 0
    for length in cut.lengths:
        chunk = length // (2 * cut.num_ranks)
        for j in (cut.rank, 2 * cut.num_ranks - 1 - cut.rank):
            end = start + (j + 1) * chunk
            q, k, v = (
                x.transpose(0, 1)[None] for x in (query_thd[at : at + chunk], key_Tgd[start:end], value_Tgd[start:end])
            )
            mask = torch.ones(chunk, end - start, dtype=torch.bool, device=q.device).tril(j * chunk)
            grouped = q.shape[1] != k.shape[1]
            attended = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=grouped)
            out.append(attended[0].transpose(0, 1))
            at += chunk
        start += length
    return torch.cat(out)
