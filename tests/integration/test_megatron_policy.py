"""One rank: the same numbers as transformers, exact weights both ways, and steps that refuse what can't be trusted."""

from __future__ import annotations

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_models import SIZES, make_model, reference_logprobs
from learner_tools import make_policy, weights
from megatron_world import make_samples, save_checkpoint
from transformers import AutoModelForCausalLM

from common.errors import ForebayError, TrainingError
from services.learner.config import LearnerConfig
from services.learner.megatron import device_map
from services.learner.megatron.policy import MegatronPolicy
from services.learner.packing import TrainSample


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def test_the_engines_temperature_is_applied(model: Path) -> None:
    policy = MegatronPolicy(LearnerConfig(), model, seed=0, deterministic=True, temperature=0.7)
    (sample,) = make_samples(SIZES["vocab_size"], num_samples=1)
    np.testing.assert_allclose(policy.logprobs([sample])[0], reference_logprobs(model, [sample], 0.7)[0], atol=1e-4)


def test_a_sequence_has_the_same_log_probs_packed_and_alone(model: Path) -> None:
    policy = make_policy(model)
    samples = make_samples(SIZES["vocab_size"], num_samples=8)
    for sample, packed in zip(samples, policy.logprobs(samples), strict=True):
        np.testing.assert_allclose(policy.logprobs([sample])[0], packed, atol=1e-5)


def test_a_step_is_the_same_under_any_token_budget(model: Path) -> None:
    samples = make_samples(SIZES["vocab_size"])
    steps = [
        make_policy(model, max_tokens_per_microbatch=n).train_step(samples, total_steps_done=0) for n in (32, 4096)
    ]
    assert steps[0].num_microbatches > steps[1].num_microbatches == 1
    for name in ("loss", "grad_norm", "entropy", "logprob_gap_mean", "kl_k3", "ratio_max"):
        assert getattr(steps[0], name) == pytest.approx(getattr(steps[1], name), rel=1e-4, abs=1e-6)


def test_gradient_norm_and_update_equal_those_of_autograd_on_transformers(model: Path) -> None:
    """On-policy, the objective's gradient is that of -sum(A logp) / tokens; plain AdamW then gives the same weights."""
    policy = make_policy(model, optimizer={"lr": 1e-3, "clip_grad_norm": 0.5})
    samples = make_samples(SIZES["vocab_size"], num_samples=5)
    samples = [dataclasses.replace(s, logprobs=lp) for s, lp in zip(samples, policy.logprobs(samples), strict=True)]
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loss = torch.zeros(())
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion_ids])).long()
        every = reference(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        loss = loss - sample.advantage * every[len(sample.prompt_ids) - 1 :].sum()
    (loss / sum(len(s.completion_ids) for s in samples)).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    torch.optim.AdamW(reference.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0).step()

    stats = policy.train_step(samples, total_steps_done=0)
    assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    assert stats.ratio_max == pytest.approx(1.0, abs=1e-5)
    after = dict(reference.named_parameters())
    for name, tensor in policy.iter_hf_tensors():
        # Adam's first step is lr * sign(g): where g is rounding noise the sign is free, so a few may differ.
        off = (tensor - after[name].detach()).abs() > 1e-5
        assert off.float().mean() < 0.01, name


def test_training_raises_the_log_probs_of_good_completions_and_lowers_those_of_bad_ones(model: Path) -> None:
    policy = make_policy(model, optimizer={"lr": 1e-3})
    samples = [
        dataclasses.replace(s, advantage=a) for s, a in zip(make_samples(99, num_samples=2), (1.0, -1.0), strict=True)
    ]
    before = policy.logprobs(samples)
    samples = [dataclasses.replace(s, logprobs=lp) for s, lp in zip(samples, before, strict=True)]
    for step in range(3):
        policy.train_step(samples, total_steps_done=step)
    good, bad = (after.mean() - first.mean() for after, first in zip(policy.logprobs(samples), before, strict=True))
    assert good > 0 > bad


@pytest.mark.parametrize("what", ["logprobs", "advantage"])
def test_a_number_that_is_not_finite_changes_nothing_and_its_sample_is_named(model: Path, what: str) -> None:
    policy = make_policy(model)
    samples = make_samples(SIZES["vocab_size"])
    policy.train_step(samples, total_steps_done=0)
    before, nan = weights(policy), float("nan")
    bad = np.full_like(samples[3].logprobs, nan) if what == "logprobs" else nan
    poisoned = [*samples[:3], dataclasses.replace(samples[3], name="group 7, sample 1", **{what: bad}), *samples[4:]]
    with pytest.raises(TrainingError, match=r"Step 2: group 7, sample 1 has the .* nan.* Nothing was updated"):
        policy.train_step(poisoned, total_steps_done=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.iter_hf_tensors())
    assert math.isfinite(policy.train_step(samples, total_steps_done=1).loss)


def test_a_loss_that_is_not_finite_changes_nothing(model: Path) -> None:
    policy = make_policy(model)
    samples, before = make_samples(SIZES["vocab_size"]), weights(policy)
    norm = policy.model.chunks[0].decoder.final_layernorm
    hook = norm.register_forward_hook(lambda *args: args[-1] * float("nan"))
    with pytest.raises(TrainingError, match="loss of step 1 is nan; nothing was updated"):
        policy.train_step(samples, total_steps_done=0)
    hook.remove()
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.iter_hf_tensors())


