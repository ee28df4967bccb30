"""Small random checkpoints of every model family, made by transformers itself, and its log-probs of samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from services.learner.packing import TrainSample

# A vocabulary that must be padded, and grouped key-value heads.
SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
# Scaling that shows within the 30 tokens of the samples: the original context is short, and so are the periods.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 16}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "head_dim": 32}

MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama2": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama-linear": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR_ROPE}),
    "llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "llama3-tied": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": LLAMA3_ROPE | {"factor": 32.0}, "tie_word_embeddings": True, "head_dim": 24},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2.5-yarn": (Qwen2Config, Qwen2ForCausalLM, {"rope_parameters": YARN_ROPE}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": False, "head_dim": 32}),
    "qwen3-yarn-tied": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"tie_word_embeddings": True, "head_dim": 32, "rope_parameters": YARN_ROPE | {"attention_factor": 1.3}},
    ),
    "qwen3-one-group": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "num_key_value_heads": 1}),
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, EXPERTS | {"norm_topk_prob": True}),
    "qwen3-moe-raw": (Qwen3MoeConfig, Qwen3MoeForCausalLM, EXPERTS | {"norm_topk_prob": False}),
}


def make_model(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, **save: Any) -> Path:
    """A random checkpoint whose biases and norms are random too, so that a lost one shows.

    ``save``: options of ``save_pretrained``.
    """
    config_type, model_type, options = MODELS[kind]
    torch.manual_seed(0)
    model = model_type(config_type(**(SIZES | options))).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(3.0)  # logits of size 1, not 0.01
    model.save_pretrained(folder, **save)
    (folder / "tokenizer.json").write_text('{"stands for": "a tokenizer"}')
    return folder


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def reference_logprobs(model: Path, samples: list[TrainSample], temperature: float = 1.0) -> list[np.ndarray]:
    """transformers' log-probs of the completion tokens, each sample alone, in float32."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.completion_ids])).long()
        with torch.no_grad():
            logits = reference(ids[None]).logits[0] / temperature
        every = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
        found.append(every[len(sample.prompt_ids) - 1 :].numpy())
    return found
