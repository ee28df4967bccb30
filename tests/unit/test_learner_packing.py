"""Packing: nothing is lost, nothing is doubled, the budget holds, ranks are balanced, and the arrays say what they should."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from services.learner.megatron.batch import pad_to
from services.learner.megatron.context import align
from services.learner.packing import (
    SHARING_OVERHEAD,
    Piece,
    TrainSample,
    pack,
    piece_cost,
    plan_microbatches,
    sequence_cost,
    sharing_pays,
)

HIDDEN = 64


def sample(prompt: list[int], completion: list[int], advantage: float = 1.0) -> TrainSample:
    return TrainSample(
        np.array(prompt, np.int32),
        np.array(completion, np.int32),
        -np.arange(1, len(completion) + 1, dtype=np.float32),
        advantage,
    )


def of_lengths(lengths: list[int]) -> list[TrainSample]:
    """Samples that take so many positions; no two prompts are equal."""
    return [sample([i], [7] * length) for i, length in enumerate(lengths)]


@st.composite
def groups(draw: st.DrawFn) -> list[TrainSample]:
    """Groups of completions, some empty, shuffled; lengths up to 64 in all, prompts that may be one token long."""
    samples = []
    for number in range(draw(st.integers(0, 6))):
        prompt = [number] * draw(st.integers(1, 40))
        samples += [sample(prompt, [9] * n) for n in draw(st.lists(st.integers(0, 24), max_size=9))]
    return draw(st.permutations(samples))


def positions(samples: list[TrainSample], pieces: list[Piece]) -> int:
    return sum(
        piece.prefix
        + sum(
            len(samples[i].completion_ids) + (0 if piece.prefix else samples[i].prefix)
            for i in piece.indices
            if len(samples[i].completion_ids)
        )
        for piece in pieces
    )


def cost(samples: list[TrainSample], pieces: list[Piece]) -> float:
    return sum(
        piece_cost(
            piece.prefix,
            [len(samples[i].completion_ids) + (0 if piece.prefix else samples[i].prefix) for i in piece.indices],
            hidden_size=HIDDEN,
        )
        for piece in pieces
    )


@given(
    samples=groups(),
    max_tokens=st.integers(72, 200),
    num_ranks=st.integers(1, 5),
    alignment=st.sampled_from([1, 2, 8]),
    share=st.booleans(),
)
def test_every_sample_is_in_exactly_one_piece_within_the_budget(
    samples, max_tokens, num_ranks, alignment, share
) -> None:
    plan = plan_microbatches(
        samples,
        max_tokens=max_tokens,
        num_ranks=num_ranks,
        hidden_size=HIDDEN,
        alignment=alignment,
        share_prefixes=share,
    )
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) >= 1
    batches = [pieces for rank in plan for pieces in rank]
    assert sorted(i for pieces in batches for piece in pieces for i in piece.indices) == list(range(len(samples)))
    for pieces in batches:
        packed = pack(samples, pieces, alignment=alignment)
        used = positions(samples, pieces)
        assert len(packed.tokens) == max(-(-used // alignment), 1) * alignment
        assert len(packed.tokens) <= max_tokens
        for piece in pieces:
            if piece.prefix:
                (prompt,) = {samples[i].prompt_ids.tobytes() for i in piece.indices}
                assert piece.prefix == len(np.frombuffer(prompt, np.int32)) - 1
                assert sharing_pays(piece.prefix, len(piece.indices), hidden_size=HIDDEN)
            else:
                assert len(piece.indices) == 1


@given(samples=groups(), num_ranks=st.integers(1, 5), max_tokens=st.integers(72, 200))
def test_sharing_never_makes_the_slowest_rank_dearer(samples, num_ranks, max_tokens) -> None:
    shared, alone = (
        max(
            sum(cost(samples, pieces) for pieces in rank)
            for rank in plan_microbatches(
                samples, max_tokens=max_tokens, num_ranks=num_ranks, hidden_size=HIDDEN, share_prefixes=share
            )
        )
        for share in (True, False)
    )
    assert shared <= alone + 1e-6


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=60),
    num_ranks=st.integers(1, 5),
    max_tokens=st.integers(4096, 5000),
)
def test_ranks_differ_by_no_more_than_one_sequence_where_the_budget_is_no_obstacle(
    lengths, num_ranks, max_tokens
) -> None:
    """Graham's bound: the dearest bin was the cheapest before its last item came."""
    samples = of_lengths(lengths)
    plan = plan_microbatches(samples, max_tokens=max_tokens, num_ranks=num_ranks, hidden_size=HIDDEN)
    loads = [sum(cost(samples, pieces) for pieces in rank) for rank in plan]
    assert max(loads) - min(loads) <= sequence_cost(max(lengths), hidden_size=HIDDEN) + 1e-6


