"""Rotary frequencies and rotation against transformers' own, by kind; and what of a config's scaling is refused."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from common.errors import ConfigError
from services.learner.architecture import read_architecture
from services.learner.megatron import rotary
from services.learner.megatron.rotary import Rotary, rotate

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
KINDS = {
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama-3.1": {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 8192},
    "llama-3.2": {**LLAMA3, "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192},
    "llama3, other parameters": {
        "rope_type": "llama3",
        "rope_theta": 5e4,
        "factor": 3.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 7.0,
        "original_max_position_embeddings": 1000,
    },
    "yarn of Qwen": {**YARN, "rope_theta": 1e6},
    "yarn, its own factor": {**YARN, "rope_theta": 1e6, "attention_factor": 1.25},
    "yarn, two mscales": {**YARN, "rope_theta": 1e6, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn, not truncated": {**YARN, "rope_theta": 1e4, "truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn without its original context": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0},
}
SIZES = {"hidden_size": 96, "num_attention_heads": 3, "head_dim": 64, "max_position_embeddings": 131072}


def save(folder: Path, parameters: dict, **changes) -> Qwen3Config:
    config = Qwen3Config(**SIZES, rope_parameters=dict(parameters), **changes)
    config.save_pretrained(folder)
    return config


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_cosines_and_rotation_are_bit_for_bit_those_of_transformers(tmp_path: Path, kind: str) -> None:
    theirs = Qwen3RotaryEmbedding(save(tmp_path, KINDS[kind]))
    arch = read_architecture(tmp_path)
    ours = Rotary.of(arch, torch.device("cpu"))
    assert torch.equal(ours.inv_freq, theirs.inv_freq)
    assert ours.attention_factor == theirs.attention_scaling

    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 2, 0, 1, 5, 4000, 7])
    query = torch.randn(len(positions), 3, 64)
    for dtype in (torch.float32, torch.bfloat16):
        x = query.to(dtype)
        cos, sin = theirs(x, positions[None])
        expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
        got = rotate(x, ours.cos_sin(positions, dtype))
        assert torch.equal(got.transpose(0, 1)[None], expected)


def test_rotation_has_the_gradient_of_its_inverse() -> None:
    x = torch.randn(4, 2, 8, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(4, 1, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotate(x, (angles.cos(), angles.sin())), x)


def test_the_examples_of_the_docstrings_hold() -> None:
    assert doctest.testmod(rotary, extraglobs={"torch": torch}) == (0, 2)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0},
            "'dynamic' can't be trained; the learner knows default, linear, llama3",
        ),
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope' can't be trained"),
        ({"type": "linear"}, "lacks factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "lacks high_freq_factor, low_freq_factor"),
        ({"rope_type": "yarn"}, "lacks factor"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "needs high_freq_factor > low_freq_factor"),
        ({"rope_type": "default", "mrope_section": [2, 3, 3]}, "does not apply mrope_section"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "does not apply partial_rotary_factor"),
    ],
)
def test_a_scaling_that_would_not_be_applied_is_refused(tmp_path: Path, parameters: dict, words: str) -> None:
    LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e4}).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_parameters": parameters}))
    with pytest.raises(ConfigError, match=words):
        read_architecture(tmp_path)
