"""Precision, recomputation and offload on one rank: what they cost is memory, time or rounding, never another result."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_models import SIZES, make_model
from learner_tools import make_policy, weights
from megatron_world import make_samples, save_checkpoint

from common.errors import TrainingError
from services.learner.megatron.attention import PackedAttention
from services.learner.megatron.offload import Parkable
from services.learner.megatron.policy import MegatronPolicy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written to."""
    return make_model(tmp_path_factory.mktemp("model"), "qwen3")


def train(policy: MegatronPolicy, num_steps: int = 2) -> list:
    samples = make_samples(SIZES["vocab_size"])
    stats = [policy.train_step(samples, total_steps_done=step) for step in range(num_steps)]
    return [dataclasses.replace(item, step_s=0.0) for item in stats]


def bytes_on_device(policy: MegatronPolicy) -> int:
    """Of weights, gradients, masters and moments."""
    tensors = [parameter.data for _, parameter in policy.model.named_parameters()]
    for ddp in policy.model.ddps:
        tensors += [buffer.grad_data for buffer in ddp.buffers]
    for chained in policy.optimizer.chained_optimizers:
        for group in chained.optimizer.param_groups:
            for parameter in group["params"]:
                state = chained.optimizer.state[parameter]
                tensors += [parameter.data, *(value for value in state.values() if value.ndim)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def test_parked_storages_are_empty_and_come_back_bit_for_bit() -> None:
    whole = torch.arange(10.0)
    tensors = [whole[:4], whole[4:].view(2, 3), torch.ones(3, dtype=torch.bfloat16)]
    parkable = Parkable(lambda: tensors, keep=True)
    for _ in range(2):
        assert parkable.park() == 46
        assert parkable.park() == 0
        assert whole.untyped_storage().nbytes() == tensors[2].untyped_storage().nbytes() == 0
        parkable.unpark()
        parkable.unpark()
        assert whole.tolist() == list(range(10))
        assert tensors[1].tolist() == [[4, 5, 6], [7, 8, 9]]
        assert tensors[2].tolist() == [1, 1, 1]
        whole.flip(0)


def test_what_is_not_kept_comes_back_as_zeros() -> None:
    gradient = torch.ones(5)
    parkable = Parkable(lambda: [gradient], keep=False)
    assert parkable.park() == 20
    parkable.unpark()
    assert gradient.tolist() == [0.0] * 5


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "optimizer": {"distributed": True}}],
    ids=["float32", "bfloat16", "distributed"],
)
def test_offloading_changes_no_bit_and_leaves_nothing_on_the_device(tmp_path: Path, model: Path, options: dict) -> None:
    plain = make_policy(model, **options)
    expected = [*train(plain, 1), *train(plain, 1)]
    section = {**options.get("optimizer", {}), "offload": True}
    policy = make_policy(model, **{**options, "optimizer": section, "offload_while_waiting": True})
    policy.rest()
    got = train(policy, 1)
    most = bytes_on_device(policy)
    policy.rest()
    policy.rest()
    assert most > bytes_on_device(policy) == 0
    got += train(policy, 1)
    assert got == expected
    policy.rest()
    folder = save_checkpoint(policy, tmp_path, 2, {})
    policy.rest()
    assert bytes_on_device(policy) == 0
    resumed = make_policy(model, **{**options, "optimizer": section, "offload_while_waiting": True})
    resumed.rest()
    resumed.load_checkpoint(folder)
    again = make_policy(model, **options)
    again.load_checkpoint(folder)
    assert train(resumed, 1) == train(again, 1)
    policy.rest()
    policy.logprobs(make_samples(SIZES["vocab_size"]))
    resumed.rest()
    resumed.export_hf(tmp_path / "export")
    trained = weights(again)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in resumed.iter_hf_tensors())


def test_the_optimizers_state_is_on_the_host_between_steps(model: Path) -> None:
    plain, policy = (make_policy(model, dtype="bfloat16", optimizer={"offload": offload}) for offload in (False, True))
    assert train(plain) == train(policy)
    num_parameters = sum(parameter.numel() for _, parameter in policy.model.named_parameters())
    # 4 bytes each of a master and two moments.
    assert bytes_on_device(plain) - bytes_on_device(policy) == 12 * num_parameters


@pytest.mark.parametrize(
    ("recompute", "forwards"),
    [
        ({"granularity": "none"}, 1),
        ({"granularity": "selective"}, 2),
        ({"granularity": "full"}, 2),
        ({"granularity": "full", "num_layers": 2}, 2),
        ({"granularity": "full", "method": "block", "num_layers": 2}, 1.5),
        ({"granularity": "selective", "modules": ["mlp"]}, 1),
    ],
)
def test_recomputation_runs_layers_again_and_changes_no_bit(
    model: Path, monkeypatch: pytest.MonkeyPatch, recompute: dict, forwards: float
) -> None:
    expected = train(make_policy(model), 1)
    policy = make_policy(model, recompute=recompute)
    ran, forward = [], PackedAttention.forward

    def counted(self, *args, **kwargs):
        ran.append(self.layer_number)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(PackedAttention, "forward", counted)
    got = train(policy, 1)
    assert got == expected
    assert len(ran) == forwards * SIZES["num_hidden_layers"] * expected[0].num_microbatches


def test_float16_trains_near_float32_with_a_scaled_loss(model: Path) -> None:
    scaled = {"optimizer": {"initial_loss_scale": 16.0}}  # these random models have gradients in the hundreds
    (wide,), (narrow,) = (train(make_policy(model, **more), 1) for more in ({}, {"dtype": "float16", **scaled}))
    assert (narrow.loss_scale, narrow.num_overflows) == (16.0, 0)
    assert (wide.loss_scale, wide.num_overflows) == (1.0, 0)
    assert narrow.loss == pytest.approx(wide.loss, rel=0.01)
    assert narrow.grad_norm == pytest.approx(wide.grad_norm, rel=0.01)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_gradient_that_overflows_in_float16_skips_the_step_and_halves_the_scale(
    model: Path, distributed: bool
) -> None:
    options = {"initial_loss_scale": 2.0**24, "loss_scale_window": 2, "distributed": distributed}
    policy = make_policy(model, dtype="float16", optimizer=options)
    before, skipped = weights(policy), []
    while not skipped or skipped[-1].num_overflows:
        skipped += train(policy, 1)
        if skipped[-1].num_overflows:
            assert all(torch.equal(tensor, before[name]) for name, tensor in policy.iter_hf_tensors())
    assert 2 < len(skipped) < 24
    scales = [item.loss_scale for item in skipped]
    assert scales == [*(2.0 ** (23 - i) for i in range(len(skipped) - 1)), scales[-2]]
    assert skipped[-1].grad_norm > 0
    # One more step without overflow fills the window of two.
    (after,) = train(policy, 1)
    assert after.loss_scale == 2 * scales[-1] or after.num_overflows


def test_a_gradient_too_large_for_float16_at_any_scale_is_an_error(model: Path) -> None:
    policy = make_policy(model, dtype="float16", optimizer={"initial_loss_scale": 1.0})
    before = weights(policy)
    samples = [dataclasses.replace(s, advantage=float(np.float32(1e9))) for s in make_samples(SIZES["vocab_size"])]
    with pytest.raises(TrainingError, match=r"loss scale of 1.*bfloat16"):
        policy.train_step(samples, total_steps_done=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.iter_hf_tensors())