@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=60),
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(72, 200),
)
def test_ranks_differ_by_no_more_than_the_dearest_micro_batch_under_any_budget(lengths, num_ranks, max_tokens) -> None:
    samples = of_lengths(lengths)
    plan = plan_microbatches(samples, max_tokens=max_tokens, num_ranks=num_ranks, hidden_size=HIDDEN)
    batches = [[cost(samples, pieces) for pieces in rank] for rank in plan]
    loads = [sum(rank) for rank in batches]
    assert max(loads) - min(loads) <= max(load for rank in batches for load in rank) + 1e-6


@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=60), max_tokens=st.integers(72, 200))
def test_the_number_of_micro_batches_is_near_the_least_possible(lengths, max_tokens) -> None:
    (plan,) = plan_microbatches(of_lengths(lengths), max_tokens=max_tokens, num_ranks=1, hidden_size=HIDDEN)
    least = -(-sum(lengths) // max_tokens)
    assert len(plan) <= 11 / 9 * least * (4 / 3) + 1


def test_ranks_get_equal_loads_of_equal_samples() -> None:
    plan = plan_microbatches(of_lengths([80] * 64), max_tokens=4096, num_ranks=2, hidden_size=160)
    assert [[len(pieces) for pieces in rank] for rank in plan] == [[32], [32]]


def test_loads_of_unequal_samples_are_balanced_by_cost_rather_than_by_tokens() -> None:
    lengths = [512] + [64] * 24
    plan = plan_microbatches(of_lengths(lengths), max_tokens=4096, num_ranks=2, hidden_size=16)
    held = [[lengths[i] for pieces in rank for piece in pieces for i in piece.indices] for rank in plan]
    loads = [sum(sequence_cost(n, hidden_size=16) for n in rank) for rank in held]
    assert max(loads) / sum(loads) < 0.56
    assert max(map(sum, held)) / min(map(sum, held)) > 2


def test_a_group_stays_together_on_one_rank_and_is_cut_for_more_ranks() -> None:
    group = [sample([5] * 100, [1] * 50) for _ in range(8)]
    for num_ranks in (1, 2, 4):
        plan = plan_microbatches(group, max_tokens=4096, num_ranks=num_ranks, hidden_size=576, share_prefixes=True)
        assert [[len(piece.indices) for pieces in rank for piece in pieces] for rank in plan] == [
            [8 // num_ranks]
        ] * num_ranks
        assert all(piece.prefix == 99 for rank in plan for pieces in rank for piece in pieces)


def test_a_group_over_the_budget_is_cut_into_equal_pieces() -> None:
    group = [sample([5] * 100, [1] * 50) for _ in range(8)]
    (plan,) = plan_microbatches(group, max_tokens=400, num_ranks=1, hidden_size=576, share_prefixes=True)
    assert [[len(piece.indices) for piece in pieces] for pieces in plan] == [[4], [4]]


def test_groups_of_the_same_prompt_are_found_wherever_they_stand() -> None:
    samples = [sample([n % 2] * 100, [1] * 50) for n in range(8)]
    (plan,) = plan_microbatches(samples, max_tokens=4096, num_ranks=1, hidden_size=576, share_prefixes=True)
    assert sorted(piece.indices for pieces in plan for piece in pieces) == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_a_shared_piece_costs_what_its_samples_do_less_the_prefixes_that_are_saved() -> None:
    """By hand, with 12 h = 100: alone 2 * (30 + 9) = 78; shared 20 + 4 once, then 10 + (100 + 400) / 100 = 15 twice."""
    assert piece_cost(0, [30, 30], hidden_size=100 / 12) == pytest.approx(78)
    assert piece_cost(20, [10, 10], hidden_size=100 / 12) == pytest.approx(24 + 15 + 15 + 2 * SHARING_OVERHEAD)


def test_sharing_pays_for_long_prompts_of_several_samples_only() -> None:
    assert sharing_pays(100, 2, hidden_size=576)
    assert not sharing_pays(100, 1, hidden_size=576)
    assert not sharing_pays(1, 8, hidden_size=576)
    assert not sharing_pays(0, 8, hidden_size=576)


def test_more_ranks_than_samples_leaves_empty_micro_batches_that_can_be_packed() -> None:
    plan = plan_microbatches(of_lengths([5]), max_tokens=16, num_ranks=3, hidden_size=8)
    assert sorted(len(rank[0]) for rank in plan) == [0, 0, 1]
    empty = pack([], [], alignment=8)
    assert len(empty.tokens) == 8
    assert empty.loss_mask.tolist() == [False]
    assert empty.cu_seqlens.tolist() == [0, 8]


def test_a_sequence_longer_than_the_budget_is_refused_with_the_key_to_change() -> None:
    samples = [sample([1, 2, 3], [4] * 4), sample([1], [2] * 100)]
    with pytest.raises(ConfigError, match=r"longest has 101 tokens.*max_tokens_per_microbatch is 100"):
        plan_microbatches(samples, max_tokens=100, num_ranks=1, hidden_size=8)


def test_a_packed_batch_by_hand() -> None:
    samples = [sample([1, 2], [3, 4], advantage=0.5), sample([5], [6], advantage=-1.0), sample([9], [9])]
    batch = pack(samples, [Piece((0,)), Piece((1,))], alignment=3)
    assert batch.tokens.tolist() == [1, 2, 3, 5, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert batch.shared == ()
    assert batch.loss_positions.tolist() == [1, 2, 3]
    assert batch.labels.tolist() == [3, 4, 6]
    assert batch.loss_mask.tolist() == [True] * 3
    assert batch.behaviour_logprobs.tolist() == [-1, -2, -1]
    assert batch.advantages.tolist() == [0.5, 0.5, -1]
    assert batch.sample_indices == (0, 1)


def test_a_shared_piece_by_hand() -> None:
    samples = [sample([9], [8]), sample([1, 2, 3], [4, 5], advantage=0.5), sample([1, 2, 3], [6], advantage=-1.0)]
    batch = pack(samples, [Piece((0,)), Piece((1, 2), prefix=2)], alignment=4)
    assert batch.tokens.tolist() == [9, 1, 2, 3, 4, 3, 0, 0]
    assert batch.position_ids.tolist() == [0, 0, 1, 2, 3, 2, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 1, 3, 5, 6, 8]
    assert batch.shared == ((1, 3, 6),)
    assert batch.loss_positions.tolist() == [0, 3, 4, 5]
    assert batch.labels.tolist() == [8, 4, 5, 6]
    assert batch.advantages.tolist() == [1.0, 0.5, 0.5, -1.0]
    assert batch.sample_indices == (0, 1, 2)


def routed(made: TrainSample, first: int) -> TrainSample:
    """Token t of it goes to the experts first + t and 100 + t, in its one layer."""
    rows = np.arange(made.length - 1, dtype=np.uint8)
    return dataclasses.replace(made, routed_experts=np.stack([first + rows, 100 + rows], axis=1)[:, None])


def test_routes_stand_where_their_tokens_do_and_padding_has_none() -> None:
    samples = [sample([9], [8]), routed(sample([1, 2, 3], [4, 5]), 10), routed(sample([1, 2, 3], [6]), 20)]
    batch = pack(samples, [Piece((0,)), Piece((1, 2), prefix=2)], alignment=4)
    assert batch.tokens.tolist() == [9, 1, 2, 3, 4, 3, 0, 0]
    assert batch.routed_experts[:, 0, 0].tolist() == [-1, 10, 11, 12, 13, 22, -1, -1]
    assert batch.routed_experts[:, 0, 1].tolist() == [-1, 100, 101, 102, 103, 102, -1, -1]
    assert pack(samples, [Piece((0,))]).routed_experts is None
    longer, moved = pad_to(batch, 10), align(pack(samples, [Piece((0,)), Piece((2,))]), 2, total=4)
    assert longer.routed_experts[:, 0, 0].tolist() == [-1, 10, 11, 12, 13, 22, -1, -1, -1, -1]
    assert moved.tokens.tolist() == [9, 0, 0, 0, 1, 2, 3, 0]
    assert moved.routed_experts[:, 0, 0].tolist() == [-1, -1, -1, -1, 20, 21, 22, -1]


def test_a_prompt_is_shared_only_by_samples_whose_prompt_went_to_the_same_experts() -> None:
    prompt = list(range(40))
    samples = [routed(sample(prompt, [5]), first) for first in (0, 50, 0)] + [sample(prompt, [5])]
    (plan,) = plan_microbatches(samples, max_tokens=200, num_ranks=1, hidden_size=HIDDEN, share_prefixes=True)
    assert sorted(piece.indices for pieces in plan for piece in pieces) == [(0, 2), (1,), (3,)]


def test_labels_are_the_completions_in_order_of_the_samples() -> None:
    one = sample([7, 8, 9], [1, 2, 3, 4])
    assert pack([one, one], [Piece((1,)), Piece((0,))]).labels.tolist() == [1, 2, 3, 4, 1, 2, 3, 4]


def test_an_empty_completion_takes_no_positions() -> None:
    batch = pack([sample([1, 2], []), sample([1, 2], [3])], [Piece((0,)), Piece((1,))])
    assert batch.tokens.tolist() == [1, 2]
    assert batch.labels.tolist() == [3]
    assert batch.sample_indices == (0, 1)


def test_samples_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt"):
        sample([], [1])
    with pytest.raises(ValueError, match="2 completion tokens but 1"):
        TrainSample(np.array([1], np.int32), np.array([1, 2], np.int32), np.zeros(1, np.float32), 0.0)
