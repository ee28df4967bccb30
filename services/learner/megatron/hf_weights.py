"""A Megatron model's weights from and to Hugging Face tensors: no rank reads or holds a full copy of the model.

load    folder of safetensors -> each rank reads its own regions of each tensor
iterate each rank's parameters -> gathered tensor by tensor over tensor and expert ranks: for the broadcast and the export
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import InvariantError
from services.learner.architecture import Architecture
from services.learner.megatron.hf_files import check_tensors, listed, open_weights
from services.learner.megatron.hf_names import (
    HEAD,
    Entry,
    all_entries,
    hf_shape,
    is_sent,
    join,
    merge,
    regions,
    stage_entries,
    table_name,
)
from services.learner.megatron.mcore import parallel_state
from services.learner.megatron.model import BuiltModel, Ranks


@dataclass(frozen=True)
class Group:
    """A process group and this rank's place in it."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Group:
        """From torch's own."""
        return cls(group, group.rank(), group.size())


@dataclass(frozen=True)
class WeightGroups:
    """The groups over which the weights of a pipeline stage are spread."""

    tensor: Group
    expert: Group  # ranks with other experts
    expert_tensor: Group  # ranks with other parts of the same experts

    @classmethod
    def current(cls) -> WeightGroups:
        """Those of this process."""
        return cls(
            tensor=Group.of(parallel_state.get_tensor_model_parallel_group()),
            expert=Group.of(parallel_state.get_expert_model_parallel_group()),
            expert_tensor=Group.of(parallel_state.get_expert_tensor_parallel_group()),
        )

    def cutting(self, entry: Entry) -> Group:
        """The group that shares each matrix of this entry."""
        return self.tensor if entry.owner is None else self.expert_tensor


def is_sender(ranks: Ranks) -> bool:
    """Whether this rank sends and writes its pipeline stage's weights: one rank per stage does."""
    return ranks.tensor == ranks.data == ranks.context == 0


def takes_part(model: BuiltModel) -> bool:
    """Whether this rank is needed where the stage's sender gathers its tensors.

    Data- and context-parallel copies of the sender and its tensor ranks are not, unless they hold other experts.
    """
    return model.arch.is_moe or model.ranks.data == model.ranks.context == 0


@torch.no_grad()
def load_hf(model: BuiltModel, path: Path) -> None:
    """Fills the model's parameters from the folder ``path``; each rank reads only its own slices.

    Raises:
        ConfigError: files, names, shapes or dtypes that are not those of the model; nothing was written then.
        InvariantError: Megatron has parameters that the table doesn't know.
    """
    arch, groups = model.arch, WeightGroups.current()
    targets = _parameters(model, groups)
    with open_weights(path) as stored:
        wanted = {name: hf_shape(arch, name) for entry in all_entries(arch) for name in entry.hf}
        check_tensors(stored, wanted, spare=HEAD.hf if arch.tied_embeddings else (), path=path)
        for entry, target in targets.values():
            cut = groups.cutting(entry)
            layout = regions(arch, entry, cut.rank, cut.size)
            merge([stored[entry.hf[i]].read(region) for i, region in layout], target)


def _parameters(model: BuiltModel, groups: WeightGroups) -> dict[str, tuple[Entry, Tensor]]:
    """Entry and parameter of all that this rank holds, by the table's name."""
    there = {table_name(name): parameter for name, parameter in model.named_parameters()}
    entries = stage_entries(model.arch, model.layers, model.ranks.pipeline, groups.expert.size)
    mine = {entry.megatron: entry for entry in entries if entry.owner in (None, groups.expert.rank)}
    if there.keys() != mine.keys():
        raise InvariantError(
            f"Megatron's model and the table in hf_names.py differ on {model.ranks}."
            f" Only in the model: {listed(sorted(there.keys() - mine.keys())) or 'none'}."
            f" Only in the table: {listed(sorted(mine.keys() - there.keys())) or 'none'}."
        )
    return {name: (entry, there[name].detach()) for name, entry in mine.items()}


def plan_hf_tensors(
    model: BuiltModel, dtype: torch.dtype | None = None
) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """(name, shape, dtype) of what ``iter_hf_tensors`` will yield on this stage, in its order, without moving data."""
    dtype = dtype or model.config.params_dtype
    entries = stage_entries(model.arch, model.layers, model.ranks.pipeline)
    return [(name, hf_shape(model.arch, name), dtype) for name in sent_names(entries)]


def sent_names(entries: Sequence[Entry]) -> list[str]:
    """The HF names that a stage with these entries sends, in order."""
    return [name for entry in entries if is_sent(entry) for name in entry.hf]


@torch.no_grad()
def iter_hf_tensors(
    model: BuiltModel, dtype: torch.dtype | Mapping[str, torch.dtype] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields (HF name, full tensor) of this pipeline stage, in the order of the plan, on every rank that ``takes_part``.

    Collective over those: all must run it to the end together. ``dtype``: of all, or by name; none: as they are trained. The
    tensors are new or are views of the parameters: copy before you write to them.
    """
    groups = WeightGroups.current()
    mine = _parameters(model, groups)
    for entry in stage_entries(model.arch, model.layers, model.ranks.pipeline, groups.expert.size):
        if not is_sent(entry):
            continue
        wanted = dtype if isinstance(dtype, Mapping) else dict.fromkeys(entry.hf, dtype or model.config.params_dtype)
        yield from _full_tensors(model.arch, entry, mine, groups, wanted)


def _full_tensors(
    arch: Architecture,
    entry: Entry,
    mine: Mapping[str, tuple[Entry, Tensor]],
    groups: WeightGroups,
    dtypes: Mapping[str, torch.dtype],
) -> Iterator[tuple[str, Tensor]]:
    if entry.owner in (None, groups.expert.rank):
        parameter = mine[entry.megatron][1]
        if len({dtypes[name] for name in entry.hf}) == 1:
            parameter = parameter.to(dtypes[entry.hf[0]])
        parts = [parameter] if entry.kind == "replicated" else _gather(parameter, groups.cutting(entry))
        full = [tensor.to(dtypes[name]) for tensor, name in zip(join(arch, entry, parts), entry.hf, strict=True)]
    else:
        device = next(iter(mine.values()))[1].device
        full = [torch.empty(hf_shape(arch, name), dtype=dtypes[name], device=device) for name in entry.hf]
    for name, tensor in zip(entry.hf, full, strict=True):
        if entry.owner is not None and groups.expert.size > 1:
            tensor = tensor.contiguous()
            dist.broadcast(tensor, group=groups.expert.group, group_src=entry.owner)
        yield name, tensor


def _gather(part: Tensor, group: Group) -> list[Tensor]:
    """The parts of all ranks, in their order."""
    if group.size == 1:
        return [part]
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size)]
    dist.all_gather(parts, part.contiguous(), group=group.group)
    return parts
