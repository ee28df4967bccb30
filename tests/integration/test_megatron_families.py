"""Every model family and rotary kind: the log-probs of transformers, exact weights both ways, and folders that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_models import MODELS, SIZES, make_model, read_weights, reference_logprobs
from learner_tools import make_policy, run_world
from megatron_families_world import see
from megatron_world import make_samples
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from common.errors import ConfigError
from services.learner.megatron.export import export_hf

NUM_RANKS = 4
# Layout, and the models that run in it; ranks that a layout leaves over are data-parallel.
LAYOUTS: dict[str, tuple[dict, tuple[str, ...]]] = {
    "TP2": ({"tensor": 2}, ("llama", "llama3-tied", "qwen2", "qwen3-yarn-tied", "qwen3-one-group")),
    "TP4": ({"tensor": 4}, ("llama2", "llama3", "qwen2.5-yarn", "qwen3-one-group")),
    "PP2": ({"pipeline": 2}, ("llama-tied", "qwen2.5-yarn", "qwen3")),
    "PP2, 1 + 3 layers": ({"pipeline": 2, "first_stage_layers": 1}, ("qwen3-yarn-tied",)),
    "TP2 PP2 VPP2": ({"tensor": 2, "pipeline": 2, "virtual_stages": 2}, ("llama-linear", "qwen2", "qwen3")),
    "EP2": ({"expert": 2}, ("qwen3-moe",)),
    "EP4": ({"expert": 4}, ("qwen3-moe-raw",)),
    "PP2 EP2": ({"pipeline": 2, "expert": 2}, ("qwen3-moe",)),
    "TP2 SP EP4": ({"tensor": 2, "sequence": True, "expert": 4, "expert_tensor": 1}, ("qwen3-moe",)),
    "TP2 SP EP2 ETP2": ({"tensor": 2, "sequence": True, "expert": 2}, ("qwen3-moe",)),
}
CASES = {f"{kind}, {layout}": kind for layout, (_, kinds) in LAYOUTS.items() for kind in kinds}
# Where ranks share a key-value head, the gradient is checked too: other tests train whole groups only.
TRAINED = {"qwen2.5-yarn, TP4", "qwen3-one-group, TP2", "qwen3-one-group, TP4"}


def assert_same_weights(got: Path, expected: Path) -> None:
    original, exported = read_weights(expected), read_weights(got)
    assert original.keys() == exported.keys()
    for name, tensor in original.items():
        assert exported[name].dtype == tensor.dtype, name
        assert torch.equal(tensor, exported[name]), name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written to."""
    return make_model(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture
def broken(tmp_path: Path, model: Path) -> Path:
    """A copy of the model to break."""
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize("kind", MODELS)
def test_packed_log_probs_are_those_of_transformers_and_weights_come_back_bit_for_bit(
    tmp_path: Path, kind: str
) -> None:
    model = make_model(tmp_path / "model", kind)
    samples = make_samples(SIZES["vocab_size"], num_samples=6)
    policy = make_policy(model)
    for got, expected in zip(policy.logprobs(samples), reference_logprobs(model, samples), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)

    assert [entry[:2] for entry in policy.plan_hf_tensors()] == [
        (name, tuple(tensor.shape)) for name, tensor in policy.iter_hf_tensors()
    ]
    policy.export_hf(tmp_path / "export")
    assert_same_weights(tmp_path / "export", model)
    assert not list(tmp_path.glob(".partial*"))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3-moe"])
def test_a_bfloat16_model_in_shards_comes_back_bit_for_bit_with_all_files_beside_the_weights(
    tmp_path: Path, kind: str
) -> None:
    model = make_model(tmp_path / "model", kind, torch.bfloat16, max_shard_size="60KB")
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert len(list(model.glob("*.safetensors"))) > 3
    policy = make_policy(model)
    export_hf(tmp_path / "export", model, policy.model, shard_bytes=50_000)
    files = sorted(path.name for path in (tmp_path / "export").glob("*.safetensors"))
    assert len(files) > 3
    assert all((tmp_path / "export" / name).stat().st_size < 60_000 for name in files)
    assert_same_weights(tmp_path / "export", model)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "export" / name).read_bytes() == (model / name).read_bytes()
    index = json.loads((tmp_path / "export/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in read_weights(model).values())
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.bfloat16).state_dict()
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(tensor, read[name]) for name, tensor in expected.items())


def test_the_export_keeps_each_tensors_own_dtype_whatever_the_config_says(broken: Path) -> None:
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    tensors["model.layers.1.self_attn.q_proj.weight"] = tensors["model.layers.1.self_attn.q_proj.weight"].bfloat16()
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    policy = make_policy(broken)
    policy.export_hf(broken / "export")
    assert_same_weights(broken / "export", broken)

    (broken / "model.safetensors").unlink()
    policy.export_hf(broken / "again")
    assert {tensor.dtype for tensor in read_weights(broken / "again").values()} == {torch.float32}


