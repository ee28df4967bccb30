"""A run that was cut and resumed equals the run that was not: batches, steps, learning rates, versions, and every bit of what was
trained, with its Adam moments and random states. Real processes over the real transport; the cuts are kill -9."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from loop_harness import ROOT, Role, descendants, task_line
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from services.coordinator.journal import Journal
from tests.faults.harness import Run
from tests.faults.proxy import Rule, body_of

TASKS = "".join(task_line(f"t{i}", f"Write f(x), number {'7' * (1 + 5 * i % 11)}.") for i in range(20))
STEPS = 6
BASE = {
    "coordinator.max_steps": STEPS,
    "coordinator.group_size": 4,
    "coordinator.max_staleness": 0,
    "coordinator.bypass_window": 0,
    "rollout.fake.num_tokens": 12,
    # For what never comes: whoever was cut is an interpreter that starts anew, and the others wait for it.
    "coordinator.no_progress_timeout_s": 600,
    "run.join_timeout_s": 120,
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


# "after" step n: it is committed, and the learner asks for the next batch; "saved": likewise, and its checkpoint is whole; "within" step n:
# its batch is handed out; "published": the engine has a version that the journal hasn't.
Moment = tuple[Literal["after", "saved", "within", "published"], int]


class CutRun(Run):
    """A run whose learner is a world of ``num_ranks``, and which can be cut."""

    def __init__(self, folder: Path, changes: dict[str, Any], *, num_ranks: int = 1) -> None:
        folder.mkdir(parents=True)
        super().__init__(folder, BASE | changes, tasks=TASKS, proxied=True, warm="learner.policy" not in changes)
        self.num_ranks = num_ranks
        self.live: dict[str, Role] = {}
        self.held: Rule

    def start_role(self, name: str) -> None:
        """Start one of coordinator, judge, a, learner."""
        if name != "learner":
            self.live[name] = self.start({"judge": "reward", "a": "rollout"}.get(name, name), name)
            return
        words = ["--config", str(self.config_path), "--node-id", name, "--ranks", str(self.num_ranks)]
        self.live[name] = self.spawn(name, [sys.executable, "-m", "services.learner", *words])

    def start_roles(self, *names: str) -> None:
        """Start several; all, if none is named."""
        for name in names or ("coordinator", "judge", "a", "learner"):
            self.start_role(name)

    def cut(self, *names: str, then: Moment | None = None) -> None:
        """Kill processes at one moment, with all that they started, and start them again, to be held at ``then``."""
        pids = [
            pid for name in names for pid in (self.live[name].process.pid, *descendants(self.live[name].process.pid))
        ]
        assert all(self.live[name].process.poll() is None for name in names), self.logs()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # a judge's short-lived child
                os.kill(pid, signal.SIGKILL)
        for name in names:
            self.live[name].process.wait()
        self.hold_at(then)
        self.start_roles(*names)

    def hold_at(self, moment: Moment | None) -> None:
        """The run does not get beyond ``moment`` before the next call, however fast it is and however slow we are. To be called while
        nothing goes on."""
        self.proxy.clear()
        if moment is not None:
            name, step = moment
            kind, first = ("batch_request", step + 1) if name in ("after", "saved") else ("step_committed", step)
            self.held = self.proxy.add("drop", kind, count=None, where=lambda seen: body_of(seen)["step"] >= first)

    def reach(self, moment: Moment) -> None:
        """Wait until the run, held there, has come to ``moment``."""
        name, step = moment
        if name == "within":
            self.wait_until(lambda s: s["version"] == step - 1 and s["groups"]["batched"] > 0)
        else:
            self.held.wait()
        status = self.now()
        assert status["version"] == (step if name in ("after", "saved") else step - 1)
        if name == "saved":  # the learner writes it in the background
            self.wait_until(lambda _: any(self.run_dir.glob(f"checkpoints/step-{step:08d}/*.json")))
        if name == "published":
            assert [n["holds"].split("/")[0] for n in status["nodes"] if n["role"] == "rollout"] == [f"v{step}"]

    def outcome(self) -> dict[str, Any]:
        """Everything that must be equal, when all have left."""
        for name, role in self.live.items():
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
Cuts = list[tuple[Moment, tuple[str, ...]]]
FAKE_CUTS: dict[str, Cuts] = {
    "between-steps": [
        (("after", 1), ("learner",)),
        (("after", 2), ("coordinator",)),
        (("after", 3), EVERYTHING),
        (("after", 4), ("learner",)),
        (("after", 5), ("coordinator",)),
    ],
    "within-steps": [
        (("within", 1), EVERYTHING),
        (("within", 2), ("learner",)),
        (("within", 3), ("coordinator",)),
        (("within", 4), EVERYTHING),
        (("within", 5), ("learner",)),
    ],
    "between-publication-and-commit": [(("published", 1), ("learner",)), (("published", 4), ("learner",))],
}


def cut_at(run: CutRun, cuts: Cuts) -> dict[str, Any]:
    """The outcome of a run that is cut at each of these moments."""
    moments = [moment for moment, _ in cuts]
    run.hold_at(moments[0])
    run.start_roles()
    for (moment, victims), then in zip(cuts, [*moments[1:], None], strict=True):
        run.reach(moment)
        run.cut(*victims, then=then)
    return run.outcome()


@pytest.mark.slow
@pytest.mark.parametrize("cuts", FAKE_CUTS)
def test_a_run_that_is_cut_at_each_step_equals_one_that_is_not(tmp_path, straight_fake, cuts):
    with CutRun(tmp_path / "run", {"learner.fake_step_s": 0.1}) as run:
        outcome = cut_at(run, FAKE_CUTS[cuts])
        run.assert_finished()
    assert_equal(outcome, straight_fake, learner_lives=1 + sum("learner" in names for _, names in FAKE_CUTS[cuts]))


# ---- Megatron ----

LAYOUTS = {
    "one": (1, {}),
    "tensor": (2, {"learner.parallel.tensor": 2}),
    "pipeline": (2, {"learner.parallel.pipeline": 2}),
}
CUTS: Cuts = [
    (("saved", 2), ("learner",)),
    (("within", 4), EVERYTHING),  # 3 is committed, and its checkpoint is to come
    (("published", 5), ("learner",)),
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
        cut = cut_at(run, CUTS)
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
