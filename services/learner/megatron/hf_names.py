"""Hugging Face names <-> Megatron parameters, as one table, and the reading and gathering of weights by it.

Megatron packs q, k, v of each key-value group together (rows: q heads of group 0, k 0, v 0, q heads of group 1, ...) and
gate above up. Tensor ranks hold whole groups, so each rank's part of q, k, v, gate and up is one slice of each HF tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from common.errors import ConfigError
from services.learner.architecture import Architecture
from services.learner.megatron.mcore import parallel_state
from services.learner.megatron.model import BuiltModel

Kind = Literal["replicated", "rows", "columns", "vocab", "qkv", "gate_up"]


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the HF tensors it is made of. ``{i}`` is the layer in its stage, ``{n}`` in the model."""

    megatron: str
    hf: tuple[str, ...]
    kind: Kind


EMBEDDING = Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab")
FINAL = Entry("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated")
HEAD = Entry("output_layer.weight", ("lm_head.weight",), "vocab")
TIED_HEAD = Entry("output_layer.weight", EMBEDDING.hf, "vocab")

_M, _H = "decoder.layers.{i}.", "model.layers.{n}."
_QKV = ("q_proj", "k_proj", "v_proj")


def _layer(megatron: str, hf: tuple[str, ...], kind: Kind) -> Entry:
    return Entry(_M + megatron, tuple(_H + name for name in hf), kind)


