"""The policy as a Hugging Face model folder: each tensor in the dtype, and all files beside the weights, of the folder it came from."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from common.errors import ConfigError
from services.learner.architecture import Architecture
from services.learner.megatron.hf_files import DTYPES, INDEX_FILE, SINGLE_FILE, open_weights
from services.learner.megatron.hf_names import all_entries, hf_shape, stage_entries
from services.learner.megatron.hf_weights import is_sender, iter_hf_tensors, sent_names, takes_part
from services.learner.megatron.model import BuiltModel

# Bytes of weights per file, and so the most that one rank holds beside its model.
SHARD_BYTES = 4 << 30
# Files of the source folder that hold weights, or say where they are; all others (config, tokenizer, template) are copied.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".index.json")


def export_hf(target: Path, source: Path, model: BuiltModel, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes the folder ``target`` aside and renames it; an earlier one is replaced. Collective over the world.

    Each pipeline stage writes its own layers, shard by shard. ``source``: the folder the policy was loaded from. Experts are
    written one by one, as the hub's models have them, also where ``source`` has them stacked.
    """
    partial = target.with_name(f".partial-{target.name}")
    dtypes = stored_dtypes(source, model.arch)
    files = plan_files(model.arch, model.layers, dtypes, shard_bytes)
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    if takes_part(model):
        _write_stage(partial, files, dtypes, model)
    dist.barrier()
    if dist.get_rank() == 0:
        _write_rest(partial, source, files, dtypes, model.arch)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    dist.barrier()


def stored_dtypes(source: Path, arch: Architecture) -> dict[str, torch.dtype]:
    """The dtype of each tensor in a model folder; that of its config.json where the weights are gone."""
    dtypes = dict.fromkeys(sent_names(all_entries(arch)), getattr(torch, arch.dtype))
    with contextlib.suppress(ConfigError), open_weights(source) as stored:
        # All are in DTYPES, as was checked when it was loaded.
        dtypes |= {name: DTYPES[stored[name].dtype] for name in dtypes.keys() & stored.keys()}
    return dtypes


def plan_files(
    arch: Architecture, layers: tuple[tuple[range, ...], ...], dtypes: Mapping[str, torch.dtype], shard_bytes: int
) -> dict[str, str]:
    """HF name -> file name, over all stages, in the order of writing; ``model.safetensors`` alone where one file holds all."""
    files: dict[str, str] = {}
    for stage in range(len(layers)):
        used, shard = 0, 0
        for name in sent_names(stage_entries(arch, layers, stage)):
            size = math.prod(hf_shape(arch, name)) * dtypes[name].itemsize
            if used and used + size > shard_bytes:
                used, shard = 0, shard + 1
            used += size
            files[name] = f"model-stage{stage:03d}-{shard:04d}.safetensors"
    if len(set(files.values())) == 1:
        return dict.fromkeys(files, SINGLE_FILE)
    return files


def _write_stage(folder: Path, files: dict[str, str], dtypes: Mapping[str, torch.dtype], model: BuiltModel) -> None:
    pending: dict[str, Tensor] = {}
    current = ""
    for name, tensor in iter_hf_tensors(model, dtypes):
        if pending and files[name] != current:
            save_file(pending, folder / current, metadata={"format": "pt"})
            pending = {}
        current = files[name]
        if is_sender(model.ranks):
            pending[name] = tensor.cpu().contiguous()
    if pending:
        save_file(pending, folder / current, metadata={"format": "pt"})


def _write_rest(
    folder: Path, source: Path, files: dict[str, str], dtypes: Mapping[str, torch.dtype], arch: Architecture
) -> None:
    if len(set(files.values())) > 1:
        total = sum(math.prod(hf_shape(arch, name)) * dtypes[name].itemsize for name in files)
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=1), encoding="utf-8")
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(file, folder / file.name)
