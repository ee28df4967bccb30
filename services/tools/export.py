"""``forebay export``: a checkpoint of any layout -> a Hugging Face folder, in one process on the CPU."""

from __future__ import annotations

import os
import time
from pathlib import Path

from common.errors import ConfigError
from services.learner.architecture import read_architecture
from services.learner.checkpoints import latest_checkpoint
from services.learner.config import LearnerConfig


def main(checkpoint: Path, target: Path, *, model: Path | None = None) -> int:
    """Body of the command; returns its exit code.

    Args:
        checkpoint: a checkpoint's folder, or a run's, whose latest one is taken.
        target: the folder to make.
        model: the Hugging Face folder that the run began with, for config and tokenizer; none: where it was then.

    Raises:
        ConfigError: no such checkpoint, a damaged one, one of another model, or ``target`` is there already.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the weights go from file to file: no GPU is needed, nor its memory
    if (checkpoint / "checkpoints").is_dir():
        found = latest_checkpoint(checkpoint / "checkpoints")
        if found is None:
            raise ConfigError(f"The run {checkpoint} has no complete checkpoint yet.")
        checkpoint = found
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already. Name another folder, or remove it.")
    started = time.monotonic()

    import torch

    from services.learner.megatron import device_map
    from services.learner.megatron.checkpoint import load_weights, read_manifest
    from services.learner.megatron.export import export_hf
    from services.learner.megatron.model import build_model, init_world, leave_world

    manifest = read_manifest(checkpoint)
    source = model or Path(manifest["source"])
    if not (source / "config.json").is_file():
        raise ConfigError(
            f"The model that {checkpoint} was trained from is not at {source}. Its config and tokenizer are needed:"
            " name its Hugging Face folder with --model."
        )
    arch, device = read_architecture(source), torch.device("cpu")
    config = LearnerConfig(device="cpu", dtype=manifest["layout"]["dtype"])
    try:
        ranks = init_world(config, arch, device, seed=0)
        with device_map.scope(device):
            built = build_model(config, arch, ranks, device, deterministic=False)
            load_weights(built, checkpoint)
            export_hf(target, source, built)
    finally:
        leave_world()
    size = sum(file.stat().st_size for file in target.iterdir())
    print(
        f"{target}: the {arch.family} model of step {manifest['step']}, {size / 1e6:,.0f} MB,"
        f" in {time.monotonic() - started:.1f} s"
    )
    return 0