LAYER = (
    _layer("input_layernorm.weight", ("input_layernorm.weight",), "replicated"),
    _layer("self_attention.linear_qkv.weight", tuple(f"self_attn.{x}.weight" for x in _QKV), "qkv"),
    _layer("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "columns"),
    _layer("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "replicated"),
    _layer("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    _layer("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), "columns"),
)
# What a family has beyond LAYER.
FAMILY_LAYER: dict[str, tuple[Entry, ...]] = {
    "llama": (),
    "qwen2": (_layer("self_attention.linear_qkv.bias", tuple(f"self_attn.{x}.bias" for x in _QKV), "qkv"),),
    "qwen3": (
        _layer("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), "replicated"),
        _layer("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), "replicated"),
    ),
}
# Buffers that old checkpoints carry; they are computed from the config.
IGNORED_SUFFIX = "rotary_emb.inv_freq"


def stage_entries(arch: Architecture, layers: Sequence[Sequence[range]], stage: int) -> list[Entry]:
    """The parameters of a pipeline stage with their layer numbers filled in, in the order in which tensors are sent.

    ``layers``: as in ``BuiltModel``. The last stage of a tied model has its own copy of the embedding (``TIED_HEAD``), which is
    loaded but not sent.
    """
    entries = [_of_chunk(0, EMBEDDING)] if stage == 0 else []
    for v, held in enumerate(layers[stage]):
        for i, n in enumerate(held):
            for entry in LAYER + FAMILY_LAYER[arch.family]:
                names = tuple(name.format(n=n) for name in entry.hf)
                entries.append(_of_chunk(v, Entry(entry.megatron.format(i=i), names, entry.kind)))
    if stage == len(layers) - 1:
        last = len(layers[stage]) - 1
        entries.append(_of_chunk(last, FINAL))
        if not arch.tied_embeddings:
            entries.append(_of_chunk(last, HEAD))
        elif len(layers) > 1:
            entries.append(_of_chunk(last, TIED_HEAD))
    return entries


def _of_chunk(v: int, entry: Entry) -> Entry:
    return dataclasses.replace(entry, megatron=f"{v}.{entry.megatron}")


def is_sent(entry: Entry) -> bool:
    """Whether the tensor goes out from here: the second copy of a tied embedding does not."""
    return not (entry.megatron.endswith(TIED_HEAD.megatron) and entry.hf == TIED_HEAD.hf)


def hf_shape(arch: Architecture, name: str) -> tuple[int, ...]:
    """The shape of the HF tensor of that name."""
    hidden, heads, kv = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    module, _, field = name.rpartition(".")
    out_features, in_features = {
        "embed_tokens": (arch.vocab_size, hidden),
        "lm_head": (arch.vocab_size, hidden),
        "q_proj": (heads, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, heads),
        "gate_proj": (arch.ffn_size, hidden),
        "up_proj": (arch.ffn_size, hidden),
        "down_proj": (hidden, arch.ffn_size),
        "q_norm": (arch.head_dim, None),
        "k_norm": (arch.head_dim, None),
    }.get(module.rpartition(".")[2], (hidden, None))
    return (out_features,) if in_features is None or field == "bias" else (out_features, in_features)


def merge(kind: Kind, parts: list[Tensor], *, head_dim: int, rows: int) -> Tensor:
    """This rank's slices of the HF tensors -> the Megatron parameter of ``rows`` rows."""
    if kind == "qkv":
        groups = parts[1].shape[0] // head_dim
        grouped = [part.unflatten(0, (groups, -1)) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 1)
    if kind == "vocab":
        padding = parts[0].new_zeros(rows - parts[0].shape[0], *parts[0].shape[1:])
        return torch.cat([parts[0], padding])
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def split(kind: Kind, parameter: Tensor, *, head_dim: int, groups: int) -> list[Tensor]:
    """The inverse of ``merge``, but the padding of the vocabulary stays. ``groups``: key-value heads of this rank."""
    if kind == "qkv":
        grouped = parameter.unflatten(0, (groups, -1))
        sizes = [grouped.shape[1] - 2 * head_dim, head_dim, head_dim]
        return [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]
    return list(parameter.chunk(2)) if kind == "gate_up" else [parameter]


def load_hf(model: BuiltModel, path: Path) -> None:
    """Fills the model's parameters from ``path/*.safetensors``; each rank reads only its own slices.

    Raises:
        ConfigError: no safetensors; names that are missing or that nothing takes (lists both); a wrong shape.
    """
    arch, ranks = model.arch, model.ranks
    parameters = dict(model.named_parameters())
    with contextlib.ExitStack() as stack:
        files = _open_shards(path, stack)
        _check_coverage(arch, files, path)
        for entry in stage_entries(arch, model.layers, ranks.pipeline):
            target = parameters.pop(entry.megatron)
            parts = [_read_slice(files[name], name, entry.kind, model, path) for name in entry.hf]
            merged = merge(entry.kind, parts, head_dim=arch.head_dim, rows=target.shape[0])
            assert merged.shape == target.shape, (entry, merged.shape, target.shape)
            target.data.copy_(merged)
    assert not parameters, f"parameters outside the table: {sorted(parameters)}"


def _open_shards(path: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Name of each tensor -> the open file that has it."""
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise ConfigError(f"No *.safetensors in {path}. Save the model with transformers' save_pretrained.")
    handles = [stack.enter_context(safe_open(file, framework="pt")) for file in found]
    return {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118 (not a dict)


def _check_coverage(arch: Architecture, files: dict[str, Any], path: Path) -> None:
    wanted = {name for entry in stage_entries(arch, ((range(arch.num_layers),),), 0) for name in entry.hf}
    spare = set(HEAD.hf) if arch.tied_embeddings else set()
    missing = sorted(wanted - files.keys())
    unmapped = sorted(name for name in files.keys() - wanted - spare if not name.endswith(IGNORED_SUFFIX))
    if missing or unmapped:
        raise ConfigError(
            f"The weights in {path} are not those of a {arch.family} model with {arch.num_layers} layers."
            f" Missing ({len(missing)}): {', '.join(missing) or 'none'}."
            f" Not mapped ({len(unmapped)}): {', '.join(unmapped) or 'none'}."
        )


def _read_slice(handle: Any, name: str, kind: Kind, model: BuiltModel, path: Path) -> Tensor:
    stored = handle.get_slice(name)
    shape, rank, size = tuple(stored.get_shape()), model.ranks.tensor, model.ranks.tensor_size
    if shape != hf_shape(model.arch, name):
        raise ConfigError(f"{path}: {name} has shape {shape}; config.json makes it {hf_shape(model.arch, name)}.")
    if kind == "replicated":
        return stored[:]
    if kind == "columns":
        width = shape[1] // size
        return stored[:, rank * width : (rank + 1) * width]
    rows = (model.arch.padded_vocab_size(size) if kind == "vocab" else shape[0]) // size
    return stored[min(rank * rows, shape[0]) : min((rank + 1) * rows, shape[0])]


def plan_hf_tensors(
    model: BuiltModel, dtype: torch.dtype | None = None
) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """(name, shape, dtype) of what ``iter_hf_tensors`` will yield on this stage, in its order, without moving data."""
    dtype = dtype or model.config.params_dtype
    return [(name, hf_shape(model.arch, name), dtype) for name in stage_names(model)]


def stage_names(model: BuiltModel) -> list[str]:
    """The HF names that this pipeline stage sends, in order."""
    return [name for entry in _sent_entries(model) for name in entry.hf]


def _sent_entries(model: BuiltModel) -> list[Entry]:
    entries = stage_entries(model.arch, model.layers, model.ranks.pipeline)
    return [entry for entry in entries if is_sent(entry)]


@torch.no_grad()
def iter_hf_tensors(model: BuiltModel, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yields (HF name, full tensor) of this pipeline stage, gathered to every tensor rank, in the order of the plan.

    Collective over the tensor group: all its ranks must run it to the end together. The tensors are new or are the
    parameters themselves: copy before you write to them.
    """
    parameters = dict(model.named_parameters())
    groups = model.arch.num_kv_heads // model.ranks.tensor_size
    for entry in _sent_entries(model):
        parameter = parameters[entry.megatron].detach().to(dtype or model.config.params_dtype)
        for name, part in zip(
            entry.hf, split(entry.kind, parameter, head_dim=model.arch.head_dim, groups=groups), strict=True
        ):
            full = part if entry.kind == "replicated" else _gather(part, 1 if entry.kind == "columns" else 0, model)
            yield name, full[: model.arch.vocab_size] if entry.kind == "vocab" else full


def _gather(part: Tensor, axis: int, model: BuiltModel) -> Tensor:
    if model.ranks.tensor_size == 1:
        return part
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(model.ranks.tensor_size)]
    dist.all_gather(parts, part.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=axis)
