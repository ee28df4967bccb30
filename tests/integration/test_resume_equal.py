"""A run that was cut and resumed equals the run that was not: batches, steps, learning rates, versions, and every bit of what was
trained, with its Adam moments and random states. Real processes over the real transport; the cuts are kill -9."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_harness import ROOT, Role, Run, descendants, task_line
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from protocol.codec import decode
from services.coordinator.journal import Journal
from services.faults.proxy import Rule

TASKS = "".join(task_line(f"t{i}", f"Write f(x), number {'7' * (1 + 5 * i % 11)}.") for i in range(20))
STEPS = 6
BASE = {
    "coordinator.max_steps": STEPS,
    "coordinator.group_size": 4,
    "coordinator.max_staleness": 0,
    "coordinator.bypass_window": 0,
    "rollout.fake.num_tokens": 12,
}
MEGATRON = {
    "run.model": str(ROOT / "deploy/quickstart/model"),
    "learner.policy": "megatron",
    "learner.deterministic": True,
    "learner.device": "cpu",
    "learner.dtype": "float32",
    "learner.num_threads": 1,
    "learner.logprob_gap_alarm": None,  # the fake engine's log-probs are no model's
    "learner.max_tokens_per_microbatch": 128,
    "learner.optimizer.lr": 1e-3,
    "learner.optimizer.warmup_steps": 4,
    "learner.optimizer.weight_decay": 0.1,
}
SAME_METRICS = ("train/lr", "train/loss", "train/grad_norm", "train/num_tokens", "reward/mean", "staleness/max")


class CutRun(Run):
    """A run whose learner is a world of ``num_ranks``, and which can be cut."""

    def __init__(self, folder: Path, changes: dict[str, Any], *, num_ranks: int = 1) -> None:
        folder.mkdir(parents=True)
        super().__init__(folder, BASE | changes, tasks=TASKS, proxied=True)
        self.num_ranks = num_ranks
        self.now: dict[str, Role] = {}

    def start_role(self, name: str) -> None:
        """Start one of coordinator, judge, a, learner."""
        if name != "learner":
            self.now[name] = self.start({"judge": "reward", "a": "rollout"}.get(name, name), name)
            return
        words = ["--config", str(self.config_path), "--node-id", name, "--ranks", str(self.num_ranks)]
        self.now[name] = self.spawn(name, [sys.executable, "-m", "services.learner", *words])

    def start_roles(self, *names: str) -> None:
        """Start several; all, if none is named."""
        for name in names or ("coordinator", "judge", "a", "learner"):
            self.start_role(name)

    def cut(self, *names: str) -> None:
        """Kill processes at one moment, with all that they started, and start them again."""
        pids = [pid for name in names for pid in (self.now[name].process.pid, *descendants(self.now[name].process.pid))]
        assert all(self.now[name].process.poll() is None for name in names), self.logs()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # a judge's short-lived child
                os.kill(pid, signal.SIGKILL)
        for name in names:
            self.now[name].process.wait()
        self.proxy.clear()
        self.start_roles(*names)

    def in_the_middle_of_step(self, step: int) -> None:
        """Until the learner has its batch. It can't commit it until the next cut, however fast it is and however slow we are."""
        self._hold_commit(step)
        self.wait_until(lambda s: s["version"] == step - 1 and s["groups"]["batched"] > 0, timeout_s=120)

    def after_checkpoint(self, step: int) -> None:
        """Until the checkpoint of ``step`` is there."""
        deadline = time.monotonic() + 120
        while not any(self.run_dir.glob(f"checkpoints/step-{step:08d}/*.json")):
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.01)

    def between_publish_and_commit(self, step: int) -> None:
        """Until the engine has a version that the journal hasn't. It stays so until the next cut."""
        self._hold_commit(step).wait(120)
        status = self.status()
        assert status is not None
        assert status["version"] == step - 1
        assert [node["holds"].split("/")[0] for node in status["nodes"] if node["role"] == "rollout"] == [f"v{step}"]

    def _hold_commit(self, step: int) -> Rule:
        """The coordinator never hears that ``step`` is done, however often it is told."""
        is_commit = lambda seen: decode(seen.frames).message.step == step  # noqa: E731
        return self.proxy.add("drop", "step_committed", direction="up", where=is_commit, count=None)

    def outcome(self) -> dict[str, Any]:
        """Everything that must be equal, when all have left."""
        for name, role in self.now.items():
            assert role.exit_code(240) == 0, f"{name}\n{self.logs()}"
        assert self.summary()["state"] == "finished"
        folder = self.run_dir / "checkpoints" / f"step-{STEPS:08d}"
        is_fake = self.config["learner"].get("policy") == "fake"
        manifest = json.loads((folder / ("fake.json" if is_fake else "checkpoint.json")).read_text())
        incarnation = manifest["extra"].pop("incarnation")
        rows = self.query("SELECT step, metrics FROM steps WHERE committed_at IS NOT NULL ORDER BY step")
        return {
            "incarnation": incarnation,
            "version": self.summary()["version"],
            "manifest": manifest,
            "state": {} if is_fake else state_of(folder, self.run_dir / "state.pt"),
            "export": {path.name: path.read_bytes() for path in sorted((self.run_dir / "export").iterdir())},
            "batches": self._batches(),
            "metrics": {step: _some(json.loads(metrics), SAME_METRICS) for step, metrics in rows},
        }

    def _batches(self) -> dict[int, Any]:
        journal = Journal(self.run_dir / "journal.sqlite", run_id=self.config["run"]["id"])
        try:
            return {step: [_content(group) for group in journal.batch(step)] for step in range(1, STEPS + 1)}
        finally:
            journal.close()


