"""Gradients of every objective in a world of two ranks, started from test_learner_objectives.py.

python -m services.learner.launch --ranks 2 -- python objective_world.py MODEL OUT
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from services.learner.config import LearnerConfig, ObjectiveConfig
from services.learner.megatron.mcore import parallel_state
from services.learner.megatron.model import leave_world
from services.learner.megatron.policy import MegatronPolicy
from services.learner.packing import TrainSample
from services.learner.policy import StepStats
from tests.learner_reference import OBJECTIVES

# Over tensor ranks the objectives differ in nothing but the entropy: a few will do.
LAYOUTS: dict[str, tuple[dict, tuple[str, ...]]] = {
    "data": ({}, tuple(OBJECTIVES)),
    "tensor": ({"tensor": 2}, ("gspo", "entropy", "all-of-it")),
}
# The start model is made another one than the trained, in a way that is the same however the weights are cut.
REFERENCE_SCALE = 1.01


def make_policy(model: Path, *, max_tokens: int, parallel: dict | None = None) -> MegatronPolicy:
    """A policy whose steps change nothing, and whose gradients are not clipped."""
    config = LearnerConfig.model_validate(
        {
            "max_tokens_per_microbatch": max_tokens,
            "logprob_gap_alarm": None,
            "parallel": parallel or {},
            "optimizer": {"lr": 0.0, "allow_zero_lr": True, "clip_grad_norm": 1e9},
            "objective": {"kl_coef": 1.0},  # keeps the start model
        }
    )
    policy = MegatronPolicy(config, model, seed=0, deterministic=True)
    for _, here in policy.reference._pairs:
        here.mul_(REFERENCE_SCALE)
    return policy


def gradients(
    policy: MegatronPolicy, samples: list[TrainSample], name: str
) -> tuple[StepStats, dict[str, torch.Tensor]]:
    """Statistics of a step and its gradient, by Hugging Face names, whole on every tensor rank."""
    objective = ObjectiveConfig.model_validate(OBJECTIVES[name])
    policy.config = policy.config.model_copy(update={"objective": objective})
    stats = policy.train_step(samples, total_steps_done=0)
    parameters = [parameter for _, parameter in policy.model.named_parameters()]
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.main_grad)
        found = {hf_name: tensor.clone() for hf_name, tensor in policy.iter_hf_tensors()}
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    return stats, found


def save_samples(samples: list[TrainSample], path: Path) -> None:
    """For ``load_samples``."""
    tensors = {}
    for i, sample in enumerate(samples):
        for field in dataclasses.fields(sample):
            value = getattr(sample, field.name)
            if field.name != "name" and value is not None:
                tensors[f"{i}/{field.name}"] = torch.from_numpy(np.atleast_1d(value).copy())
    save_file(tensors, path)


def load_samples(path: Path) -> list[TrainSample]:
    """As saved, bit for bit."""
    fields: dict[int, dict] = {}
    for name, tensor in load_file(path).items():
        index, _, field = name.partition("/")
        fields.setdefault(int(index), {})[field] = float(tensor[0]) if field == "advantage" else tensor.numpy()
    return [TrainSample(**fields[i]) for i in range(len(fields))]


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    samples = load_samples(out / "samples.safetensors")
    for layout, (parallel, names) in LAYOUTS.items():
        policy = make_policy(model, max_tokens=48, parallel=parallel)
        for name in names:
            stats, found = gradients(policy, samples, name)
            found["stats"] = torch.tensor([stats.loss, stats.entropy, stats.clip_share, stats.weight_mean])
            if os.environ["RANK"] == "1":  # not the one that others would report
                save_file(
                    {key: tensor.contiguous() for key, tensor in found.items()}, out / f"{layout}-{name}.safetensors"
                )
        parallel_state.destroy_model_parallel()
    leave_world()


if __name__ == "__main__":
    main()
