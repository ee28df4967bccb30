"""Real worlds of torchrun processes over gloo: every layout trains as one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from megatron_world import train
from safetensors.torch import load_file
from test_megatron_policy import make_model

REPO = Path(__file__).parents[2]

LAYOUTS = {
    "tensor": (2, "llama", {"parallel": {"tensor": 2}}),
    "tensor-qwen3": (2, "qwen3", {"parallel": {"tensor": 2}}),
    "tensor-sequence": (2, "qwen2", {"parallel": {"tensor": 2, "sequence": True}}),
    "pipeline": (2, "llama", {"parallel": {"pipeline": 2}}),
    "pipeline-tied": (2, "llama-tied", {"parallel": {"pipeline": 2}}),
    "pipeline-virtual": (2, "llama-tied", {"parallel": {"pipeline": 2, "virtual_stages": 2}}),
    "pipeline-uneven": (2, "llama", {"parallel": {"pipeline": 2, "first_stage_layers": 1}}),
    "data": (2, "llama-tied", {}),
    "data-distributed-optimizer": (2, "llama", {"optimizer": {"distributed": True}}),
    "tensor-pipeline": (4, "qwen2", {"parallel": {"tensor": 2, "pipeline": 2}}),
}


def run_world(model: Path, out: Path, overrides: dict, num_ranks: int) -> list[dict]:
    """What each rank of a world of ``num_ranks`` saw."""
    out.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    script = REPO / "tests/integration/megatron_world.py"
    done = subprocess.run(
        [*command, str(script), str(model), str(out), json.dumps(overrides)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_world_trains_as_one_process_does(tmp_path: Path, layout: str) -> None:
    num_ranks, kind, overrides = LAYOUTS[layout]
    # Adam's first steps have the size lr whatever the gradient: with a small lr, rounding can't drive the runs apart.
    overrides = {**overrides, "logprob_gap_alarm": None}
    model = make_model(tmp_path / "model", kind)
    one = train(model, tmp_path / "one", {"logprob_gap_alarm": None})
    ranks = run_world(model, tmp_path / "world", overrides, num_ranks)

    for seen in ranks:
        for got, expected in zip(seen["logprobs"], one["logprobs"], strict=True):
            assert got == pytest.approx(expected, abs=1e-4)
        for got, expected in zip([*seen["steps"], seen["after"]], [*one["steps"], one["after"]], strict=True):
            for name in ("loss", "grad_norm", "entropy", "ratio_mean", "ratio_max", "logprob_gap_mean", "kl_k3"):
                assert got[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
            assert got["num_loss_tokens"] == expected["num_loss_tokens"]
        # The step after the checkpoint is the same bit for bit when it is done again from it.
        assert {**seen["after"], "step_s": 0} == {**seen["again"], "step_s": 0}
    _check_senders(ranks, one["sent"])
    _check_export(tmp_path)


def _check_senders(ranks: list[dict], names: list[str]) -> None:
    """One sender per stage, and together they send every tensor once."""
    senders = {seen["place"][0]: seen["sent"] for seen in ranks if seen["place"][1]}
    assert sum(seen["place"][1] for seen in ranks) == len(senders)
    assert sorted(name for sent in senders.values() for name in sent) == sorted(names)


def _check_export(folder: Path) -> None:
    def read(where: Path) -> dict[str, torch.Tensor]:
        return {name: tensor for file in where.glob("*.safetensors") for name, tensor in load_file(file).items()}

    one, world = read(folder / "one/export"), read(folder / "world/export")
    assert one.keys() == world.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(world[name], tensor, rtol=0, atol=1e-5)
