"""The shape of a Hugging Face model, from its config.json. Imports neither torch nor transformers: `forebay check` reads it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from services.learner.config import ParallelConfig

FAMILIES = ("llama", "qwen2", "qwen3")

# Megatron's rotary scaling writes these down in its code (rotary_pos_embedding.py, _apply_scaling).
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Architecture:
    """A dense decoder of the Llama family, in our names."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling_factor: float | None  # Llama-3 scaling; none: plain rotary
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    dtype: str  # of the checkpoint's tensors, as torch names it

    def padded_vocab_size(self, tensor_parallel: int) -> int:
        """The vocabulary, rounded up so that every tensor rank holds the same multiple of 8 rows."""
        multiple = 8 * tensor_parallel
        return -(-self.vocab_size // multiple) * multiple


def read_architecture(model_path: Path) -> Architecture:
    """Reads ``model_path/config.json``, as transformers 4 or 5 wrote it.

    Raises:
        ConfigError: no such file, a family we can't train, or an option of it that we don't apply.
    """
    path = model_path / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"No model at {model_path}: it has no config.json. Give a Hugging Face model folder."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}.") from None
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"{path}: model_type {family!r} can't be trained; the learner knows {', '.join(FAMILIES)}.")
    try:
        _refuse_unapplied(raw, path)
        return _parse(family, raw, path)
    except KeyError as error:
        raise ConfigError(f"{path} lacks the key {error}.") from None


def _parse(family: str, raw: dict[str, Any], path: Path) -> Architecture:
    num_heads = raw["num_attention_heads"]
    theta, factor = _rope(raw, path)
    return Architecture(
        family=family,
        num_layers=raw["num_hidden_layers"],
        hidden_size=raw["hidden_size"],
        ffn_size=raw["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // num_heads,
        vocab_size=raw["vocab_size"],
        max_positions=raw["max_position_embeddings"],
        norm_eps=raw["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling_factor=factor,
        tied_embeddings=raw.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
    )


def _refuse_unapplied(raw: dict[str, Any], path: Path) -> None:
    wrong = [
        f"hidden_act = {raw['hidden_act']!r}" if raw.get("hidden_act", "silu") != "silu" else "",
        "attention_bias = true" if raw.get("attention_bias") else "",
        "mlp_bias = true" if raw.get("mlp_bias") else "",
        "sliding-window attention" if raw.get("use_sliding_window") else "",
        f"attention_dropout = {raw['attention_dropout']}" if raw.get("attention_dropout") else "",
    ]
    if any(wrong):
        raise ConfigError(
            f"{path}: the learner does not apply {', '.join(w for w in wrong if w)}; train another model."
        )


def _rope(raw: dict[str, Any], path: Path) -> tuple[float, float | None]:
    """(theta, Llama-3 scaling factor or none). transformers 5 nests both under ``rope_parameters``."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "llama3" and all(parameters.get(key) == value for key, value in LLAMA3_ROPE.items()):
        return theta, float(parameters["factor"])
    raise ConfigError(
        f"{path}: rotary scaling {parameters} is not known here; plain and Llama-3 with {LLAMA3_ROPE} are."
    )


def layout_violations(arch: Architecture, parallel: ParallelConfig, world_size: int) -> list[str]:
    """What of ``parallel`` does not divide, one sentence each with the remedy; empty when the layout fits."""
    tensor, pipeline = parallel.tensor, parallel.pipeline
    found = []
    if world_size % (tensor * pipeline):
        found.append(
            f"world size {world_size} is not a multiple of parallel.tensor * parallel.pipeline = {tensor * pipeline}:"
            " start a multiple of it"
        )
    for what, count in (("key-value heads", arch.num_kv_heads), ("attention heads", arch.num_heads)):
        if count % tensor:
            found.append(f"{count} {what} don't divide by parallel.tensor = {tensor}: take a divisor of {count}")
    if arch.ffn_size % tensor:
        found.append(f"intermediate_size {arch.ffn_size} doesn't divide by parallel.tensor = {tensor}")
    if arch.num_layers % pipeline:
        found.append(f"{arch.num_layers} layers don't divide by parallel.pipeline = {pipeline}")
    if parallel.sequence and tensor == 1:
        found.append("parallel.sequence needs parallel.tensor > 1: drop one of them")
    return found


def stage_layers(num_layers: int, parallel: ParallelConfig) -> tuple[tuple[range, ...], ...]:
    """``[stage][v]``: the layers, from 0, of virtual stage v of each pipeline stage, as Megatron deals them.

    Every turn v goes over all stages, so with 8 layers, 2 stages and 2 virtual stages: ((0-1, 4-5), (2-3, 6-7)). The layout must
    divide; see ``layout_violations``.
    """
    per_stage = _layers_per_stage(num_layers, parallel)
    dealt: list[list[range]] = [[] for _ in per_stage]
    start = 0
    for _ in range(parallel.virtual_stages):
        for stage, count in enumerate(per_stage):
            end = start + count // parallel.virtual_stages
            dealt[stage].append(range(start, end))
            start = end
    return tuple(tuple(parts) for parts in dealt)


def _layers_per_stage(num_layers: int, parallel: ParallelConfig) -> list[int]:
    """Layers of each pipeline stage; the stages whose number is not given share the rest, rounded down."""
    counts: list[int | None] = [None] * parallel.pipeline
    if parallel.pipeline > 1:
        counts[0], counts[-1] = parallel.first_stage_layers, parallel.last_stage_layers
    free = counts.count(None)
    rest = num_layers - sum(count or 0 for count in counts)
    return [rest // free if count is None else count for count in counts]
