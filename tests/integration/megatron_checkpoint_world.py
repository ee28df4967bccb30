"""One rank of a world that test_megatron_checkpoint.py starts: goes on from a checkpoint in each layout of LAYOUTS.

python -m services.learner.launch --ranks 4 -- python megatron_checkpoint_world.py MODEL CHECKPOINT OUT
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

from megatron_world import make_samples, save_checkpoint

from services.learner.config import LearnerConfig
from services.learner.megatron.model import leave_layout, leave_world
from services.learner.megatron.policy import MegatronPolicy

# Data-parallel size: what is left of 4 ranks.
LAYOUTS = {
    "tensor": {"tensor": 2},
    "tensor-pipeline": {"tensor": 2, "pipeline": 2},
    "interleaved": {"pipeline": 2, "virtual_stages": 2},
    "data": {},
}
OTHER = "other-optimizer"  # tensor, from a checkpoint of the other kind of optimizer
OPTIONS = {"max_tokens_per_microbatch": 48, "logprob_gap_alarm": None, "optimizer": {"lr": 1e-3}}


def make_policy(model: Path, *, distributed: bool, parallel: dict, dtype: str = "float32") -> MegatronPolicy:
    optimizer = {"lr": 1e-3, "distributed": distributed}
    config = LearnerConfig.model_validate({**OPTIONS, "parallel": parallel, "optimizer": optimizer, "dtype": dtype})
    return MegatronPolicy(config, model, seed=1, deterministic=True)


def go_on(model: Path, checkpoint: Path, out: Path, *, distributed: bool, parallel: dict) -> None:
    """The step after the checkpoint, and a checkpoint after that."""
    policy = make_policy(model, distributed=distributed, parallel=parallel)
    step, extra = policy.load_checkpoint(checkpoint)
    stats = policy.train_step(make_samples(policy.model.arch.vocab_size), total_steps_done=step)
    save_checkpoint(policy, out, step + 1, extra)
    (out / f"rank{os.environ['RANK']}.json").write_text(json.dumps(dataclasses.asdict(stats)))


def main() -> None:
    model, checkpoints, out = (Path(word) for word in sys.argv[1:4])
    kinds = ["plain", "distributed"]
    for kind, other in (kinds, reversed(kinds)):
        for name, parallel in [*LAYOUTS.items(), (OTHER, {"tensor": 2})]:
            folder, source = out / f"{kind}-{name}", other if name == OTHER else kind
            folder.mkdir(exist_ok=True)
            checkpoint = checkpoints / source / "step-00000002"
            go_on(model, checkpoint, folder, distributed=kind == "distributed", parallel=parallel)
            leave_layout()
    leave_world()


if __name__ == "__main__":
    main()
