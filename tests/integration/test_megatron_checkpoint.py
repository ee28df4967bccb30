"""Checkpoints: of any layout into any other, written while training goes on, whole or not there."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hf_models import make_model
from learner_tools import REPO, run_world, weights
from megatron_checkpoint_world import LAYOUTS, OTHER, make_policy
from megatron_world import make_samples, save_checkpoint
from safetensors.torch import load_file
from test_resume_equal import same, state_of

from common.errors import ConfigError
from services.cli import main as forebay
from services.learner.checkpoints import CheckpointError, latest_checkpoint, prune_checkpoints
from services.learner.megatron.optimizer_kinds import adam_step

KINDS = {"plain": False, "distributed": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "llama-tied", "llama-tied")


def trained(model: Path, *, distributed: bool = False, steps: int = 2):
    policy = make_policy(model, distributed=distributed, parallel={})
    for step in range(steps):
        policy.train_step(make_samples(policy.model.arch.vocab_size), total_steps_done=step)
    return policy


@pytest.mark.slow
@pytest.mark.timeout(1200)  # for what never ends: every layout, both kinds
def test_a_checkpoint_of_any_layout_goes_on_in_any_other(model: Path, tmp_path: Path) -> None:
    """One process -> each layout -> one process: step, weights and moments as if nothing had changed."""
    stats, states = {}, {}
    for kind, distributed in KINDS.items():
        policy = trained(model, distributed=distributed)
        save_checkpoint(policy, tmp_path / kind, 2, {"note": "as saved"})
        stats[kind] = policy.train_step(make_samples(policy.model.arch.vocab_size), total_steps_done=2)
        save_checkpoint(policy, tmp_path / kind, 3, {})
        states[kind] = state_of(tmp_path / kind / "step-00000003", tmp_path / "whole.pt")
    done = run_world("megatron_checkpoint_world.py", model, tmp_path, tmp_path, num_ranks=4, timeout_s=1100)
    assert done.returncode == 0, done.stderr[-4000:]
    for kind, distributed in KINDS.items():
        for name in [*LAYOUTS, OTHER]:
            folder = tmp_path / f"{kind}-{name}"
            for rank in range(4):
                got = json.loads((folder / f"rank{rank}.json").read_text())
                for metric in ("loss", "grad_norm", "entropy", "kl_k3"):
                    assert got[metric] == pytest.approx(getattr(stats[kind], metric), rel=1e-5, abs=1e-6), (
                        name,
                        metric,
                    )
            assert_close(state_of(folder / "step-00000003", tmp_path / "part.pt"), states[kind], name)
            back = make_policy(model, distributed=distributed, parallel={})
            assert back.load_checkpoint(folder / "step-00000003") == (3, {"note": "as saved"})


def assert_close(got: dict, expected: dict, name: str) -> None:
    """Weights and moments; the vocabulary may be padded further. Random states and what Megatron keeps beside them are not compared."""
    tensors = {key: value for key, value in expected.items() if isinstance(value, torch.Tensor)}
    assert sum(key.startswith("optimizer.state.exp_avg_sq.") for key in tensors) > 5
    for key, value in tensors.items():
        part = got[key][tuple(map(slice, value.shape))]
        torch.testing.assert_close(
            part, value[tuple(map(slice, part.shape))], rtol=1e-4, atol=1e-6, msg=f"{name}: {key}"
        )


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_get_into_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, may_write, real = trained(model), threading.Event(), dcp.save

    def slow(*args, **kwargs):
        assert may_write.wait(60)
        return real(*args, **kwargs)

    monkeypatch.setattr(dcp, "save", slow)
    before = weights(policy)
    policy.begin_checkpoint(tmp_path, 2, {})
    policy.train_step(make_samples(policy.model.arch.vocab_size), total_steps_done=2)
    assert policy.finish_checkpoint(wait=False) is None
    assert latest_checkpoint(tmp_path) is None
    after = weights(policy)
    assert not all(torch.equal(before[name], after[name]) for name in before)
    may_write.set()
    assert policy.finish_checkpoint(wait=True) == 2
    assert policy.finish_checkpoint(wait=True) is None
    policy.load_checkpoint(tmp_path / "step-00000002")
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.iter_hf_tensors())


def test_a_checkpoint_that_can_not_be_written_leaves_the_one_before(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = trained(model)
    save_checkpoint(policy, tmp_path, 1, {})

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(dcp, "save", full)
        policy.begin_checkpoint(tmp_path, 2, {})
        with pytest.raises(CheckpointError, match=r"checkpoint of step 2 was not written: OSError.*No space left"):
            policy.finish_checkpoint(wait=True)
    assert latest_checkpoint(tmp_path).name == "step-00000001"
    policy.load_checkpoint(latest_checkpoint(tmp_path))
    save_checkpoint(policy, tmp_path, 2, {})
    prune_checkpoints(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_learner_that_dies_while_it_writes_leaves_the_one_before(model: Path, tmp_path: Path) -> None:
    dying = f"""
