"""What only a GPU can show of the layouts: memory that is really given back, float16, and Transformer Engine's layers and attention."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from hf_models import make_model
from learner_tools import make_policy, run_world
from test_megatron_memory import train

from services.learner.megatron.mcore import HAVE_TRANSFORMER_ENGINE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_te = pytest.mark.skipif(not HAVE_TRANSFORMER_ENGINE, reason="needs Transformer Engine")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", "qwen3")


def test_offloading_gives_the_devices_memory_back(model: Path) -> None:
    options = {"device": "cuda", "dtype": "bfloat16"}
    expected = train(make_policy(model, **options))
    torch.cuda.empty_cache()
    baseline = torch.cuda.memory_allocated()
    policy = make_policy(model, **options, optimizer={"offload": True}, offload_while_waiting=True)
    num_parameters = sum(parameter.numel() for _, parameter in policy.model.named_parameters())
    got = train(policy)
    in_use = torch.cuda.memory_allocated()
    policy.rest()
    left = torch.cuda.memory_allocated()
    # 2 bytes of a weight and 4 of its gradient; masters and moments are on the host already.
    assert in_use - left >= 6 * num_parameters
    assert left - baseline < num_parameters
    for a, b in zip(got, expected, strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-3)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-2)


@pytest.mark.parametrize("recompute", [{"granularity": "full"}, {"granularity": "selective", "modules": ["mlp"]}])
def test_recomputation_gives_the_same_step(model: Path, recompute: dict) -> None:
    options = {"device": "cuda", "dtype": "bfloat16"}
    (plain,), (again,) = (train(make_policy(model, **options, **more), 1) for more in ({}, {"recompute": recompute}))
    assert again.loss == pytest.approx(plain.loss, rel=1e-3)
    assert again.grad_norm == pytest.approx(plain.grad_norm, rel=1e-2)


def test_float16_trains_near_float32(model: Path) -> None:
    scaled = {"dtype": "float16", "optimizer": {"initial_loss_scale": 16.0}}
    (wide,), (narrow,) = (train(make_policy(model, device="cuda", **more), 1) for more in ({}, scaled))
    assert narrow.num_overflows == 0
    assert narrow.loss == pytest.approx(wide.loss, rel=0.01)
    assert narrow.grad_norm == pytest.approx(wide.grad_norm, rel=0.01)


@needs_te
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3-moe"])
def test_transformer_engines_layers_train_as_ours_do(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model", kind)
    options = {"device": "cuda", "dtype": "bfloat16"}
    theirs = train(make_policy(model, **options), 1)[0]
    monkeypatch.setattr("services.learner.megatron.spec.HAVE_TRANSFORMER_ENGINE", False)
    ours = train(make_policy(model, **options), 1)[0]
    assert theirs.loss == pytest.approx(ours.loss, rel=0.02)
    assert theirs.grad_norm == pytest.approx(ours.grad_norm, rel=0.05)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_context_parallel_ranks_train_as_one_does(tmp_path: Path, model: Path) -> None:
    """With Transformer Engine where it is installed, whose attention needs bfloat16."""
    options = {"device": "cuda", "dtype": "bfloat16", "logprob_gap_alarm": None}
    (one,) = train(make_policy(model, **options), 1)
    jobs = {"context": {"model": str(model), "overrides": {**options, "parallel": {"context": 2}}}}
    done = run_world("megatron_world.py", tmp_path / "out", json.dumps(jobs), num_ranks=2, timeout_s=240)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        seen = json.loads((tmp_path / f"out/context/rank{rank}.json").read_text())["steps"][0]
        assert seen["loss"] == pytest.approx(one.loss, rel=0.02)
        assert seen["grad_norm"] == pytest.approx(one.grad_norm, rel=0.05)
        assert seen["num_loss_tokens"] == one.num_loss_tokens
