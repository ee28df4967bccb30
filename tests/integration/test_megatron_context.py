"""How context-parallel ranks share a micro-batch: nothing lost, nothing twice, and equal work."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from megatron_world import make_samples

from services.learner.megatron.context import ContextCut, align, positions_of
from services.learner.packing import MicroBatch, Piece, add_columns, pack


def make_batch(num_samples: int = 5) -> MicroBatch:
    samples = make_samples(99, num_samples=num_samples)
    return add_columns(pack(samples, [Piece((i,)) for i in range(num_samples)]), samples)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_padding_stands_behind_each_segment_and_moves_no_row_to_another_token(num_ranks: int) -> None:
    batch, total = make_batch(), 4 * num_ranks
    aligned = align(batch, num_ranks, total=total)
    lengths, old = np.diff(aligned.cu_seqlens), np.diff(batch.cu_seqlens)
    assert len(aligned.tokens) % total == 0
    assert (lengths % (2 * num_ranks) == 0).all()
    for i, n in enumerate(old):
        start, was = aligned.cu_seqlens[i], batch.cu_seqlens[i]
        assert (aligned.tokens[start : start + n] == batch.tokens[was : was + n]).all()
        assert (aligned.position_ids[start : start + lengths[i]] == np.arange(lengths[i])).all()
    assert (aligned.tokens[aligned.loss_positions] == batch.tokens[batch.loss_positions]).all()
    assert (aligned.position_ids[aligned.loss_positions] == batch.position_ids[batch.loss_positions]).all()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_ranks_have_every_position_and_every_row_once(num_ranks: int) -> None:
    batch = align(make_batch(), num_ranks, total=2 * num_ranks)
    cuts = [ContextCut.of(batch, rank, num_ranks, torch.device("cpu")) for rank in range(num_ranks)]
    gathered = np.concatenate([cut.positions for cut in cuts])
    assert sorted(gathered.tolist()) == list(range(len(batch.tokens)))
    for cut in cuts:
        assert (gathered[cut.order.numpy()] == np.arange(len(batch.tokens))).all()
        mine = batch.tokens[cut.positions][cut.row_positions.numpy()]
        if len(cut.rows):
            assert (mine == batch.tokens[batch.loss_positions[cut.rows.numpy()]]).all()
        assert len(cut.row_positions) == max(1, len(cut.rows))
    assert sorted(torch.cat([cut.rows for cut in cuts]).tolist()) == list(range(len(batch.loss_positions)))


def test_causal_attention_costs_every_rank_the_same() -> None:
    bounds = np.array([0, 16, 48], np.int32)
    starts = np.repeat(bounds[:-1], np.diff(bounds))
    # A query attends to all up to itself in its segment.
    costs = [
        sum(int(position - starts[position]) + 1 for position in positions_of(bounds, rank, 4)) for rank in range(4)
    ]
    assert len(set(costs)) == 1