import os, sys, time
sys.path.insert(0, {str(REPO / "tests/integration")!r})
from pathlib import Path
from megatron_world import save_checkpoint
from test_megatron_checkpoint import trained
import torch.distributed.checkpoint as dcp
policy = trained(Path({str(model)!r}))
save_checkpoint(policy, Path({str(tmp_path)!r}), 1, {{}})
class Dies(dcp.FileSystemWriter):
    def finish(self, metadata, results):  # all data is written, and nothing says yet where it is
        os.kill(os.getpid(), 9)
dcp.FileSystemWriter = Dies
policy.begin_checkpoint(Path({str(tmp_path)!r}), 2, {{}})
policy.finish_checkpoint(wait=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", dying], env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}, timeout=500
    )
    assert done.returncode == -9
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial-step-00000002", "step-00000001"]
    assert make_policy(model, distributed=False, parallel={}).load_checkpoint(latest_checkpoint(tmp_path)) == (1, {})
    prune_checkpoints(tmp_path, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_checkpoint_before_the_first_step_goes_on_as_a_fresh_start_does(model: Path, tmp_path: Path) -> None:
    for distributed in (False, True):
        fresh = trained(model, distributed=distributed, steps=0)
        folder = save_checkpoint(fresh, tmp_path / str(distributed), 0, {})
        loaded = trained(model, distributed=distributed, steps=0)
        loaded.load_checkpoint(folder)
        for policy in (fresh, loaded):
            policy.train_step(make_samples(policy.model.arch.vocab_size), total_steps_done=0)
        expected = weights(fresh)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.iter_hf_tensors())


@pytest.mark.parametrize("family", ["llama-tied", "qwen3-moe"])
def test_a_run_goes_on_in_another_precision_and_with_another_kind_of_optimizer(family: str, tmp_path: Path) -> None:
    """Masters and moments are the same bits in every kind, the parameters are the masters in their precision, and Adam's step goes on."""
    model = make_model(tmp_path / "model", family)
    policy = make_policy(model, distributed=False, parallel={}, dtype="bfloat16")
    for step in range(2):
        policy.train_step(make_samples(policy.model.arch.vocab_size), total_steps_done=step)
    folder = save_checkpoint(policy, tmp_path / "first", 2, {})
    expected, before = trained_state(folder, tmp_path), weights(policy)
    kinds = [("float32", True), ("float16", False), ("bfloat16", True), ("float32", False), ("bfloat16", False)]
    for i, (dtype, distributed) in enumerate(kinds if family == "llama-tied" else kinds[:1]):
        policy = make_policy(model, distributed=distributed, parallel={}, dtype=dtype)
        assert policy.load_checkpoint(folder) == (2, {})
        for name, tensor in policy.iter_hf_tensors():
            close = {"rtol": 0, "atol": 0} if dtype == "bfloat16" else {"rtol": 2**-7, "atol": 1e-3}
            torch.testing.assert_close(tensor.float(), before[name].float(), msg=f"{dtype} {name}", **close)
        folder = save_checkpoint(policy, tmp_path / str(i), 2, {})
        assert same(trained_state(folder, tmp_path), expected), (dtype, distributed)
        policy.train_step(make_samples(policy.model.arch.vocab_size), total_steps_done=2)