def state_of(folder: Path, scratch: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, whole, and every rank's random states, by torch's own reader."""
    dcp_to_torch_save(folder, scratch)
    return torch.load(scratch, weights_only=False) | {"common": torch.load(folder / "common.pt", weights_only=False)}


def same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a.getvalue() == b.getvalue() if isinstance(a, BytesIO) else a == b


def _some(values: dict[str, float], names: tuple[str, ...]) -> dict[str, float | None]:
    return {name: values.get(name) for name in names}


def _content(group: Any) -> Any:
    return group.group_id, [
        (s.sample_index, s.text, s.result.reward, s.segments, {name: a.tolist() for name, a in s.arrays.items()})
        for s in group.judged()
    ]


def assert_equal(cut: dict[str, Any], straight: dict[str, Any], *, learner_lives: int) -> None:
    """All but the incarnation, which tells that there was a cut."""
    assert cut["incarnation"] == straight["incarnation"] + learner_lives - 1
    for name in ("version", "manifest", "batches", "metrics"):
        assert cut[name] == straight[name], name
    assert cut["state"].keys() == straight["state"].keys()
    differ = [name for name, value in straight["state"].items() if not same(value, cut["state"][name])]
    assert not differ, f"{len(differ)} of {len(straight['state'])} differ, {differ[:5]}"
    assert cut["export"] == straight["export"]


# ---- the fake policy: its weight is a checksum of its history ----


@pytest.fixture(scope="module")
def straight_fake(tmp_path_factory):
    with CutRun(tmp_path_factory.mktemp("straight") / "run", {"learner.fake_step_s": 0.05}) as run:
        run.start_roles()
        outcome = run.outcome()
        run.assert_finished()
    assert len(outcome["batches"][1][0][1]) == 4
    return outcome


EVERYTHING = ("coordinator", "judge", "a", "learner")
BETWEEN = [("learner",), ("coordinator",), EVERYTHING, ("learner",), ("coordinator",)]
WITHIN = [EVERYTHING, ("learner",), ("coordinator",), EVERYTHING, ("learner",)]


@pytest.mark.slow
@pytest.mark.parametrize("victims", [BETWEEN, WITHIN], ids=["between-steps", "within-steps"])
def test_a_run_that_is_cut_at_each_step_equals_one_that_is_not(tmp_path, straight_fake, victims):
    with CutRun(tmp_path / "run", {"learner.fake_step_s": 0.5}) as run:
        run.start_roles()
        for step, names in enumerate(victims, start=1):
            if victims is WITHIN:
                run.in_the_middle_of_step(step)
            else:
                run.wait_for_step(step)
            run.cut(*names)
        outcome = run.outcome()
        run.assert_finished()
    assert_equal(outcome, straight_fake, learner_lives=1 + sum("learner" in names for names in victims))


@pytest.mark.slow
def test_a_cut_between_publication_and_commit_changes_nothing(tmp_path, straight_fake):
    with CutRun(tmp_path / "run", {"learner.fake_step_s": 0.1}) as run:
        run.start_roles()
        for step in (1, 4):
            run.between_publish_and_commit(step)
            run.cut("learner")
        outcome = run.outcome()
    assert_equal(outcome, straight_fake, learner_lives=3)


# ---- Megatron ----

LAYOUTS = {
    "one": (1, {}),
    "tensor": (2, {"learner.parallel.tensor": 2}),
    "pipeline": (2, {"learner.parallel.pipeline": 2}),
}
CUTS: list[tuple[Callable[[CutRun], Any], tuple[str, ...]]] = [
    (lambda run: run.after_checkpoint(2), ("learner",)),
    (lambda run: run.in_the_middle_of_step(4), EVERYTHING),  # 3 is committed, and its checkpoint is to come
    (lambda run: run.between_publish_and_commit(5), ("learner",)),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_megatron_run_that_is_cut_is_equal_bit_for_bit(tmp_path, layout):
    num_ranks, changes = LAYOUTS[layout]
    with CutRun(tmp_path / "straight", MEGATRON | changes, num_ranks=num_ranks) as run:
        run.start_roles()
        straight = run.outcome()
    assert_learns(straight, num_ranks)
    with CutRun(tmp_path / "cut", MEGATRON | changes, num_ranks=num_ranks) as run:
        run.start_roles()
        for wait, victims in CUTS:
            wait(run)
            run.cut(*victims)
        cut = run.outcome()
    assert_equal(cut, straight, learner_lives=1 + sum("learner" in victims for _, victims in CUTS))


def assert_learns(outcome: dict[str, Any], num_ranks: int) -> None:
    """Equality would be empty if the weights stood still."""
    metrics = outcome["metrics"]
    assert [metrics[step]["train/lr"] for step in range(1, 6)] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])
    assert all(metrics[step]["train/grad_norm"] > 1e-3 for step in metrics)
    assert len({metrics[step]["train/loss"] for step in metrics}) == STEPS
    moments = [value for name, value in outcome["state"].items() if name.startswith("optimizer.state.exp_avg_sq.")]
    assert moments
    assert sum(bool(tensor.any()) for tensor in moments) > len(moments) / 2
    assert len([name for name in outcome["state"] if name.startswith("rng")]) == num_ranks
