"""One rank of a world, started from test_megatron_families.py: one model after another, each in a layout of its own.

python -m services.learner.launch --ranks 4 -- python megatron_families_world.py LAYOUTS.json OUT
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from megatron_world import make_samples
from torch import Tensor

from services.learner.config import LearnerConfig
from services.learner.megatron.hf_files import Region, StoredTensor
from services.learner.megatron.model import leave_world
from services.learner.megatron.policy import MegatronPolicy
from services.learner.world import meet


@contextlib.contextmanager
def counted_reads() -> Iterator[list[int]]:
    """The number of values in each region that is read from a checkpoint."""
    counts: list[int] = []
    read = StoredTensor.read

    def count(stored: StoredTensor, region: Region) -> Tensor:
        part = read(stored, region)
        counts.append(part.numel())
        return part

    StoredTensor.read = count  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        StoredTensor.read = read  # type: ignore[method-assign]


def see(model: Path, parallel: dict, export: Path, *, trains: bool) -> dict:
    """Log-probs before and, where it trains, after one step; the step's loss and gradient norm; the names that it sends, the values that it read."""
    config = LearnerConfig.model_validate(
        {
            "max_tokens_per_microbatch": 64,
            "logprob_gap_alarm": None,
            "parallel": parallel,
            "optimizer": {"lr": 1e-3, "clip_grad_norm": 1e9},
        }
    )
    with counted_reads() as reads:
        policy = MegatronPolicy(config, model, seed=0, deterministic=True)
    samples = make_samples(policy.model.arch.vocab_size, num_samples=8)
    seen: dict = {"logprobs": [part.tolist() for part in policy.logprobs(samples)]}
    seen["read"], seen["held"] = sum(reads), sum(p.numel() for _, p in policy.model.named_parameters())
    sent = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in policy.iter_hf_tensors()]
    assert sent == policy.plan_hf_tensors()
    seen["sender_of"] = {str(policy.stage): [name for name, _, _ in sent]} if policy.is_sender else {}
    policy.export_hf(export)
    if trains:
        stats = policy.train_step(samples, total_steps_done=0)
        seen["step"] = [stats.loss, stats.grad_norm]
        seen["after"] = [part.tolist() for part in policy.logprobs(samples)]
    return seen


def join(store: dist.Store, layout: int) -> None:
    """A process group of its own for each layout.

    Megatron leaves its groups to the process group, and every gloo group of an old layout has a thread that wakes up 100 times a
    second: with ten layouts that is most of what four processes do.
    """
    leave_world()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.PrefixStore(f"layout{layout}", store), rank=rank, world_size=size)


def main() -> None:
    layouts, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    store = meet(timeout_s=600)
    seen = {}
    for i, layout in enumerate(layouts):
        join(store, i)
        for name, case in layout["cases"].items():
            seen[name] = see(Path(case["model"]), layout["parallel"], out / name / "export", trains=case["trains"])
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(seen))
    leave_world()


if __name__ == "__main__":
    main()
