"""Every objective through Megatron: the gradient of transformers with plain loops, under every split, and on two ranks."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_models import make_model
from learner_tools import REPO, run_world, weights
from learner_tools import make_policy as make_training_policy
from megatron_world import make_samples, save_checkpoint
from objective_world import LAYOUTS, REFERENCE_SCALE, gradients, make_policy, save_samples
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.errors import InvariantError, TrainingError
from services.learner.config import ObjectiveConfig
from services.learner.packing import TrainSample
from services.learner.updates import plan_updates
from tests.learner_reference import OBJECTIVES, Sequence, reference_loss

VOCAB_SIZE, LENGTH = 99, 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", "llama-tied")


@pytest.fixture(scope="module")
def samples(model: Path) -> list[TrainSample]:
    """Eight samples of 12 tokens, so that a budget says how many share a micro-batch; log-probs near the model's own."""
    rng = np.random.default_rng(5)
    made = []
    for num_prompt in (1, 3, 8, 5, 2, 10, 6, 4):
        ids = rng.integers(0, VOCAB_SIZE, LENGTH).astype(np.int32)
        zeros = np.zeros(LENGTH - num_prompt, np.float32)
        made.append(TrainSample(ids[:num_prompt], ids[num_prompt:], zeros, float(rng.normal())))
    own = make_training_policy(model).logprobs(made)

    def near(logprobs: np.ndarray) -> np.ndarray:
        return (logprobs + rng.normal(0, 0.2, len(logprobs))).astype(np.float32)

    return [
        dataclasses.replace(sample, logprobs=near(logprobs), start_logprobs=near(logprobs))
        for sample, logprobs in zip(made, own, strict=True)
    ]


@pytest.fixture(scope="module")
def whole(model: Path, samples: list[TrainSample]) -> dict[str, tuple]:
    """The gradient of each objective with all samples in one micro-batch."""
    policy = make_policy(model, max_tokens=8 * LENGTH)
    return {name: gradients(policy, samples, name) for name in OBJECTIVES}


def of_transformers(model: Path, samples: list[TrainSample], name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """(loss, gradient) of the plain loops over transformers' logits."""
    config = ObjectiveConfig.model_validate(OBJECTIVES[name])
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(REFERENCE_SCALE)

    def logprobs(of, sample: TrainSample) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion_ids])).long()
        every = of(ids[None]).logits[0].log_softmax(-1)[len(sample.prompt_ids) - 1 : -1]
        return every.gather(-1, ids[len(sample.prompt_ids) :, None])[:, 0], -(every.exp() * every).sum(-1)

    sequences = []
    for sample in samples:
        own, entropy = logprobs(trained, sample)
        sequences.append(
            Sequence(
                own,
                torch.from_numpy(sample.logprobs),
                sample.advantage,
                start=torch.from_numpy(sample.start_logprobs),
                reference=logprobs(reference, sample)[0].detach() if config.kl_coef else None,
                entropy=entropy,
            )
        )
    loss = reference_loss(sequences, config)
    loss.backward()
    return loss.item(), {key: parameter.grad for key, parameter in trained.named_parameters()}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_that_of_plain_loops_over_transformers(model: Path, samples, whole, name: str) -> None:
    loss, expected = of_transformers(model, samples, name)
    stats, found = whole[name]
    assert stats.loss == pytest.approx(loss, rel=1e-4, abs=1e-6)
    size = max(float(tensor.abs().max()) for tensor in expected.values())
    assert size > 1e-3
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-5 * max(1.0, size), msg=key)


@pytest.mark.parametrize(("per_microbatch", "count"), [(4, 2), (2, 4)], ids=["2x4", "4x2"])
def test_the_gradient_is_the_same_in_any_split_into_micro_batches(
    model: Path, samples, whole, per_microbatch: int, count: int
) -> None:
    policy = make_policy(model, max_tokens=per_microbatch * LENGTH)
    for name in OBJECTIVES:
        stats, found = gradients(policy, samples, name)
        assert (stats.num_microbatches, whole[name][0].num_microbatches) == (count, 1)
        assert stats.loss == pytest.approx(whole[name][0].loss, abs=1e-6)
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, whole[name][1][key], rtol=1e-6, atol=1e-6, msg=f"{name}: {key}")


