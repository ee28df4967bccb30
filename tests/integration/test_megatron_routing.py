"""Routing replay on one rank: tokens go to the experts that the engine names, with the trainer's own weights and gradient.

In every layout: test_megatron_world.py, whose worlds of models with experts replay routed_experts too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_models import EXPERTS, SIZES, make_model, reference_logprobs
from megatron_world import random_routes
from packing_world import make_groups
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from common.errors import TrainingError
from services.learner.config import LearnerConfig
from services.learner.megatron import device_map
from services.learner.megatron.policy import MegatronPolicy
from services.learner.packing import TrainSample

LAYERS, CHOSEN = SIZES["num_hidden_layers"], EXPERTS["num_experts_per_tok"]


@pytest.fixture(scope="module", params=["qwen3-moe", "qwen3-moe-raw"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With and without weights scaled to sum 1. Not to be written to."""
    return make_model(tmp_path_factory.mktemp("model"), request.param)


def make_policy(model: Path, **overrides) -> MegatronPolicy:
    options = {"max_tokens_per_microbatch": 72, "logprob_gap_alarm": None, "optimizer": {"lr": 1e-3}, **overrides}
    return MegatronPolicy(LearnerConfig.model_validate(options), model, seed=0, deterministic=True)


def with_routed_experts(sample: TrainSample, routed_experts: np.ndarray) -> TrainSample:
    return dataclasses.replace(sample, routed_experts=routed_experts)


def own_routes(policy: MegatronPolicy, sample: TrainSample) -> np.ndarray:
    """The experts that the trainer itself chooses, dearest first, as its routers told them."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.router.register_forward_hook(lambda _, __, out: seen.append(out[0].topk(CHOSEN).indices))
        for layer in policy.model.chunks[0].decoder.layers
    ]
    policy.logprobs([sample])
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).numpy().astype(np.uint8)


def train(policy: MegatronPolicy, samples: list[TrainSample]) -> tuple[dict, dict[str, torch.Tensor]]:
    """Statistics of a step, and the weights after it."""
    stats = dataclasses.asdict(dataclasses.replace(policy.train_step(samples, total_steps_done=0), step_s=0.0))
    return stats, {name: tensor.clone() for name, tensor in policy.iter_hf_tensors()}


def test_replay_of_the_trainers_own_routes_changes_no_bit(model: Path) -> None:
    samples = make_groups(SIZES["vocab_size"], num_groups=2, group_size=3)
    plain, replaying = make_policy(model), make_policy(model)
    routed = [with_routed_experts(sample, own_routes(replaying, sample)) for sample in samples]
    assert len(plain._local_batches(samples)) > 1
    assert any(batch.shared for batch in replaying._local_batches(routed))
    for got, expected in zip(replaying.logprobs(routed), plain.logprobs(samples), strict=True):
        assert np.array_equal(got, expected)
    (got, weights), (expected, expected_weights) = train(replaying, routed), train(plain, samples)
    assert (got.pop("routing_replayed_share"), got.pop("routing_changed_share")) == (1.0, 0.0)
    assert (expected.pop("routing_replayed_share"), expected.pop("routing_changed_share")) == (None, None)
    assert got == expected
    assert all(torch.equal(tensor, expected_weights[name]) for name, tensor in weights.items())


@contextmanager
def routers_told(model: torch.nn.Module, routed_experts: torch.Tensor) -> Iterator[None]:
    """transformers' routers with the choice taken out of them: softmax over all, the given ones, scaled to sum 1 if the model does so."""

    def told(router: Qwen3MoeTopKRouter, layer: int) -> object:
        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = hidden.reshape(-1, router.hidden_dim) @ router.weight.T
            weights = logits.softmax(-1).gather(1, routed_experts[:, layer])
            return (
                logits,
                weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights,
                routed_experts[:, layer],
            )

        return forward

    routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    for layer, router in enumerate(routers):
        router.forward = told(router, layer)
    yield
    for router in routers:
        del router.forward


