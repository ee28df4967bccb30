"""Hugging Face names <-> Megatron parameters, as one table, and which part of which tensor each rank holds.

Megatron packs q, k, v of each key-value group together (rows: q heads of group 0, k 0, v 0, q heads of group 1, ...) and
gate above up. A rank's parameter is a stack of regions of the HF tensors, one below the other; ``regions`` gives them, and
both directions follow from it. Nothing here talks to another rank or reads a file.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from services.learner.architecture import Architecture
from services.learner.megatron.hf_files import Region

Kind = Literal["replicated", "rows", "columns", "vocab", "qkv"]


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the HF tensors it is made of.

    In the table, ``{i}`` is the layer in its chunk, ``{n}`` in the model, ``{j}`` the expert on its rank and ``{e}`` in the layer.
    """

    megatron: str
    hf: tuple[str, ...]
    kind: Kind
    owner: int | None = None  # expert-parallel rank that has it; none: every rank has it, or its tensor-parallel part


EMBEDDING = Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab")
FINAL = Entry("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated")
HEAD = Entry("output_layer.weight", ("lm_head.weight",), "vocab")
TIED_HEAD = Entry("output_layer.weight", EMBEDDING.hf, "vocab")

_M, _H = "decoder.layers.{i}.", "model.layers.{n}."
_QKV = ("q_proj", "k_proj", "v_proj")


def _layer(megatron: str, hf: tuple[str, ...], kind: Kind) -> Entry:
    return Entry(_M + megatron, tuple(_H + name for name in hf), kind)


