"""One rank of worlds that train with and without shared prefixes, for test_megatron_packing.py: all layouts in turn.

python -m services.learner.launch --ranks 2 -- python packing_world.py MODEL OUT '[{"parallel": {"tensor": 2}}]'
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from services.learner.config import LearnerConfig
from services.learner.megatron.mcore import parallel_state
from services.learner.megatron.model import leave_world
from services.learner.megatron.policy import MegatronPolicy
from services.learner.packing import TrainSample


def make_groups(vocab_size: int, *, num_groups: int = 3, group_size: int = 5, seed: int = 0) -> list[TrainSample]:
    """Groups of completions to the same prompt, shuffled, with behaviour log-probs near those of a small random model."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(num_groups):
        prompt = rng.integers(0, vocab_size, int(rng.integers(20, 40))).astype(np.int32)
        for _ in range(group_size):
            length = int(rng.integers(1, 12))
            samples.append(
                TrainSample(
                    prompt,
                    rng.integers(0, vocab_size, length).astype(np.int32),
                    (-np.log(vocab_size) + rng.normal(0, 0.1, length)).astype(np.float32),
                    float(rng.normal()),
                )
            )
    return [samples[i] for i in rng.permutation(len(samples))]


def step(model: Path, overrides: dict[str, Any], *, share: str) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """(log-probs, statistics of one step, positions computed here) and the gradients of that step on this rank."""
    options = {"max_tokens_per_microbatch": 96, "logprob_gap_alarm": None, "share_prefixes": share, **overrides}
    # No clipping: the gradients are compared as they are.
    options["optimizer"] = {"clip_grad_norm": 1e9, **options.get("optimizer", {})}
    policy = MegatronPolicy(LearnerConfig.model_validate(options), model, seed=0, deterministic=True)
    samples = make_groups(policy.model.arch.vocab_size)
    seen: dict[str, Any] = {"logprobs": [part.tolist() for part in policy.logprobs(samples)]}
    seen["positions"] = sum(len(batch.tokens) for batch in policy._local_batches(samples))
    seen["stats"] = dataclasses.asdict(policy.train_step(samples, total_steps_done=0))
    grads = [parameter.main_grad.clone() for chunk in policy.model.chunks for parameter in chunk.parameters()]
    return seen, grads


def compare(model: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """Both ways, and the largest difference of any gradient as a part of the largest gradient."""
    (shared, shared_grads), (alone, alone_grads) = (step(model, overrides, share=share) for share in ("auto", "off"))
    largest = max(grad.abs().max().item() for grad in alone_grads)
    pairs = zip(shared_grads, alone_grads, strict=True)
    return {
        "shared": shared,
        "alone": alone,
        "difference": max((a - b).abs().max().item() for a, b in pairs) / largest,
    }


def main() -> None:
    model, out, layouts = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    seen = []
    for layout in layouts:
        seen.append(compare(model, layout))
        dist.barrier()
        parallel_state.destroy_model_parallel()
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(seen))
    leave_world()


if __name__ == "__main__":
    main()
