"""Packing: nothing is lost, nothing is doubled, the budget holds, and the arrays say what they should."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from services.learner.packing import TrainSample, completion_slice, pack, plan_microbatches, sequence_cost


def sample(prompt: list[int], completion: list[int], advantage: float = 1.0) -> TrainSample:
    return TrainSample(
        np.array(prompt, np.int32),
        np.array(completion, np.int32),
        -np.arange(1, len(completion) + 1, dtype=np.float32),
        advantage,
    )


@given(
    lengths=st.lists(st.integers(1, 64), max_size=60),
    max_tokens=st.integers(64, 200),
    num_ranks=st.integers(1, 5),
    alignment=st.sampled_from([1, 2, 8]),
)
def test_every_sample_is_in_exactly_one_micro_batch_within_the_budget(
    lengths, max_tokens, num_ranks, alignment
) -> None:
    plan = plan_microbatches(lengths, max_tokens=max_tokens, num_ranks=num_ranks, hidden_size=64, alignment=alignment)
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) >= 1
    assert sorted(i for rank in plan for indices in rank for i in indices) == list(range(len(lengths)))
    for indices in (indices for rank in plan for indices in rank):
        used = sum(lengths[i] for i in indices)
        assert -(-used // alignment) * alignment <= max_tokens


@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=60), max_tokens=st.integers(64, 200))
def test_the_number_of_micro_batches_is_near_the_least_possible(lengths, max_tokens) -> None:
    (plan,) = plan_microbatches(lengths, max_tokens=max_tokens, num_ranks=1, hidden_size=64)
    least = -(-sum(lengths) // max_tokens)
    assert len(plan) <= 11 / 9 * least * (4 / 3) + 1


def test_ranks_get_equal_loads_of_equal_samples() -> None:
    plan = plan_microbatches([80] * 64, max_tokens=4096, num_ranks=2, hidden_size=160)
    assert [[len(indices) for indices in rank] for rank in plan] == [[32], [32]]


def test_loads_of_unequal_samples_are_balanced_by_cost_rather_than_by_tokens() -> None:
    lengths = [512] + [64] * 24
    plan = plan_microbatches(lengths, max_tokens=4096, num_ranks=2, hidden_size=16)
    loads = [sum(sequence_cost(lengths[i], hidden_size=16) for indices in rank for i in indices) for rank in plan]
    assert max(loads) / sum(loads) < 0.56
    tokens = [sum(lengths[i] for indices in rank for i in indices) for rank in plan]
    assert max(tokens) / min(tokens) > 2


def test_more_ranks_than_samples_leaves_empty_micro_batches_that_can_be_packed() -> None:
    plan = plan_microbatches([5], max_tokens=16, num_ranks=3, hidden_size=8)
    assert sorted(len(rank[0]) for rank in plan) == [0, 0, 1]
    empty = pack([], [], alignment=8)
    assert len(empty.tokens) == 8
    assert not empty.loss_mask.any()
    assert empty.cu_seqlens.tolist() == [0, 8]


def test_a_sequence_longer_than_the_budget_is_refused_with_the_key_to_change() -> None:
    with pytest.raises(ConfigError, match=r"longest has 101 tokens.*max_tokens_per_microbatch is 100"):
        plan_microbatches([7, 101], max_tokens=100, num_ranks=1, hidden_size=8)


def test_a_packed_batch_by_hand() -> None:
    samples = [sample([1, 2], [3, 4], advantage=0.5), sample([5], [6], advantage=-1.0), sample([9], [9])]
    batch = pack(samples, [0, 1], alignment=4)
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert batch.labels.tolist() == [2, 3, 4, 0, 6, 0, 0, 0]
    assert batch.loss_mask.tolist() == [False, True, True, False, True, False, False, False]
    assert batch.behaviour_logprobs.tolist() == [0, -1, -2, 0, -1, 0, 0, 0]
    assert batch.advantages.tolist() == [0, 0.5, 0.5, 0, -1, 0, 0, 0]
    assert batch.cu_seqlens.tolist() == [0, 4, 6, 8]
    assert batch.sample_indices == (0, 1)


def test_labels_at_the_mask_are_the_completion() -> None:
    one = sample([7, 8, 9], [1, 2, 3, 4])
    batch = pack([one, one], [1, 0])
    for start in batch.cu_seqlens[:-1]:
        assert batch.labels[completion_slice(one, int(start))].tolist() == [1, 2, 3, 4]


def test_an_empty_completion_has_no_loss_tokens() -> None:
    assert not pack([sample([1, 2], [])], [0]).loss_mask.any()


def test_samples_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt"):
        sample([], [1])
    with pytest.raises(ValueError, match="2 completion tokens but 1"):
        TrainSample(np.array([1], np.int32), np.array([1, 2], np.int32), np.zeros(1, np.float32), 0.0)