def test_log_probs_and_gradients_with_foreign_routes_are_those_of_plain_torch(model: Path) -> None:
    policy = make_policy(model)
    samples = [
        with_routed_experts(sample, random_routes(sample, LAYERS, CHOSEN, EXPERTS["num_experts"], seed=i))
        for i, sample in enumerate(make_groups(SIZES["vocab_size"], num_groups=2, group_size=2))
    ]
    logprobs = policy.logprobs(samples)
    # Its own log-probs for those of the engine: the ratio is 1, and the gradient that of -advantage * log-prob.
    stats = policy.train_step(
        [dataclasses.replace(s, logprobs=lp) for s, lp in zip(samples, logprobs, strict=True)], total_steps_done=0
    )
    assert stats.routing_replayed_share == 1.0
    assert stats.routing_changed_share > 0.9  # of random ones
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loss = 0.0
    for sample, got in zip(samples, logprobs, strict=True):
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion_ids])).long()
        with routers_told(reference, torch.from_numpy(sample.routed_experts).long()):
            logits = reference(ids[None, :-1]).logits[0]
        expected = logits.log_softmax(-1).gather(1, ids[1:, None])[len(sample.prompt_ids) - 1 :, 0]
        np.testing.assert_allclose(got, expected.detach().numpy(), atol=1e-4)
        loss = loss - sample.advantage * expected.sum()
    (loss / sum(len(sample.completion_ids) for sample in samples)).backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None]).norm()
    assert stats.grad_norm == pytest.approx(float(norm), rel=1e-4)


def test_samples_with_and_without_routes_go_together(model: Path) -> None:
    """The router chooses for those that have none."""
    policy = make_policy(model)
    plain = make_groups(SIZES["vocab_size"], num_groups=1, group_size=2)
    routed = with_routed_experts(plain[0], random_routes(plain[0], LAYERS, CHOSEN, EXPERTS["num_experts"], seed=0))
    alone = policy.logprobs([routed])[0]
    both = policy.logprobs([routed, plain[1]])
    np.testing.assert_allclose(both[0], alone, atol=1e-5)
    np.testing.assert_allclose(both[1], reference_logprobs(model, [plain[1]])[0], atol=1e-4)
    assert np.abs(alone - policy.logprobs([plain[0]])[0]).max() > 0.01


@pytest.mark.parametrize(
    "recompute", [{"granularity": "full"}, {"granularity": "selective", "modules": ["moe"]}], ids=["full", "moe"]
)
def test_layers_that_are_computed_again_take_the_routes_of_their_micro_batch(model: Path, recompute: dict) -> None:
    """As under a pipeline's schedule: the next micro-batch has gone forward when the first comes back."""
    samples = [
        with_routed_experts(sample, random_routes(sample, LAYERS, CHOSEN, EXPERTS["num_experts"], seed=i))
        for i, sample in enumerate(make_groups(SIZES["vocab_size"], num_groups=2, group_size=3))
    ]
    results = []
    for options in ({"recompute": recompute}, {}):
        policy = make_policy(model, **options)
        (ddp,) = policy.model.ddps
        policy.memory.need_gradients()
        ddp.zero_grad_buffer()
        with device_map.scope(policy.device):
            batches = [policy._to_device(batch) for batch in policy._local_batches(samples)]
            outputs = [ddp(b.tokens, b.position_ids, None, packed_seq_params=b.packed) for b in batches]
            assert len(outputs) > 1
            for logprobs, _ in outputs:
                logprobs.sum().backward()
        results.append([parameter.main_grad.clone() for _, parameter in policy.model.named_parameters()])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


def test_routes_that_do_not_fit_the_model_are_refused_before_anything_changes(model: Path) -> None:
    policy = make_policy(model)
    (sample,) = make_groups(SIZES["vocab_size"], num_groups=1, group_size=1)
    routed_experts = random_routes(sample, LAYERS, CHOSEN, EXPERTS["num_experts"], seed=0)
    for wrong, text in (
        (routed_experts[:-1], "routed_experts of shape"),
        (routed_experts + EXPERTS["num_experts"], f"of {EXPERTS['num_experts']}"),
        (np.zeros_like(routed_experts), "expert 0 twice for token 0 in layer 0"),
    ):
        with pytest.raises(TrainingError, match=f"sample 0 has .*{text}.* Nothing was updated"):
            policy.train_step([with_routed_experts(sample, wrong)], total_steps_done=0)