def trained_state(folder: Path, tmp_path: Path) -> dict:
    """Moments, masters and Adam's step, whatever kind of optimizer wrote them."""
    state = state_of(folder, tmp_path / "whole.pt")
    prefixes = ("optimizer.state.param.", "optimizer.state.fp32_param.", "")
    masters = next(prefix for prefix in prefixes if any(key.startswith(prefix) for key in state))
    names = [
        key.removeprefix("optimizer.state.exp_avg.") for key in state if key.startswith("optimizer.state.exp_avg.")
    ]
    assert len(names) > 5
    return {
        name: [state[f"optimizer.state.{m}.{name}"] for m in ("exp_avg", "exp_avg_sq")] + [state[masters + name]]
        for name in names
    } | {"step": adam_step(state["common"])}


def test_what_is_no_checkpoint_of_this_model_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    policy = trained(model, steps=0)
    folder = save_checkpoint(policy, tmp_path / "c", 1, {})
    with pytest.raises(ConfigError, match=r"is not a checkpoint: checkpoint\.json is not there"):
        policy.load_checkpoint(tmp_path)
    other = trained(make_model(tmp_path / "other", "qwen2"), steps=0)
    with pytest.raises(ConfigError, match=r"another model than run\.model \(family: llama, not qwen2"):
        other.load_checkpoint(folder)
    manifest = json.loads((folder / "checkpoint.json").read_text())
    (folder / "checkpoint.json").write_text(json.dumps({**manifest, "format": 1}))
    with pytest.raises(ConfigError, match=r"has format 1; this version of Forebay reads format 2"):
        policy.load_checkpoint(folder)


def test_a_damaged_checkpoint_is_refused(model: Path, tmp_path: Path) -> None:
    policy = trained(model, steps=0)
    folder = save_checkpoint(policy, tmp_path / "c", 1, {})
    for file in ("__0_0.distcp", ".metadata", "common.pt", "metadata.json"):
        path, whole = folder / file, (folder / file).read_bytes()
        for damaged in (None, whole[: len(whole) // 3]):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with pytest.raises(ConfigError, match=r"step-00000001 is damaged or not whole.*Move its folder away"):
                policy.load_checkpoint(folder)
        path.write_bytes(whole)
    assert policy.load_checkpoint(folder) == (1, {})


@pytest.mark.slow
def test_the_command_exports_what_the_learner_would(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = trained(model)
    save_checkpoint(policy, tmp_path / "run/checkpoints", 2, {})
    policy.export_hf(tmp_path / "expected")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("run", "run/checkpoints/step-00000002"):
        out = tmp_path / f"out-{name.count('/')}"
        assert forebay(["export", str(tmp_path / name), str(out)]) == 0
        assert "the llama model of step 2" in capsys.readouterr().out
        assert sorted(path.name for path in out.iterdir()) == sorted(
            path.name for path in (tmp_path / "expected").iterdir()
        )
        expected = load_file(tmp_path / "expected/model.safetensors")
        assert same(load_file(out / "model.safetensors"), expected)
        assert forebay(["export", str(tmp_path / name), str(out)]) == 2
        assert "is there already" in capsys.readouterr().err
    assert forebay(["export", str(tmp_path), str(tmp_path / "new")]) == 2
    assert "is not a checkpoint" in capsys.readouterr().err
    manifest = json.loads((tmp_path / "run/checkpoints/step-00000002/checkpoint.json").read_text())
    (tmp_path / "run/checkpoints/step-00000002/checkpoint.json").write_text(
        json.dumps({**manifest, "source": "elsewhere"})
    )
    assert forebay(["export", str(tmp_path / "run"), str(tmp_path / "new")]) == 2
    assert "name its Hugging Face folder with --model" in capsys.readouterr().err
    assert forebay(["export", str(tmp_path / "run"), str(tmp_path / "new"), "--model", str(model)]) == 0
