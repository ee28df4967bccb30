"""Checkpoints of the whole training state: one safetensors file per rank, no pickle, written aside and renamed.

    ROOT/step-00000040/
        checkpoint.json                      step, layout, the caller's own record: written last
        rank-tp0-pp0-dp0.safetensors         parameters, optimizer state, random states of that rank

Exact: a run that loads it goes on bit for bit. The layout must be the same on loading; a changed one is refused (export to
Hugging Face form and start from there, which leaves the optimizer's moments behind). Without the distributed optimizer all
data-parallel ranks hold the same state and only the first writes it.

Not Megatron's dist_checkpointing: that pickles its common part, and keeps Adam's step only if all parameters share it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import ConfigError
from services.learner.checkpoints import PARTIAL_PREFIX, step_folder
from services.learner.megatron.model import BuiltModel

FORMAT = 1
MANIFEST = "checkpoint.json"


def save_checkpoint(root: Path, step: int, extra: dict[str, Any], model: BuiltModel, optimizer: Any) -> Path:
    """Writes ``root/step-XXXXXXXX``. Collective over the world; every rank must see ``root`` (a shared file system).

    Args:
        step: optimizer steps done.
        extra: the caller's own record, anything JSON; from rank 0.

    Returns:
        The folder. It has its name only when it is complete; an earlier one of the same step is replaced.
    """
    final, partial = step_folder(root, step), root / f"{PARTIAL_PREFIX}{step:08d}"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    if _writes(model, optimizer):
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _state(model, optimizer)}
        save_file(tensors, partial / _rank_file(model, optimizer))
        _sync(partial / _rank_file(model, optimizer))
    dist.barrier()
    if dist.get_rank() == 0:
        manifest = {"format": FORMAT, "step": step, "layout": _layout(model, optimizer), "extra": extra}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        _sync(partial / MANIFEST)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _sync(root)
    dist.barrier()
    return final


def load_checkpoint(path: Path, model: BuiltModel, optimizer: Any) -> tuple[int, dict[str, Any]]:
    """Puts the state back in place; returns (step, extra) as saved.

    Raises:
        ConfigError: not a checkpoint, or one of another layout or model.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        saved = load_file(path / _rank_file(model, optimizer))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} is not a checkpoint of this layout: {Path(error.filename or path).name} is not there."
        ) from None
    layout = _layout(model, optimizer)
    if manifest["format"] != FORMAT or manifest["layout"] != layout:
        raise ConfigError(
            f"The checkpoint {path} was written by the layout {manifest['layout']}; this run has {layout}."
            " Resume with the layout it was written by."
        )
    _restore_moments(optimizer, saved)
    with torch.no_grad():
        for name, tensor in _weights(model, optimizer):
            tensor.copy_(saved[name])
    torch.set_rng_state(saved["rng.cpu"])
    if model.device.type == "cuda":
        torch.cuda.set_rng_state(saved["rng.cuda"], model.device)
    return manifest["step"], manifest["extra"]


def _is_sharded(optimizer: Any) -> bool:
    return bool(optimizer.config.use_distributed_optimizer)


def _writes(model: BuiltModel, optimizer: Any) -> bool:
    return model.ranks.data == 0 or _is_sharded(optimizer)


def _rank_file(model: BuiltModel, optimizer: Any) -> str:
    ranks = model.ranks
    data = ranks.data if _is_sharded(optimizer) else 0
    return f"rank-tp{ranks.tensor}-pp{ranks.pipeline}-dp{data}.safetensors"


def _layout(model: BuiltModel, optimizer: Any) -> dict[str, Any]:
    ranks, sharded = model.ranks, _is_sharded(optimizer)
    return {
        "tensor": ranks.tensor_size,
        "pipeline": [[list(part) for part in stage] for stage in model.layers],
        "optimizer_shards": ranks.data_size if sharded else 1,
        "dtype": str(model.config.params_dtype),
        "shape": [model.arch.num_layers, model.arch.hidden_size, model.arch.ffn_size, model.arch.vocab_size],
    }


def _state(model: BuiltModel, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    yield from _weights(model, optimizer)
    for name, parameter, inner in _masters(optimizer):
        for key, value in inner.state.get(parameter, {}).items():
            yield f"moment.{name}.{key}", torch.as_tensor(value)
    yield "rng.cpu", torch.get_rng_state()
    if model.device.type == "cuda":
        yield "rng.cuda", torch.cuda.get_rng_state(model.device)


def _weights(model: BuiltModel, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters, and the optimizer's masters where those are tensors of their own."""
    own = {parameter.untyped_storage().data_ptr() for _, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        yield f"model.{name}", parameter.data
    for name, parameter, _ in _masters(optimizer):
        # In float32 they are the parameters, or (distributed optimizer) views into them.
        if parameter.untyped_storage().data_ptr() not in own:
            yield f"master.{name}", parameter.data


def _masters(optimizer: Any) -> Iterator[tuple[str, Tensor, Any]]:
    """(name, parameter as the inner torch optimizer sees it, that optimizer): their order is fixed by the model and layout."""
    for o, chained in enumerate(optimizer.chained_optimizers):
        if chained.optimizer is None:  # a rank without parameters of this kind
            continue
        for g, group in enumerate(chained.optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                yield f"{o}.{g}.{p}", parameter, chained.optimizer


def _restore_moments(optimizer: Any, saved: dict[str, Tensor]) -> None:
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for name, tensor in saved.items():
        if name.startswith("moment."):
            parameter, _, key = name.removeprefix("moment.").rpartition(".")
            by_parameter.setdefault(parameter, {})[key] = tensor
    for name, parameter, inner in _masters(optimizer):
        # torch keeps Adam's step on the CPU; the moments belong beside their parameter.
        inner.state[parameter] = {
            key: value if key == "step" else value.to(parameter.device)
            for key, value in by_parameter.get(name, {}).items()
        }


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
