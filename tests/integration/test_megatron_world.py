"""Real worlds of processes over gloo: every layout trains as one process does.

Two worlds in all, of two ranks and of four; each trains in its layouts one after another. The largest differences seen to one
process stand in the README of the learner, and the limits here are a few times those.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hf_models import make_model, read_weights
from learner_tools import run_world
from megatron_world import train

# Absolute; log-probs are near -5.
MOST_OFF = {"logprobs": 5e-6, "loss": 1e-6, "grad_norm": 5e-6, "weights": 1e-6}
# Adam's update is lr * m / (sqrt(v) + eps). With an eps above the size of rounding it is continuous in the gradient, so that equal
# gradients mean equal weights, and with this lr the weights move by far more than the limit. (The bias of keys hardly moves: added
# to all keys alike it changes no attention, but for the rotation.)
OPTIMIZER = {"lr": 1e-3, "eps": 1e-3}
LEAST_MOVED = 2e-4


@dataclass(frozen=True)
class Layout:
    """A job of a world of ``num_ranks``."""

    num_ranks: int
    model: str
    parallel: dict = field(default_factory=dict)
    optimizer: dict = field(default_factory=dict)
    recompute: dict = field(default_factory=dict)

    @property
    def overrides(self) -> dict:
        return {
            "parallel": self.parallel,
            "optimizer": {**OPTIMIZER, **self.optimizer},
            "recompute": self.recompute,
            "logprob_gap_alarm": None,
        }


LAYOUTS = {
    "tensor": Layout(2, "llama", {"tensor": 2}),
    "tensor-sequence": Layout(2, "qwen2", {"tensor": 2, "sequence": True}),
    "pipeline": Layout(2, "llama-tied", {"pipeline": 2}),
    "pipeline-virtual": Layout(2, "llama-tied", {"pipeline": 2, "virtual_stages": 2}),
    "pipeline-uneven": Layout(2, "qwen2", {"pipeline": 2, "first_stage_layers": 1}),
    "context": Layout(2, "qwen2", {"context": 2}),
    "data": Layout(2, "llama-tied"),
    "data-distributed-optimizer": Layout(2, "llama", optimizer={"distributed": True}),
    "recompute-full": Layout(2, "llama", {"tensor": 2}, recompute={"granularity": "full"}),
    "recompute-selective": Layout(
        2,
        "llama-tied",
        {"pipeline": 2},
        recompute={"granularity": "selective", "modules": ["core_attn", "mlp"]},
    ),
    "tensor-one-group": Layout(2, "qwen3-one-group", {"tensor": 2}),
    "expert": Layout(2, "qwen3-moe", {"expert": 2}),
    "expert-whole-sequence": Layout(
        2, "qwen3-moe-raw", {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}
    ),
    "tensor-pipeline": Layout(4, "qwen2", {"tensor": 2, "pipeline": 2}),
    "pipeline-virtual-data": Layout(
        4, "llama-tied", {"pipeline": 2, "virtual_stages": 2}, optimizer={"distributed": True}
    ),
    "context-tensor-sequence": Layout(4, "qwen3-moe", {"context": 2, "tensor": 2, "sequence": True}),
    "expert-tensor-sequence": Layout(4, "qwen3-moe", {"tensor": 2, "sequence": True, "expert": 2}),
    "expert-pipeline": Layout(
        4,
        "qwen3-moe",
        {"pipeline": 2, "expert": 2},
        optimizer={"distributed": True},
        recompute={"granularity": "selective", "modules": ["moe"]},
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: make_model(folder / kind, kind) for kind in sorted({layout.model for layout in LAYOUTS.values()})}


@pytest.fixture(scope="module")
def one_process(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> functools._lru_cache_wrapper:
    """(what it saw, its folder) of a model."""
    folder = tmp_path_factory.mktemp("one")

    @functools.cache
    def run(kind: str) -> tuple[dict, Path]:
        overrides = {"optimizer": OPTIMIZER, "logprob_gap_alarm": None}
        return train(models[kind], folder / kind, overrides), folder / kind

    return run


@pytest.fixture(scope="module")
def world(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> functools._lru_cache_wrapper:
    """The folder of a world of so many ranks, where each layout has its own. Only layouts whose test was selected are run."""
    selected = {item.callspec.params["name"] for item in request.session.items if item.module is request.module}

    @functools.cache
    def run(num_ranks: int) -> Path:
        out = tmp_path_factory.mktemp(f"world{num_ranks}")
        jobs = {
            name: {"model": str(models[layout.model]), "overrides": layout.overrides}
            for name, layout in LAYOUTS.items()
            if layout.num_ranks == num_ranks and name in selected
        }
        done = run_world("megatron_world.py", out, json.dumps(jobs), num_ranks=num_ranks, timeout_s=1100)
        (out / "stderr").write_text(done.stderr)
        return out

    return run


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the first test of a world waits for all of its layouts
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_world_trains_as_one_process_does(name: str, models, one_process, world) -> None:
    layout = LAYOUTS[name]
    one, one_folder = one_process(layout.model)
    folder = world(layout.num_ranks) / name
    ranks = [_seen_by(folder, rank) for rank in range(layout.num_ranks)]
    off = {"logprobs": 0.0, "loss": 0.0, "grad_norm": 0.0}
    for seen in ranks:
        for got, expected in zip(seen["logprobs"], one["logprobs"], strict=True):
            off["logprobs"] = max(off["logprobs"], _most_off(got, expected))
        for got, expected in zip([*seen["steps"], seen["after"]], [*one["steps"], one["after"]], strict=True):
            for field_name in ("loss", "grad_norm"):
                off[field_name] = max(off[field_name], abs(got[field_name] - expected[field_name]))
            for field_name in ("entropy", "ratio_mean", "ratio_max", "logprob_gap_mean", "kl_k3"):
                assert got[field_name] == pytest.approx(expected[field_name], rel=1e-4, abs=1e-5), field_name
            assert got["num_loss_tokens"] == expected["num_loss_tokens"]
        if "routed" in one:  # tokens sent to given experts
            for got, expected in zip(seen["routed_logprobs"], one["routed_logprobs"], strict=True):
                off["logprobs"] = max(off["logprobs"], _most_off(got, expected))
            for field_name in ("loss", "grad_norm"):
                off[field_name] = max(off[field_name], abs(seen["routed"][field_name] - one["routed"][field_name]))
            shares = [
                [run["routed"][f"routing_{which}_share"] for which in ("replayed", "changed")] for run in (seen, one)
            ]
            assert shares[0] == pytest.approx(shares[1], abs=0.01)
            assert shares[0][0] == 1.0
        # The step after the checkpoint is the same bit for bit when it is done again from it.
        assert {**seen["after"], "step_s": 0} == {**seen["again"], "step_s": 0}
    start, expected, trained = (
        read_weights(where) for where in (models[layout.model], one_folder / "export", folder / "export")
    )
    assert trained.keys() == expected.keys()
    moved = {
        key: float((expected[key] - start[key]).abs().max()) for key in expected if not key.endswith("k_proj.bias")
    }
    assert min(moved.values()) > LEAST_MOVED
    off["weights"] = max(float((trained[key] - expected[key]).abs().max()) for key in expected)
    print(f"{name}: {off}")
    assert {key: value for key, value in off.items() if value > MOST_OFF[key]} == {}
    _check_senders(ranks, one["sent"])


def _seen_by(folder: Path, rank: int) -> dict:
    file = folder / f"rank{rank}.json"
    assert file.exists(), (folder.parent / "stderr").read_text()[-6000:]
    return json.loads(file.read_text())


def _most_off(got: list[float], expected: list[float]) -> float:
    return max((abs(a - b) for a, b in zip(got, expected, strict=True)), default=0.0)


def _check_senders(ranks: list[dict], names: list[str]) -> None:
    """One sender per stage, and together they send every tensor once."""
    senders = {seen["place"][0]: seen["sent"] for seen in ranks if seen["place"][1]}
    assert sum(seen["place"][1] for seen in ranks) == len(senders)
    assert sorted(name for sent in senders.values() for name in sent) == sorted(names)
