"""Kills of real vLLM and real Megatron processes, in short runs of the quickstart's model. Minutes each, most of it loading."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.faults.case import Case, NotRun, Scene
from tests.faults.processes import ROOT, Role, assert_gone, command_of, descendants

QUICKSTART = ROOT / "deploy" / "quickstart"
REAL: dict[str, Any] = {
    "run.model": str(QUICKSTART / "model"),
    "run.max_prompt_tokens": 96,
    "run.max_completion_tokens": 72,
    "run.join_timeout_s": 240.0,
    "run.weight_update_timeout_s": 120.0,
    "coordinator.tasks": str(QUICKSTART / "tasks_train.jsonl"),
    "coordinator.group_size": 4,
    "coordinator.groups_per_step": 4,
    "coordinator.max_staleness": 1,
    "coordinator.max_steps": 5,
    "coordinator.heartbeat_interval_s": 1.0,
    "coordinator.node_timeout_s": 10.0,
    "coordinator.generate_timeout_s": 120.0,
    "coordinator.score_timeout_s": 60.0,
    "coordinator.no_progress_timeout_s": 300.0,
    "rollout": {"engine": "vllm", "dtype": "float32", "num_threads": 1},
    "learner": {"num_threads": 1, "checkpoint_interval_steps": 2},
}
START_S = 240.0


class Leftovers:
    """Shared memory and sockets of this machine that nobody has open, and that were not there at the start.

    Not counted: multiprocessing's semaphores (32 bytes each, removed by a tracker of Python's own), and what is in the folder of a
    node that lives, which goes with it.
    """

    def __init__(self) -> None:
        self._before = self._all()

    @staticmethod
    def _all() -> set[Path]:
        root = Path(tempfile.gettempdir())
        sockets = {path for path in (*root.glob("*"), *root.glob("forebay-vllm-*/*")) if path.is_socket()}
        segments = {path for path in Path("/dev/shm").glob("*") if path.is_file() and not path.name.startswith("sem.")}
        return segments | sockets

    def found(self) -> set[Path]:
        """Those that are left now."""
        unheld = self._all() - self._before
        held = _held_open()
        left = {path for path in unheld if str(path) not in held and str(path.parent / "lock") not in held}
        return left & self._all()  # what others of this machine removed meanwhile was in use


def _held_open() -> set[str]:
    """Files and sockets that live processes have open or mapped."""
    held = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            held |= {line.split()[-1] for line in (entry / "maps").read_text().splitlines() if "/" in line}
            for descriptor in (entry / "fd").iterdir():
                with contextlib.suppress(OSError):
                    held.add(os.readlink(descriptor))
    return held


def _needs_model() -> None:
    for module in ("vllm", "megatron.core"):
        import importlib.util

        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise NotRun(f"{module} is not installed")
    if not (QUICKSTART / "model" / "config.json").is_file():
        raise NotRun(f"no model in {QUICKSTART / 'model'}: make setup makes it")


def _start(scene: Scene, *, ranks: int = 1) -> dict[str, Role]:
    _needs_model()
    roles = scene.run.start_all_but("learner")
    scene.run.wait_until(lambda s: {"a", "judge"} <= {node["node_id"] for node in s["nodes"]}, START_S)
    scene.run.hold_commits(after=1)
    roles["learner"] = _learner(scene, ranks)
    scene.run.wait_for_step(1, START_S)
    return roles


def _learner(scene: Scene, ranks: int) -> Role:
    words = ["--config", str(scene.run.config_path), "--node-id", "learner", "--ranks", str(ranks)]
    return scene.run.spawn("learner", [sys.executable, "-m", "services.learner", *words])


def _finish(scene: Scene, roles: dict[str, Role]) -> None:
    scene.run.assert_all_exit(*roles.values(), timeout_s=START_S)
    assert (scene.run.run_dir / "export" / "config.json").is_file(), "no export"


def _engine_dies(scene: Scene) -> None:
    """The whole rollout process: its engine's processes go with it, and when its successor is in, nothing of theirs is left."""
    leftovers = Leftovers()
    roles = _start(scene)
    children = descendants(roles["a"].pid)
    assert children, "vLLM runs in processes of its own"
    scene.kill_at(roles["a"], "sample_result", after_step=1)
    assert_gone(children, within_s=60)
    roles["a"] = scene.run.again(roles["a"])
    scene.run.wait_until(lambda s: roles["a"].pid in {node["pid"] for node in s["nodes"]}, START_S)
    assert not (left := leftovers.found()), f"left behind: {left}"
    _finish(scene, roles)


def _engine_core_dies(scene: Scene) -> None:
    """The engine's process below the rollout node: the node ends with an error, and its successor goes on."""
    roles = _start(scene)
    cores = [pid for pid in descendants(roles["a"].pid) if "EngineCore" in command_of(pid)]
    assert cores, "no engine core below the rollout node"
    with scene.run.held_at(1):
        rule = scene.proxy.when("sample_result", lambda _: [os.kill(pid, 9) for pid in cores])
    scene.inject(rule.wait())
    code = roles["a"].exit_code()
    scene.detect()
    assert code == 1, f"the node ended with {code}"
    assert "engine process died" in roles["a"].error(), f"the node said: {roles['a'].error()[:500]}"
    roles["a"] = scene.run.again(roles["a"])
    _finish(scene, roles)


def _learner_dies(scene: Scene) -> None:
    """In the optimizer step, 0.1 s after the batch came."""
    roles = _start(scene)
    killer = threading.Timer(0.1, roles["learner"].process.kill)
    with scene.run.held_at(1):
        rule = scene.proxy.when("batch", lambda _: killer.start())
    scene.inject(rule.wait())
    roles["learner"].exit_code()
    roles["learner"] = _learner(scene, 1)
    _finish(scene, roles)


def _rank_dies(scene: Scene) -> None:
    """One rank of two: its world ends, with the code of the kill, and a new one trains the batch."""
    roles = _start(scene, ranks=2)
    ranks = sorted(pid for pid in descendants(roles["learner"].pid) if "services.learner" in command_of(pid))
    assert len(ranks) == 2, "not two ranks below the learner"
    killer = threading.Timer(0.1, os.kill, (ranks[-1], 9))
    with scene.run.held_at(1):
        rule = scene.proxy.when("batch", lambda _: killer.start())
    scene.inject(rule.wait())
    code = roles["learner"].exit_code()
    scene.detect(time.time())
    assert code == 128 + 9, f"the world ended with {code}"
    assert_gone(ranks, within_s=60)
    roles["learner"] = _learner(scene, 2)
    _finish(scene, roles)


CASES = [
    Case("real-kill-vllm", "generate", "kill -9 of a rollout node with real vLLM while it generates", _engine_dies, (54,), REAL, real=True, slow=True),
    Case("real-kill-engine-core", "generate", "kill -9 of vLLM's engine process below the node", _engine_core_dies, (54,), REAL, real=True, slow=True),
    Case("real-kill-learner", "train", "kill -9 of a Megatron learner within its step", _learner_dies, (30, 54), REAL, real=True, slow=True),
    Case("real-kill-rank", "train", "kill -9 of one of two Megatron ranks within their step", _rank_dies, (30, 54), REAL, real=True, slow=True),
]  # fmt: skip