def test_stacked_experts_load_as_single_ones_do(tmp_path: Path) -> None:
    single = make_model(tmp_path / "single", "qwen3-moe")
    stacked = make_model(tmp_path / "stacked", "qwen3-moe", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in read_weights(stacked)
    make_policy(stacked).export_hf(tmp_path / "export")
    assert_same_weights(tmp_path / "export", single)


def test_missing_and_unmapped_weights_wrong_shapes_and_dtypes_are_listed(broken: Path) -> None:
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.0.surprise"] = tensors.pop("model.layers.3.mlp.up_proj.weight")
    tensors["model.norm.weight"] = torch.ones(65)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].to(torch.float64)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # of old checkpoints: no error
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        make_policy(broken)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    for line in (
        "missing (1): model.layers.3.mlp.up_proj.weight",
        "not mapped (1): model.layers.0.surprise",
        "of another shape than config.json gives (1): model.norm.weight [65] instead of [64]",
        "of a dtype other than F32, BF16, F16 (1): model.layers.1.mlp.up_proj.weight F64",
    ):
        assert line in lines
    assert "inv_freq" not in str(caught.value)


def test_a_checkpoint_of_another_model_is_refused(broken: Path) -> None:
    raw = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(raw | {"vocab_size": 98, "num_key_value_heads": 4}))
    with pytest.raises(ConfigError) as caught:
        make_policy(broken)
    assert "embed_tokens.weight [99, 64] instead of [98, 64]" in str(caught.value)
    assert "k_proj.bias [32] instead of [64]" in str(caught.value)


def test_files_that_are_cut_off_missing_or_pointers_are_all_named(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", max_shard_size="100KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    files[0].write_bytes(files[0].read_bytes()[:-4])
    files[1].unlink()
    files[2].write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 100000\n")
    with pytest.raises(ConfigError, match="are not complete") as caught:
        make_policy(tmp_path)
    for file, words in zip(files, ("can't be read", "is missing", "(68 bytes) can't be read"), strict=False):
        assert file.name in str(caught.value)
        assert words in str(caught.value)


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", max_shard_size="100KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"] = {name: files[0] if file == files[-1] else file for name, file in index["weight_map"].items()}
    path.write_text(json.dumps(index))
    with pytest.raises(
        ConfigError, match=rf"names tensors that its files don't have: .* \(in {files[0]} by the index\)"
    ):
        make_policy(tmp_path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="is no index of weights"):
        make_policy(tmp_path)


def test_a_folder_without_weights_and_one_with_a_tensor_twice_are_refused(broken: Path) -> None:
    (broken / "model.safetensors").rename(broken / "a.safetensors")
    (broken / "b.safetensors").write_bytes((broken / "a.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"tensors in two files: .*\(in a.safetensors and b.safetensors\)"):
        make_policy(broken)
    (broken / "a.safetensors").unlink()
    (broken / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"No \*.safetensors"):
        make_policy(broken)


def run_cases(folder: Path) -> list[dict]:
    """Runs every case in one world of ``NUM_RANKS``; what each rank saw."""
    for kind in set(CASES.values()):
        make_model(folder / kind, kind)
    layouts = [
        {
            "parallel": parallel,
            "cases": {
                f"{kind}, {layout}": {"model": str(folder / kind), "trains": f"{kind}, {layout}" in TRAINED}
                for kind in kinds
            },
        }
        for layout, (parallel, kinds) in LAYOUTS.items()
    ]
    (folder / "layouts.json").write_text(json.dumps(layouts))
    done = run_world("megatron_families_world.py", folder / "layouts.json", folder, num_ranks=NUM_RANKS, timeout_s=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def difference(got: list, expected: list) -> float:
    return max(float(np.abs(np.array(a) - np.array(b)).max()) for a, b in zip(got, expected, strict=True))


@pytest.mark.slow
def test_families_in_every_layout_have_the_log_probs_of_transformers_and_come_back_bit_for_bit(tmp_path: Path) -> None:
    ranks = run_cases(tmp_path)
    samples = make_samples(SIZES["vocab_size"], num_samples=8)
    references = {kind: reference_logprobs(tmp_path / kind, samples) for kind in set(CASES.values())}
    for name, kind in CASES.items():
        seen = [rank[name] for rank in ranks]
        largest = max(difference(rank["logprobs"], references[kind]) for rank in seen)
        print(f"{name}: log-probs differ by {largest:.1e} at most")
        assert largest < 1e-4, name
        assert_same_weights(tmp_path / name / "export", tmp_path / kind)
        # No rank reads more than it holds; rows that pad the vocabulary are not read.
        assert all(0 <= rank["held"] - rank["read"] < 0.3 * rank["held"] for rank in seen), name
        senders = [stage for rank in seen for stage in rank["sender_of"].items()]
        sent = [sent_name for _, names in sorted(senders) for sent_name in names]
        assert len(sent) == len(set(sent)) == len(read_weights(tmp_path / kind)), name
        if name in TRAINED:
            alone = see(tmp_path / kind, {}, tmp_path / "alone", trains=True)
            for rank in seen:
                assert rank["step"] == pytest.approx(alone["step"], rel=1e-4, abs=1e-6), name
                # Adam's first step is lr * sign(g): where g is rounding noise the sign is free.
                assert difference(rank["after"], alone["after"]) < 2e-2, name