def test_a_gradient_that_is_not_finite_changes_nothing(model: Path) -> None:
    policy = make_policy(model)
    before = weights(policy)
    hook = policy.model.chunks[0].decoder.final_layernorm.weight.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(TrainingError, match="gradient norm of step 1"):
        policy.train_step(make_samples(SIZES["vocab_size"]), total_steps_done=0)
    hook.remove()
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.iter_hf_tensors())


def test_a_log_prob_gap_past_the_alarm_changes_nothing(model: Path) -> None:
    policy = make_policy(model, logprob_gap_alarm=0.2)
    before = weights(policy)
    samples = make_samples(SIZES["vocab_size"])
    right = [dataclasses.replace(s, logprobs=lp) for s, lp in zip(samples, policy.logprobs(samples), strict=True)]
    wrong = [dataclasses.replace(s, logprobs=s.logprobs - 0.3) for s in right]
    with pytest.raises(TrainingError, match=r"differ by 0.3000 nats .* alarm is at 0.2"):
        policy.train_step(wrong, total_steps_done=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.iter_hf_tensors())
    assert policy.train_step(right, total_steps_done=0).logprob_gap_max < 1e-4


def test_a_batch_without_loss_tokens_is_refused(model: Path) -> None:
    empty = TrainSample(np.array([1], np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32), 1.0)
    with pytest.raises(TrainingError, match="no loss tokens"):
        make_policy(model).train_step([empty], total_steps_done=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", [False, True])
def test_a_run_that_was_cut_goes_on_bit_for_bit(tmp_path: Path, model: Path, dtype: str, distributed: bool) -> None:
    options = {"dtype": dtype, "optimizer": {"lr": 1e-3, "distributed": distributed}}
    samples = make_samples(SIZES["vocab_size"])
    whole = make_policy(model, **options)
    for step in range(2):
        whole.train_step(samples, total_steps_done=step)
    folder = save_checkpoint(whole, tmp_path / "checkpoints", 2, {"cursor": 7})
    expected = whole.train_step(samples, total_steps_done=2)

    cut = make_policy(model, **options)
    assert cut.load_checkpoint(folder) == (2, {"cursor": 7})
    got = cut.train_step(samples, total_steps_done=2)
    assert dataclasses.replace(got, step_s=0.0) == dataclasses.replace(expected, step_s=0.0)
    there = weights(whole)
    assert all(torch.equal(tensor, there[name]) for name, tensor in cut.iter_hf_tensors())
    assert [path.name for path in folder.parent.iterdir()] == ["step-00000002"]


def test_bfloat16_trains_near_float32(model: Path) -> None:
    samples = make_samples(SIZES["vocab_size"])
    steps = [
        make_policy(model, dtype=dtype).train_step(samples, total_steps_done=0) for dtype in ("float32", "bfloat16")
    ]
    assert steps[1].loss == pytest.approx(steps[0].loss, rel=0.05)
    assert steps[1].grad_norm == pytest.approx(steps[0].grad_norm, rel=0.05)


def test_a_step_may_run_in_another_thread_than_the_one_that_built_the_policy(model: Path) -> None:
    samples = make_samples(SIZES["vocab_size"])
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(make_policy(model).train_step, samples, total_steps_done=0).result()
    assert there.loss == make_policy(model).train_step(samples, total_steps_done=0).loss


def test_the_cpu_map_refuses_a_machine_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ForebayError, match="refuses to load where CUDA is available"):
        device_map.install()