@pytest.mark.slow
def test_the_gradient_is_the_same_on_two_ranks(tmp_path: Path, model: Path, samples, whole) -> None:
    """One world for all: two data-parallel ranks with half of the samples each, then two tensor ranks."""
    save_samples(samples, tmp_path / "samples.safetensors")
    done = run_world("objective_world.py", model, tmp_path, num_ranks=2, timeout_s=500, more_paths=[REPO / "tests"])
    assert done.returncode == 0, done.stderr[-4000:]
    for layout, (_, names) in LAYOUTS.items():
        for name in names:
            stats, expected = whole[name]
            found = load_file(tmp_path / f"{layout}-{name}.safetensors")
            told = [stats.loss, stats.entropy, stats.clip_share, stats.weight_mean]
            assert found.pop("stats").tolist() == pytest.approx(told, rel=1e-5, abs=1e-6)
            assert found.keys() == expected.keys()
            for key, tensor in found.items():
                torch.testing.assert_close(tensor, expected[key], rtol=1e-6, atol=1e-6, msg=f"{layout}: {name}: {key}")


def test_the_start_model_stays_what_it_was_and_its_use_leaves_no_trace(model: Path) -> None:
    policy = make_training_policy(model, optimizer={"lr": 1e-2}, objective={"kl_coef": 0.1})
    samples = make_samples(VOCAB_SIZE, num_samples=5)
    first = policy.logprobs(samples)
    for got, expected in zip(policy.reference_logprobs(samples), first, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert policy.train_step(samples, total_steps_done=0).kl_reference == pytest.approx(0.0, abs=1e-9)
    moved, kept = policy.logprobs(samples), weights(policy)
    assert max(np.abs(a - b).max() for a, b in zip(moved, first, strict=True)) > 1e-2
    for got, expected in zip(policy.reference_logprobs(samples), first, strict=True):
        np.testing.assert_array_equal(got, expected)
    with pytest.raises(ZeroDivisionError), policy.reference.in_place():
        raise ZeroDivisionError
    assert all(torch.equal(tensor, kept[name]) for name, tensor in policy.iter_hf_tensors())
    log_ratios = np.concatenate([a - b for a, b in zip(moved, first, strict=True)])
    stats = policy.train_step(samples, total_steps_done=1)
    assert stats.kl_reference == pytest.approx(float(np.mean(np.exp(-log_ratios) - 1 + log_ratios)), rel=1e-4)


def test_a_checkpoint_does_not_change_the_start_model(tmp_path: Path, model: Path) -> None:
    options = {"optimizer": {"lr": 1e-2}, "objective": {"kl_coef": 0.1}}
    samples = make_samples(VOCAB_SIZE, num_samples=5)
    policy = make_training_policy(model, **options)
    first = policy.logprobs(samples)
    policy.train_step(samples, total_steps_done=0)
    folder = save_checkpoint(policy, tmp_path, 1, {})
    resumed = make_training_policy(model, **options)
    resumed.load_checkpoint(folder)
    for got, expected in zip(resumed.reference_logprobs(samples), first, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_the_start_model_finds_weights_that_were_offloaded(model: Path) -> None:
    policy = make_training_policy(model, optimizer={"lr": 1e-2}, objective={"kl_coef": 0.1}, offload_while_waiting=True)
    samples = make_samples(VOCAB_SIZE, num_samples=3)
    first = policy.logprobs(samples)
    policy.train_step(samples, total_steps_done=0)
    moved = policy.logprobs(samples)
    policy.rest()
    for got, expected in zip(policy.reference_logprobs(samples), first, strict=True):
        np.testing.assert_array_equal(got, expected)
    for got, expected in zip(policy.logprobs(samples), moved, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_without_a_kl_no_start_model_is_kept(model: Path) -> None:
    policy = make_training_policy(model)
    samples = make_samples(VOCAB_SIZE, num_samples=2)
    assert policy.reference is None
    assert policy.train_step(samples, total_steps_done=0).kl_reference is None
    with pytest.raises(InvariantError, match="kl_coef"):
        policy.reference_logprobs(samples)


def test_a_batch_in_mini_batches_is_a_chain_of_steps_with_the_log_probs_of_its_start(model: Path) -> None:
    objective = {"decoupled": True, "importance": "truncate"}
    optimizer = {"lr": 1e-3, "schedule": "linear", "decay_steps": 10}
    samples = make_samples(VOCAB_SIZE)
    policy = make_training_policy(model, optimizer=optimizer, objective={**objective, "minibatches": 2, "epochs": 2})
    stats = policy.train_step(samples, total_steps_done=7)
    assert (stats.num_updates, policy.optimizer_steps) == (4, 4)
    assert stats.lr == pytest.approx(1e-3 * 0.7)  # of the fourth optimizer step, whatever the run's step is

    chain = make_training_policy(model, optimizer=optimizer, objective=objective)
    start = chain.logprobs(samples)
    fixed = [dataclasses.replace(s, start_logprobs=lp) for s, lp in zip(samples, start, strict=True)]
    for indices in plan_updates(samples, minibatches=2, epochs=2, seed=(0, 8)):
        last = chain.train_step([fixed[i] for i in indices], total_steps_done=7)
    assert last.lr == stats.lr
    there = weights(chain)
    assert all(torch.equal(tensor, there[name]) for name, tensor in policy.iter_hf_tensors())


def test_the_learning_rate_goes_on_where_the_checkpoint_was_made(tmp_path: Path, model: Path) -> None:
    options = {"optimizer": {"lr": 1e-3, "schedule": "cosine", "decay_steps": 9}, "objective": {"minibatches": 3}}
    samples = make_samples(VOCAB_SIZE)
    policy = make_training_policy(model, **options)
    policy.train_step(samples, total_steps_done=0)
    folder = save_checkpoint(policy, tmp_path, 2, {"of": "the caller"})  # one of the run's two steps had no signal
    expected = policy.train_step(samples, total_steps_done=2)
    resumed = make_training_policy(model, **options)
    assert resumed.load_checkpoint(folder) == (2, {"of": "the caller"})
    assert resumed.optimizer_steps == 3
    assert dataclasses.replace(resumed.train_step(samples, total_steps_done=2), step_s=0.0) == dataclasses.replace(
        expected, step_s=0.0
    )


def test_with_several_optimizer_steps_the_gap_alarm_comes_before_the_first(model: Path) -> None:
    policy = make_training_policy(model, logprob_gap_alarm=0.2, objective={"minibatches": 2})
    samples = make_samples(VOCAB_SIZE)
    right = [dataclasses.replace(s, logprobs=lp) for s, lp in zip(samples, policy.logprobs(samples), strict=True)]
    # Only half of them, so that one mini-batch alone may look right.
    wrong = [dataclasses.replace(s, logprobs=s.logprobs - 1.0) for s in right[:6]] + right[6:]
    before = weights(policy)
    with pytest.raises(TrainingError, match=r"alarm is at 0.2 .* Nothing was updated"):
        policy.train_step(wrong, total_steps_done=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.iter_hf_tensors())
    assert policy.train_step(right, total_steps_done=0).logprob_gap_max < 1e-4


def test_a_learning_rate_of_zero_measures_everything_and_changes_nothing(model: Path) -> None:
    policy = make_training_policy(model, optimizer={"lr": 0.0, "allow_zero_lr": True})
    before = weights(policy)
    stats = policy.train_step(make_samples(VOCAB_SIZE), total_steps_done=0)
    assert stats.lr == 0.0
    assert stats.grad_norm > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.iter_hf_tensors())


def test_the_entropy_bonus_raises_the_entropy(model: Path) -> None:
    samples = [dataclasses.replace(sample, advantage=0.0) for sample in make_samples(VOCAB_SIZE)]
    policy = make_training_policy(model, optimizer={"lr": 1e-3}, objective={"entropy_coef": 1.0})
    entropies = [policy.train_step(samples, total_steps_done=step).entropy for step in range(4)]
    assert all(a < b for a, b in itertools.pairwise(entropies))
