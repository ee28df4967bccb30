"""Model shapes from config.json, layouts that don't fit, checkpoints by name, and what config.py may not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from services.learner.architecture import read_architecture
from services.learner.checkpoints import latest_checkpoint, prune_checkpoints, step_folder

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
    "torch_dtype": "bfloat16",
}


def write(folder: Path, **changes) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return folder


def test_a_config_of_transformers_4_and_of_5_give_the_same_shape(tmp_path: Path) -> None:
    old = read_architecture(write(tmp_path))
    nested = {"rope_theta": 5000.0, "rope_type": "default"}
    new = read_architecture(
        write(tmp_path, rope_theta=None, rope_parameters=nested, torch_dtype=None, dtype="bfloat16")
    )
    assert old == new
    assert (old.head_dim, old.rope.theta, old.dtype, old.tied_embeddings) == (16, 5000.0, "bfloat16", False)
    assert old.padded_vocab_size(1) == 104
    assert old.padded_vocab_size(2) == 112


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "llama, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "sliding-window"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"head_dim": 33}, "33 dimensions"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn.*float32, bfloat16, float16 can"),
        ({"num_attention_heads": 0}, "value that can't be"),
        ({"hidden_size": "wide"}, "value that can't be"),
        ({"rope_scaling": [1, 2]}, "value that can't be"),
    ],
)
def test_what_the_learner_would_not_apply_is_refused(tmp_path: Path, changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_architecture(write(tmp_path, **changes))


MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "head_dim": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def test_a_model_with_experts_is_read_as_the_hub_and_as_transformers_5_write_it(tmp_path: Path) -> None:
    arch = read_architecture(write(tmp_path, **MOE))
    assert (arch.num_experts, arch.experts_per_token, arch.moe_ffn_size, arch.norm_topk_prob) == (8, 2, 48, True)
    assert (arch.is_moe, arch.qk_norm, arch.qkv_bias, arch.head_dim) == (True, True, False, 32)
    assert not read_architecture(write(tmp_path)).is_moe
    raw = LLAMA | MOE | {"num_local_experts": 8}
    del raw["num_experts"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_architecture(tmp_path) == arch


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mlp_only_layers": [0]}, "dense layers among those with experts"),
        ({"decoder_sparse_step": 2}, "dense layers among those with experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 of num_experts = 8"),
    ],
)
def test_experts_that_the_learner_would_not_apply_are_refused(tmp_path: Path, changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_architecture(write(tmp_path, **(MOE | changes)))


def test_a_missing_key_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="lacks the key 'num_attention_heads'"):
        read_architecture(tmp_path)


def test_the_latest_complete_checkpoint_is_found_and_old_ones_go(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    for step in (5, 100, 20):
        step_folder(tmp_path, step).mkdir()
        (step_folder(tmp_path, step) / "checkpoint.json").write_text("{}")
    step_folder(tmp_path, 300).mkdir()
    (tmp_path / ".partial-step-00000400").mkdir()
    assert latest_checkpoint(tmp_path) == step_folder(tmp_path, 100)
    assert [path.name for path in prune_checkpoints(tmp_path, keep=2)] == ["step-00000005", ".partial-step-00000400"]
    assert latest_checkpoint(tmp_path) == step_folder(tmp_path, 100)


def test_config_and_architecture_import_neither_torch_nor_megatron_nor_transformers() -> None:
    code = (
        "import sys, services.learner.config, services.learner.architecture, services.learner.checkpoints;"
        "print([m for m in ('torch', 'megatron', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
