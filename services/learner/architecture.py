"""The shape of a Hugging Face model, from its config.json. Imports neither torch nor transformers: `forebay check` reads it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from common.errors import ConfigError

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe"]
FAMILIES: tuple[Family, ...] = get_args(Family)

DTYPES = ("float32", "bfloat16", "float16")

# What each kind of rotary scaling reads of its parameters, beside its kind and theta.
ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}


@dataclass(frozen=True)
class Rope:
    """How positions turn queries and keys; the formulas are in ``megatron/rotary.py``."""

    kind: str  # a key of ROPE_KEYS
    theta: float
    factor: float = 1.0  # the context is stretched by it
    original_max_positions: int = 0  # llama3 and yarn: the context before that
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # yarn: on cosine and sine
    truncate: bool = True


@dataclass(frozen=True)
class Architecture:
    """A decoder of the Llama family, dense or with experts in every layer, in our names."""

    family: Family
    num_layers: int
    hidden_size: int
    ffn_size: int  # of a dense layer; unused where there are experts
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    dtype: str  # of the checkpoint's tensors, as torch names it
    # Mixture of experts: softmax over all experts, then the best ``experts_per_token`` of them.
    num_experts: int = 0  # 0: a dense model
    experts_per_token: int = 0
    moe_ffn_size: int = 0  # of one expert
    norm_topk_prob: bool = False  # the weights of a token's experts are scaled to sum 1

    @property
    def is_moe(self) -> bool:
        """Whether every layer has experts; else none has."""
        return self.num_experts > 0

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
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} can't be read: it holds no JSON object.")
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"{path}: model_type {family!r} can't be trained; the learner knows {', '.join(FAMILIES)}.")
    try:
        _refuse_unapplied(raw, path)
        return _parse(family, raw, path)
    except KeyError as error:
        raise ConfigError(f"{path} lacks the key {error}.") from None
    except (
        TypeError,
        ValueError,
        AttributeError,
        ZeroDivisionError,
    ) as error:  # a value of another kind than its key's
        raise ConfigError(f"{path} has a value that can't be: {error}.") from None


def _parse(family: Family, raw: dict[str, Any], path: Path) -> Architecture:
    num_heads = raw["num_attention_heads"]
    # transformers' own default where the key is absent; every shipped Qwen3 has it.
    default_head_dim = 128 if family == "qwen3" else raw["hidden_size"] // num_heads
    head_dim = raw.get("head_dim") or default_head_dim
    if head_dim % 2:
        raise ConfigError(f"{path}: heads of {head_dim} dimensions have no rotary pairs; their number must be even.")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"{path}: weights of the dtype {dtype!r} can't be trained; {', '.join(DTYPES)} can.")
    return Architecture(
        family=family,
        num_layers=raw["num_hidden_layers"],
        hidden_size=raw["hidden_size"],
        ffn_size=raw["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        vocab_size=raw["vocab_size"],
        max_positions=raw["max_position_embeddings"],
        norm_eps=raw["rms_norm_eps"],
        rope=_rope(raw, path),
        tied_embeddings=raw.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        dtype=dtype,
        **(_experts(raw, path) if family == "qwen3_moe" else {}),
    )


def _experts(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    # transformers 5.19 saves it by the second name; the hub's models have the first.
    num_experts = raw["num_local_experts"] if "num_experts" not in raw else raw["num_experts"]
    per_token = raw["num_experts_per_tok"]
    if not 1 <= per_token <= num_experts:
        raise ConfigError(f"{path}: num_experts_per_tok = {per_token} of num_experts = {num_experts} can't be.")
    return {
        "num_experts": num_experts,
        "experts_per_token": per_token,
        "moe_ffn_size": raw["moe_intermediate_size"],
        "norm_topk_prob": raw.get("norm_topk_prob", False),
    }


def _refuse_unapplied(raw: dict[str, Any], path: Path) -> None:
    dense_layers = raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1
    wrong = [
        f"hidden_act = {raw['hidden_act']!r}" if raw.get("hidden_act", "silu") != "silu" else "",
        "attention_bias = true" if raw.get("attention_bias") else "",
        "mlp_bias = true" if raw.get("mlp_bias") else "",
        "sliding-window attention" if raw.get("use_sliding_window") else "",
        f"attention_dropout = {raw['attention_dropout']}" if raw.get("attention_dropout") else "",
        "dense layers among those with experts (mlp_only_layers, decoder_sparse_step)" if dense_layers else "",
        "a quantized checkpoint (quantization_config)" if raw.get("quantization_config") else "",
    ]
    if any(wrong):
        raise ConfigError(
            f"{path}: the learner does not apply {', '.join(w for w in wrong if w)}; train another model."
        )


def _rope(raw: dict[str, Any], path: Path) -> Rope:
    """transformers 5 has all in ``rope_parameters``; before, theta stood outside ``rope_scaling``."""
    parameters: dict[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_KEYS:
        raise ConfigError(
            f"{path}: rotary scaling of the kind {kind!r} can't be trained; the learner knows {', '.join(ROPE_KEYS)}."
        )
    named = {"rope_theta", "rope_type", "type"}
    unknown = sorted(key for key in parameters.keys() - ROPE_KEYS[kind] - named if parameters[key] is not None)
    partial = raw.get("partial_rotary_factor")
    if unknown or partial not in (None, 1.0):
        what = ", ".join(unknown) or f"partial_rotary_factor = {partial}"
        raise ConfigError(f"{path}: the learner does not apply {what} of its rotary scaling {parameters}.")
    given = {key: parameters[key] for key in ROPE_KEYS[kind] if parameters.get(key) is not None}
    needed = {"linear": {"factor"}, "llama3": ROPE_KEYS["llama3"], "yarn": {"factor"}}.get(kind, set())
    # Where the original context is not said, transformers takes max_position_embeddings for it.
    needed = needed - {"original_max_position_embeddings"}
    if missing := sorted(needed - given.keys()):
        raise ConfigError(f"{path}: its rotary scaling {parameters} lacks {', '.join(missing)}.")
    if kind == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
        raise ConfigError(f"{path}: its rotary scaling {parameters} needs high_freq_factor > low_freq_factor.")
    return Rope(
        kind=kind,
        theta=theta,
        factor=float(given.get("factor", 1.0)),
        original_max_positions=_original_max_positions(raw, given),
        low_freq_factor=float(given.get("low_freq_factor", 1.0)),
        high_freq_factor=float(given.get("high_freq_factor", 4.0)),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        attention_factor=_attention_factor(given) if kind == "yarn" else 1.0,
        truncate=bool(given.get("truncate", True)),
    )


def _original_max_positions(raw: dict[str, Any], given: dict[str, Any]) -> int:
    key = "original_max_position_embeddings"
    return int(raw.get(key) or given.get(key) or raw["max_position_embeddings"])


def _attention_factor(given: dict[str, Any]) -> float:
    """YaRN, arXiv:2309.00071, equation 22: ``0.1 ln(factor) + 1``, unless the config says it, or the ratio of two such."""

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(given["factor"]) + 1.0 if given["factor"] > 1 else 1.0

    if "attention_factor" in given:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return temperature(given["mscale"]) / temperature(given["mscale_all_dim"])
    return temperature(1.0)
