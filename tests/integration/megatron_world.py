"""One rank of a learner world, started from test_megatron_world.py: trains in each layout of JOBS, one after another.

python -m services.learner.launch --ranks 2 -- python megatron_world.py OUT \\
    '{"tensor": {"model": "MODEL", "overrides": {"parallel": {"tensor": 2}}}}'

What each rank saw is in OUT/NAME/rankN.json.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import numpy as np

from services.learner.checkpoints import step_folder
from services.learner.config import LearnerConfig
from services.learner.megatron.model import leave_layout, leave_world
from services.learner.megatron.policy import MegatronPolicy
from services.learner.packing import TrainSample


def make_samples(vocab_size: int, num_samples: int = 12, seed: int = 0) -> list[TrainSample]:
    """Samples of different lengths whose behaviour log-probs are near those of a small random model."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(num_samples):
        num_prompt, num_completion = int(rng.integers(1, 12)), int(rng.integers(1, 20))
        samples.append(
            TrainSample(
                prompt_ids=rng.integers(0, vocab_size, num_prompt).astype(np.int32),
                completion_ids=rng.integers(0, vocab_size, num_completion).astype(np.int32),
                logprobs=(-np.log(vocab_size) + rng.normal(0, 0.1, num_completion)).astype(np.float32),
                advantage=float(rng.normal()),
            )
        )
    return samples


def random_routes(sample: TrainSample, layers: int, chosen: int, experts: int, seed: int) -> np.ndarray:
    """Experts for each token that is computed: uint8 [P + C - 1, layers, chosen], none of them twice."""
    order = np.random.default_rng(seed).random((sample.length - 1, layers, experts)).argsort(-1)
    return order[..., :chosen].astype(np.uint8)


def save_checkpoint(policy: MegatronPolicy, root: Path, step: int, extra: dict) -> Path:
    """Its folder, whole."""
    policy.begin_checkpoint(root, step, extra)
    assert policy.finish_checkpoint(wait=True) == step
    return step_folder(root, step)


def train(model: Path, out: Path, overrides: dict, *, num_steps: int = 3) -> dict:
    """Log-probs, ``num_steps`` steps, a checkpoint, one more step, back to the checkpoint, an export there, that step again."""
    out.mkdir(exist_ok=True, parents=True)
    config = LearnerConfig.model_validate({"max_tokens_per_microbatch": 48, **overrides})
    policy = MegatronPolicy(config, model, seed=0, deterministic=True)
    samples = make_samples(policy.model.arch.vocab_size)
    seen: dict = {"logprobs": [part.tolist() for part in policy.logprobs(samples)]}
    seen["steps"] = [dataclasses.asdict(policy.train_step(samples, total_steps_done=i)) for i in range(num_steps)]
    folder = save_checkpoint(policy, out / "checkpoints", num_steps, {"note": "as saved"})
    seen["after"] = dataclasses.asdict(policy.train_step(samples, total_steps_done=num_steps))
    step, extra = policy.load_checkpoint(folder)
    assert (step, extra) == (num_steps, {"note": "as saved"})
    policy.export_hf(out / "export")
    sent = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in policy.iter_hf_tensors()]
    assert sent == policy.plan_hf_tensors()
    seen["again"] = dataclasses.asdict(policy.train_step(samples, total_steps_done=num_steps))
    if (arch := policy.model.arch).is_moe:
        sizes = (arch.num_layers, arch.experts_per_token, arch.num_experts)
        routed = [
            dataclasses.replace(s, routed_experts=random_routes(s, *sizes, seed=i)) for i, s in enumerate(samples)
        ]
        seen["routed_logprobs"] = [part.tolist() for part in policy.logprobs(routed)]
        seen["routed"] = dataclasses.asdict(policy.train_step(routed, total_steps_done=num_steps + 1))
    seen["sent"] = [name for name, _, _ in sent]
    seen["place"] = [policy.stage, policy.is_sender]
    return seen


def main() -> None:
    out, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    for name, job in jobs.items():
        print(f"layout {name}", file=sys.stderr, flush=True)
        seen = train(Path(job["model"]), out / name, job["overrides"])
        (out / name / f"rank{os.environ['RANK']}.json").write_text(json.dumps(seen))
        leave_layout()
    leave_world()


if __name__ == "__main__":
    main()