ATTENTION = (
    _layer("input_layernorm.weight", ("input_layernorm.weight",), "replicated"),
    _layer("self_attention.linear_qkv.weight", tuple(f"self_attn.{x}.weight" for x in _QKV), "qkv"),
    _layer("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "columns"),
    _layer("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "replicated"),
)
QKV_BIAS = (_layer("self_attention.linear_qkv.bias", tuple(f"self_attn.{x}.bias" for x in _QKV), "qkv"),)
QK_NORM = (
    _layer("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), "replicated"),
    _layer("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), "replicated"),
)
DENSE = (
    _layer("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "rows"),
    _layer("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), "columns"),
)
ROUTER = (_layer("mlp.router.weight", ("mlp.gate.weight",), "replicated"),)
_E = "mlp.experts.{e}."
EXPERT = (
    _layer("mlp.experts.local_experts.{j}.linear_fc1.weight", (_E + "gate_proj.weight", _E + "up_proj.weight"), "rows"),
    _layer("mlp.experts.local_experts.{j}.linear_fc2.weight", (_E + "down_proj.weight",), "columns"),
)
# Transformer Engine's layers have the norm inside of the matrix that follows it, and the experts of a rank in one module.
TRANSFORMER_ENGINE_NAMES = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight$"), "input_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight$"), "pre_mlp_layernorm.weight"),
    (re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$"), r"mlp.experts.local_experts.\2.\1.weight"),
)


def table_name(parameter: str) -> str:
    """The name by which the table knows a parameter of Megatron's local layers or of Transformer Engine's.

    >>> table_name("0.decoder.layers.3.mlp.linear_fc1.layer_norm_weight")
    '0.decoder.layers.3.pre_mlp_layernorm.weight'
    """
    for pattern, ours in TRANSFORMER_ENGINE_NAMES:
        parameter = pattern.sub(ours, parameter)
    return parameter


def layer_entries(arch: Architecture, num_expert_ranks: int) -> Iterator[Entry]:
    """The parameters of one layer. Experts are dealt to the expert-parallel ranks in equal runs, as Megatron does it."""
    yield from ATTENTION
    yield from QKV_BIAS if arch.qkv_bias else ()
    yield from QK_NORM if arch.qk_norm else ()
    if not arch.is_moe:
        yield from DENSE
        return
    yield from ROUTER
    per_rank = arch.num_experts // num_expert_ranks
    for e in range(arch.num_experts):
        for entry in EXPERT:
            megatron = entry.megatron.replace("{j}", str(e % per_rank))
            yield Entry(megatron, tuple(name.replace("{e}", str(e)) for name in entry.hf), entry.kind, e // per_rank)


# 25,000 entries where a model has 94 layers of 128 experts, and each update asks for them.
@functools.lru_cache(maxsize=8)
def stage_entries(
    arch: Architecture, layers: tuple[tuple[range, ...], ...], stage: int, num_expert_ranks: int = 1
) -> tuple[Entry, ...]:
    """The parameters of a pipeline stage, over all its expert-parallel ranks, in the order in which tensors are sent.

    ``layers``: as in ``BuiltModel``. A name is ``CHUNK.name-in-the-chunk``. The last stage of a tied model has its own copy of the
    embedding (``TIED_HEAD``), which is loaded but not sent. The HF names and their order don't depend on ``num_expert_ranks``.
    """
    entries = [_of_chunk(0, EMBEDDING)] if stage == 0 else []
    for v, held in enumerate(layers[stage]):
        for i, n in enumerate(held):
            for entry in layer_entries(arch, num_expert_ranks):
                names = tuple(name.replace("{n}", str(n)) for name in entry.hf)
                megatron = entry.megatron.replace("{i}", str(i))
                entries.append(_of_chunk(v, replace(entry, megatron=megatron, hf=names)))
    if stage == len(layers) - 1:
        last = len(layers[stage]) - 1
        entries.append(_of_chunk(last, FINAL))
        if not arch.tied_embeddings:
            entries.append(_of_chunk(last, HEAD))
        elif len(layers) > 1:
            entries.append(_of_chunk(last, TIED_HEAD))
    return tuple(entries)


def all_entries(arch: Architecture) -> tuple[Entry, ...]:
    """Those of the whole model."""
    return stage_entries(arch, ((range(arch.num_layers),),), 0)


def _of_chunk(v: int, entry: Entry) -> Entry:
    return replace(entry, megatron=f"{v}.{entry.megatron}")


def is_sent(entry: Entry) -> bool:
    """Whether the tensor goes out from here: the second copy of a tied embedding does not."""
    return not (entry.megatron.endswith(TIED_HEAD.megatron) and entry.hf == TIED_HEAD.hf)


def hf_shape(arch: Architecture, name: str) -> tuple[int, ...]:
    """The shape of the HF tensor of that name."""
    hidden, heads, kv = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    ffn = arch.moe_ffn_size if ".experts." in name else arch.ffn_size
    module, _, field = name.rpartition(".")
    out_features, in_features = {
        "embed_tokens": (arch.vocab_size, hidden),
        "lm_head": (arch.vocab_size, hidden),
        "q_proj": (heads, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "o_proj": (hidden, heads),
        "gate": (arch.num_experts, hidden),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
        "q_norm": (arch.head_dim, None),
        "k_norm": (arch.head_dim, None),
    }.get(module.rpartition(".")[2], (hidden, None))
    return (out_features,) if in_features is None or field == "bias" else (out_features, in_features)


def regions(arch: Architecture, entry: Entry, rank: int, size: int) -> list[tuple[int, Region]]:
    """(index into ``entry.hf``, region of that tensor) from top to bottom of the parameter on that tensor-parallel rank.

    ``rank`` of ``size``: in the tensor-parallel group, or for an expert in the expert-tensor-parallel one. Rows that pad the
    vocabulary have no region. With fewer key-value heads than ranks Megatron cuts the packed q, k, v into equal blocks of
    rows, wherever the borders fall (and gathers what they compute); with more, those blocks are whole groups.

    Two heads of one dimension, one key-value head, two ranks: the first has both queries, the second key and value.
    """
    shapes = [hf_shape(arch, name) for name in entry.hf]
    if entry.kind == "replicated":
        return [(0, Region((0, shapes[0][0])))]
    if entry.kind == "columns":
        width = shapes[0][1] // size
        return [(0, Region((0, shapes[0][0]), (rank * width, (rank + 1) * width)))]
    if entry.kind == "vocab":
        rows, num_real = arch.padded_vocab_size(size) // size, shapes[0][0]
        start, end = (min(r * rows, num_real) for r in (rank, rank + 1))
        return [(0, Region((start, end)))] if end > start else []
    if entry.kind == "qkv":
        return list(_qkv_regions(arch, rank, size))
    return [(i, Region((rank * n // size, (rank + 1) * n // size))) for i, (n, *_) in enumerate(shapes)]


def _qkv_regions(arch: Architecture, rank: int, size: int) -> Iterator[tuple[int, Region]]:
    queries, d = arch.num_heads // arch.num_kv_heads * arch.head_dim, arch.head_dim
    block = arch.num_kv_heads * (queries + 2 * d) // size
    first, last = rank * block, (rank + 1) * block
    top = 0  # of this tensor's rows of this group, in the packed whole
    for group in range(arch.num_kv_heads):
        for i, rows in enumerate((queries, d, d)):
            start, end = max(first, top), min(last, top + rows)
            if end > start:
                offset = group * rows - top
                yield i, Region((start + offset, end + offset))
            top += rows


def join(arch: Architecture, entry: Entry, parts: Sequence[Tensor]) -> list[Tensor]:
    """The parameter's parts on ranks 0, 1, ... of its tensor-parallel group -> the HF tensors; views where one part is enough."""
    placed = [
        (i, region, part)
        for rank, whole in enumerate(parts[:1] if entry.kind == "replicated" else parts)
        for i, region, part in split(whole, regions(arch, entry, rank, len(parts)))
    ]
    full = []
    for i, name in enumerate(entry.hf):
        shape, mine = hf_shape(arch, name), [(region, part) for j, region, part in placed if j == i]
        if len(mine) == 1:
            assert mine[0][1].shape == shape, (entry, mine[0][1].shape, shape)
            full.append(mine[0][1])
            continue
        tensor = parts[0].new_empty(shape)
        for region, part in mine:
            tensor[slice(*region.rows), slice(*region.columns) if region.columns else ...] = part
        full.append(tensor)
    return full


def split(parameter: Tensor, layout: Sequence[tuple[int, Region]]) -> Iterator[tuple[int, Region, Tensor]]:
    """The rows of a rank's parameter that belong to each region of ``regions``."""
    top = 0
    for i, region in layout:
        num_rows = region.rows[1] - region.rows[0]
        yield i, region, parameter[top : top + num_rows]
        top += num_rows


def merge(parts: Sequence[Tensor], target: Tensor) -> None:
    """Writes the regions one below the other into the rank's parameter, and zeros into the rows that pad the vocabulary."""
    merged = torch.cat(list(parts)) if parts else target.new_empty(0, *target.shape[1:])
    assert merged.shape[1:] == target.shape[1:] and len(merged) <= len(target), (merged.shape, target.shape)  # noqa: PT018
    target[: len(merged)].copy_(merged)
    target[len(merged) :].zero_()
