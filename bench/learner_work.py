"""What bench/learner.py trains on, and what it costs: batches, model shapes, flops. Pure but for the random models it writes.

Lengths are log-normal, as those of real completions are: the 1,312 of shared/data/humaneval_codegen16b_even.jsonl.gz that were looked at
(16 a task, SmolLM2's tokens) have quartiles 16, 36 and 69, 5% over 169, standard deviation of the logarithm 1.07. Chat templates make
prompts longer and training makes models answer at more length, so the medians here are larger and the spread is smaller.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.learner.architecture import Architecture
from services.learner.packing import MicroBatch, TrainSample


@dataclass(frozen=True)
class Spread:
    """A log-normal length, cut to [low, high]."""

    median: float
    sigma: float
    low: int
    high: int

    def draw(self, rng: np.random.Generator) -> int:
        """One length."""
        return int(np.clip(rng.lognormal(math.log(self.median), self.sigma), self.low, self.high))


@dataclass(frozen=True)
class Work:
    """One step's batch: groups of completions to the same prompt."""

    num_groups: int
    group_size: int
    prompt: Spread
    completion: Spread


WORKS = {
    "short": Work(2, 8, Spread(120, 0.5, 50, 300), Spread(100, 0.7, 20, 400)),
    "long": Work(32, 8, Spread(250, 0.6, 60, 1000), Spread(700, 0.7, 64, 3000)),
    "tiny": Work(2, 4, Spread(12, 0.3, 6, 20), Spread(10, 0.5, 2, 20)),
}

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
SHAPES: dict[str, dict[str, Any]] = {
    # The configs of HuggingFaceTB/SmolLM2-135M-Instruct and Qwen/Qwen2.5-1.5B-Instruct, as far as they concern speed.
    "smollm2-135m": _LLAMA
    | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    | {"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 100000.0}
    | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    "qwen2.5-1.5b": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu"}
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    | {"num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "rope_theta": 1000000.0}
    | {"rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    "tiny": _LLAMA
    | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128, "rope_theta": 10000.0}
    | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
}


def make_samples(work: Work, vocab_size: int, *, seed: int) -> list[TrainSample]:
    """The batch, groups one after the other. Tokens, log-probs and advantages are random: none of them changes the speed."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(work.num_groups):
        prompt = rng.integers(0, vocab_size, work.prompt.draw(rng)).astype(np.int32)
        for _ in range(work.group_size):
            ids = rng.integers(0, vocab_size, work.completion.draw(rng)).astype(np.int32)
            logprobs = np.full(len(ids), -math.log(vocab_size), np.float32)
            samples.append(TrainSample(prompt, ids, logprobs, float(rng.normal())))
    return samples


def write_random_model(folder: Path, shape: str, dtype: str, *, seed: int = 0) -> Path:
    """A checkpoint of that shape with normal weights of size 0.02."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape] | {"dtype": dtype}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    generator = torch.Generator().manual_seed(seed)
    tied = "lm_head.weight" if SHAPES[shape]["tie_word_embeddings"] else ""
    tensors = {
        name: (
            torch.randn(tensor.shape, generator=generator) * 0.02 if tensor.ndim > 1 else torch.ones(tensor.shape)
        ).to(getattr(torch, dtype))
        for name, tensor in model.state_dict().items()
        if name != tied
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass(frozen=True)
class Counts:
    """What a step has to compute. ``pairs``: (query, key) that attention looks at. ``rows``: positions with an output layer."""

    positions: int
    pairs: int
    rows: int

    def flops(self, arch: Architecture) -> float:
        """Forward and backward (twice the forward), two flops for a multiplication and an addition.

        Narayanan et al. 2021, arXiv:2104.04473, appendix, but counting only the pairs under the causal mask, and the output layer
        only where it is needed.
        """
        width = arch.num_heads * arch.head_dim
        projections = arch.hidden_size * (2 * width + 2 * arch.num_kv_heads * arch.head_dim)
        layer = 2.0 * (projections + 3 * arch.hidden_size * arch.ffn_size) * self.positions + 4.0 * width * self.pairs
        return 3.0 * (arch.num_layers * layer + 2.0 * arch.hidden_size * arch.vocab_size * self.rows)


def count_samples(samples: Sequence[TrainSample]) -> Counts:
    """Each sample by itself, without padding."""
    lengths = [sample.length for sample in samples]
    rows = sum(len(sample.completion_ids) for sample in samples)
    return Counts(sum(lengths), sum(n * (n + 1) // 2 for n in lengths), rows)


def count_batches(batches: Sequence[MicroBatch]) -> Counts:
    """What the micro-batches have, shared prefixes once, with the few positions of padding."""
    pairs = 0
    for batch in batches:
        pairs += sum(n * (n + 1) // 2 for n in np.diff(batch.cu_seqlens).tolist())
        pairs += sum((middle - start) * (end - middle) for start, middle, end in batch.shared)
    rows = sum(int(batch.loss_mask.sum()) for batch in batches)
    return Counts(sum(len(batch.tokens) for batch in batches), pairs, rows)
