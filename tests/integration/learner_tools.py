"""The learner in tests: a policy in this process, and worlds of several that run a script of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from services.learner.config import LearnerConfig
from services.learner.megatron.policy import MegatronPolicy

HERE = Path(__file__).parent
REPO = HERE.parents[1]


def make_policy(model: Path, **overrides) -> MegatronPolicy:
    """``overrides``: of ``LearnerConfig``."""
    config = LearnerConfig.model_validate({"max_tokens_per_microbatch": 64, "logprob_gap_alarm": None, **overrides})
    return MegatronPolicy(config, model, seed=0, deterministic=True)


def weights(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    """A copy, by Hugging Face name."""
    return {name: tensor.clone() for name, tensor in policy.iter_hf_tensors()}


def run_world(
    script: str, *args: Path | str, num_ranks: int, timeout_s: float, more_paths: Iterable[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs ``script`` of this folder on so many ranks, with one thread each. ``more_paths``: to import from, besides the project."""
    command = [sys.executable, "-m", "services.learner.launch", "--ranks", str(num_ranks), "--", sys.executable]
    paths = os.pathsep.join(map(str, (REPO, *more_paths)))
    return subprocess.run(
        [*command, HERE / script, *args],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
