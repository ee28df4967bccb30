"""The optimizer steps of a batch: who is in which, what is refused, and the learning rate."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import TrainingError
from services.learner.architecture import Architecture, Rope
from services.learner.config import OptimizerConfig
from services.learner.packing import Piece, TrainSample, add_columns, pack
from services.learner.updates import check_samples, learning_rate, plan_updates

ARCH = Architecture(
    family="qwen3_moe",
    num_layers=2,
    hidden_size=8,
    ffn_size=8,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=10,
    max_positions=64,
    norm_eps=1e-6,
    rope=Rope("default", 1e4),
    tied_embeddings=False,
    qkv_bias=False,
    qk_norm=True,
    dtype="float32",
    num_experts=8,
    experts_per_token=2,
)


def make_samples(groups: list[int]) -> list[TrainSample]:
    """As many completions of each prompt as ``groups`` says, all of different lengths."""
    made: list[TrainSample] = []
    for prompt, size in enumerate(groups):
        for _ in range(size):
            length = len(made) + 1
            made.append(
                TrainSample(
                    np.array([prompt, prompt], np.int32),
                    np.full(length, 3, np.int32),
                    np.full(length, -1.0, np.float32),
                    0.5,
                )
            )
    return made


@given(
    groups=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    minibatches=st.integers(1, 10),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_each_epoch_has_each_sample_once(groups, minibatches, epochs, seed) -> None:
    samples = make_samples(groups)
    updates = plan_updates(samples, minibatches=minibatches, epochs=epochs, seed=(seed, 1))
    per_epoch = min(minibatches, len(samples))
    assert len(updates) == epochs * per_epoch
    assert all(updates)
    for epoch in range(epochs):
        these = [i for update in updates[epoch * per_epoch : (epoch + 1) * per_epoch] for i in update]
        assert sorted(these) == list(range(len(samples)))
    assert updates == plan_updates(samples, minibatches=minibatches, epochs=epochs, seed=(seed, 1))


@given(groups=st.lists(st.integers(1, 6), min_size=3, max_size=8), minibatches=st.integers(2, 3))
def test_samples_of_one_prompt_stay_together_where_there_are_enough_prompts(groups, minibatches) -> None:
    samples = make_samples(groups)
    for update in plan_updates(samples, minibatches=minibatches, epochs=1, seed=(0, 1)):
        prompts = [int(samples[i].prompt_ids[0]) for i in update]
        assert all(prompts.count(prompt) == groups[prompt] for prompt in prompts)


def test_epochs_and_steps_have_orders_of_their_own() -> None:
    samples = make_samples([1] * 16)
    first, second = (plan_updates(samples, minibatches=2, epochs=2, seed=(0, step)) for step in (1, 2))
    assert first[0] != first[2]
    assert first[0] != second[0]


def test_one_mini_batch_keeps_the_order() -> None:
    assert plan_updates(make_samples([2, 2]), minibatches=1, epochs=2, seed=(0, 1)) == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"advantage": float("nan")}, "sample 1 has the advantage nan"),
        ({"advantage": float("inf"), "name": "sample 4 of group 7"}, "sample 4 of group 7 has the advantage inf"),
        ({"logprobs": np.array([-1.0, -np.inf], np.float32)}, "the log-prob -inf at completion token 1"),
        ({"completion_ids": np.array([3, 10], np.int32)}, "a token outside of the vocabulary of 10: 10"),
        ({"prompt_ids": np.array([-1], np.int32)}, "a token outside of the vocabulary of 10: -1"),
        (
            {"routed_experts": np.zeros((3, 2, 3), np.uint8)},
            r"routed_experts of shape \[3, 2, 3\] for a model that takes \[3, 2, 2\]",
        ),
        ({"routed_experts": np.full((3, 2, 2), (3, 8), np.uint8)}, "a route to expert 8 of 8"),
        (
            {"routed_experts": np.full((3, 2, 2), 7, np.uint8)},
            "routed_experts that name expert 7 twice for token 0 in layer 0",
        ),
    ],
)
def test_numbers_that_would_poison_the_weights_are_refused_by_sample(change: dict, text: str) -> None:
    samples = make_samples([3])
    check_samples(samples, ARCH, step=4)
    samples[1] = dataclasses.replace(samples[1], **change)
    with pytest.raises(TrainingError, match=f"Step 4: .*{text}. Nothing was updated"):
        check_samples(samples, ARCH, step=4)


def test_routes_into_a_model_without_experts_are_refused() -> None:
    dense = dataclasses.replace(ARCH, num_experts=0, experts_per_token=0)
    sample = dataclasses.replace(make_samples([1])[0], routed_experts=np.full((2, 2, 2), (1, 0), np.uint8))
    check_samples([sample], ARCH, step=1)
    with pytest.raises(TrainingError, match="for a model that takes none"):
        check_samples([sample], dense, step=1)


def test_many_bad_samples_are_counted_not_all_listed() -> None:
    samples = [dataclasses.replace(sample, advantage=float("nan")) for sample in make_samples([9])]
    with pytest.raises(TrainingError, match="and 4 more"):
        check_samples(samples, ARCH, step=1)


def test_columns_stand_where_the_loss_tokens_are() -> None:
    samples = [
        dataclasses.replace(
            sample,
            start_logprobs=np.arange(len(sample.completion_ids), dtype=np.float32) + 10 * i,
            reference_logprobs=-np.arange(len(sample.completion_ids), dtype=np.float32),
        )
        for i, sample in enumerate(make_samples([2, 2]))
    ]
    batch = add_columns(pack(samples, [Piece((i,)) for i in (3, 0, 2)], alignment=8), samples)
    assert batch.slots[batch.loss_mask].tolist() == [0] * 4 + [1] + [2] * 3
    assert batch.start_logprobs[batch.loss_mask].tolist() == [30, 31, 32, 33, 0, 20, 21, 22]
    assert batch.reference_logprobs[batch.loss_mask].tolist() == [0, -1, -2, -3, 0, 0, -1, -2]
    assert not batch.start_logprobs[~batch.loss_mask].any()
    plain = add_columns(pack(make_samples([2]), [Piece((0,)), Piece((1,))]), make_samples([2]))
    assert plain.start_logprobs is None
    assert plain.reference_logprobs is None


def test_the_learning_rate_warms_up_linearly_and_stays() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(config, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate(OptimizerConfig(lr=1.0), 0) == 1.0


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_falls_to_its_minimum_and_stays_there(schedule: str) -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=2, schedule=schedule, decay_steps=10, lr_min=0.1)
    rates = [learning_rate(config, step) for step in range(14)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.55)  # half way
    assert rates[10:] == pytest.approx([0.1] * 4)
    assert all(a >= b for a, b in itertools.pairwise(rates[2:]))


def test_a_linear_decay_is_a_line() -> None:
    config = OptimizerConfig(lr=0.8, schedule="linear", decay_steps=4)
    assert [learning_rate(config, step) for step in range(6)] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0, 0.0])
