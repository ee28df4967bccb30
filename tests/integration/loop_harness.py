"""One run in a test's folder: its config, its roles as processes of their own, and what must be true when it has ended."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import PeerError
from services import view
from services.coordinator.batches import make_batch
from services.coordinator.journal import Journal
from services.learner.config import ObjectiveConfig
from services.learner.fake_policy import FakePolicy
from services.learner.service import to_train_samples

ROOT = Path(__file__).resolve().parents[2]
LUCKY = "```python\ndef f(x):\n    return x + ({sample}) % 2\n```"  # right every other time: one group, both rewards
SAME = "```python\ndef f(x):\n    return x\n```"
Status = dict[str, Any]


def free_port() -> int:
    """A TCP port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def task_line(name: str, prompt: str = "Write f(x) that returns x.") -> str:
    """One line of a task file."""
    suite = {"kind": "asserts", "entry_point": "f", "code": "assert f(3) == 3"}
    return json.dumps({"task_id": name, "prompt": prompt, "tests": suite}) + "\n"


def _die_with_the_tests() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG, prctl(2)


class Role:
    """A process of a run. Its stdout and stderr are in ``log``."""

    def __init__(self, name: str, argv: list[str], log: Path) -> None:
        self.name, self.log = name, log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                argv,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=_die_with_the_tests,
            )

    def signal(self, signum: int) -> None:
        """To the process alone, as a user or the kernel would."""
        self.process.send_signal(signum)

    def exit_code(self, timeout_s: float = 60) -> int:
        """Wait for the end.

        Raises:
            AssertionError: it goes on.
        """
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} goes on after {timeout_s} s\n{self.tail()}") from None

    def events(self, name: str) -> list[dict[str, Any]]:
        """What it has logged under ``name``."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith("{")]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def tail(self) -> str:
        """The end of its log, for a failed assertion."""
        return f"--- {self.log.name}\n" + self.log.read_text(errors="replace")[-3000:]

    def reap(self) -> None:
        """End it and all that is left of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Run:
    """``Run(tmp_path, {"coordinator.max_steps": 4})``; use as a context, which ends whatever is left."""

    def __init__(self, folder: Path, changes: dict[str, Any] | None = None, *, tasks: str | None = None) -> None:
        self.folder = folder
        self.address = f"tcp://127.0.0.1:{free_port()}"
        (folder / "tasks.jsonl").write_text(tasks or "".join(task_line(f"t{i}") for i in range(20)))
        config = {
            "run": {
                "id": "loop",
                "dir": str(folder / "runs"),
                "model": str(folder / "no-model"),
                "address": self.address,
                "max_prompt_tokens": 64,
                "max_completion_tokens": 64,
                "join_timeout_s": 30,
                "sync_timeout_s": 30,
            },
            "coordinator": {
                "tasks": str(folder / "tasks.jsonl"),
                "group_size": 2,
                "groups_per_step": 2,
                "max_steps": 5,
                "max_staleness": 2,
                "bypass_window": 2,
                "keep_trained_steps": 1000,  # for ``weight_from_journal``
                "heartbeat_interval_s": 0.2,
                "node_timeout_s": 3,
                "generate_timeout_s": 20,
                "score_timeout_s": 20,
                "no_progress_timeout_s": 60,
            },
            "rollout": {"engine": "fake", "max_concurrent_groups": 4, "fake": {"completion": LUCKY, "num_tokens": 8}},
            "reward": {"workers": 1},
            "learner": {"policy": "fake", "fake_step_s": 0.05, "checkpoint_interval_steps": 2},
            "up": {"rollout_nodes": 1, "reward_nodes": 1, "stop_timeout_s": 8},
        }
        for key, value in (changes or {}).items():
            *path, last = key.split(".")
            table: Any = config
            for part in path:
                table = table.setdefault(part, {})
            table[last] = value
        self.config = config
        self.config_path = folder / "config.json"
        self.config_path.write_text(json.dumps(config))
        self.run_dir = folder / "runs" / config["run"]["id"]
        self.roles: list[Role] = []

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for role in self.roles:
            role.reap()

    # ---- processes ----

    def start(self, role: str, name: str = "", *, overrides: tuple[str, ...] = ()) -> Role:
        """``python -m services.ROLE``."""
        name = name or role
        argv = [sys.executable, "-m", f"services.{role}", "--config", str(self.config_path), "--node-id", name]
        return self._spawn(name, [*argv, *(word for text in overrides for word in ("--set", text))])

    def start_all(self, *nodes: str) -> dict[str, Role]:
        """Coordinator, a reward node ``judge``, rollout nodes ``nodes`` (``a``), and the learner; if there are several of a
        kind, only when all nodes are in, so that the run does not end without one."""
        early = [role.name for role in self.roles]
        nodes = nodes or ("a",)
        roles = {"coordinator": self.start("coordinator"), "judge": self.start("reward", "judge")}
        roles |= {name: self.start("rollout", name) for name in nodes}
        if len(nodes) > 1 or early:
            self.wait_until(lambda s: {*early, *nodes, "judge"} <= {node["node_id"] for node in s["nodes"]})
        return roles | {"learner": self.start("learner")}

    def forebay(self, *words: str) -> Role:
        """The ``forebay`` command."""
        return self._spawn("forebay-" + words[0], [sys.executable, "-m", "services.cli", *words])

    def _spawn(self, name: str, argv: list[str]) -> Role:
        role = Role(name, argv, self.folder / f"{name}.log")
        self.roles.append(role)
        return role

    def logs(self) -> str:
        """The end of every role's log."""
        return "\n".join({role.log: role.tail() for role in self.roles}.values())

    # ---- looking ----

    def status(self) -> Status | None:
        """The coordinator's status; None while it does not answer."""
        try:
            return view.fetch(self.address, timeout_s=1.0)
        except PeerError:
            return None

    def wait_until(self, is_so: Callable[[Status], bool], timeout_s: float = 60) -> Status:
        """Poll the status.

        Raises:
            AssertionError: it never was so; with all logs.
        """
        deadline = time.monotonic() + timeout_s
        status = None
        while time.monotonic() < deadline:
            status = self.status()
            if status is not None and is_so(status):
                return status
            time.sleep(0.05)
        raise AssertionError(f"never so within {timeout_s} s; last status: {status}\n{self.logs()}")

    def wait_for_step(self, step: int) -> Status:
        """Until ``step`` is committed."""
        return self.wait_until(lambda status: status["version"] >= step)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows of the journal of a run that has ended."""
        with contextlib.closing(sqlite3.connect(self.run_dir / "journal.sqlite")) as db:
            return db.execute(sql).fetchall()

    # ---- what must be true ----

    def assert_all_exit(self, *roles: Role, code: int = 0) -> None:
        """Each ends, with ``code``."""
        codes = {role.name: role.exit_code() for role in roles}
        assert set(codes.values()) == {code}, f"{codes}\n{self.logs()}"

    def assert_finished(self, steps: int | None = None) -> Status:
        """The run did all its steps, lost nothing, trained each group once, and its weight follows from its journal."""
        steps = self.config["coordinator"]["max_steps"] if steps is None else steps
        summary = self.summary()
        assert summary["state"] == "finished", f"{summary['end_reason']}\n{self.logs()}"
        assert summary["version"] == steps
        self._assert_trained_once(steps)
        exported = json.loads((self.run_dir / "export" / "fake.json").read_text())["weight"]
        assert exported == self.weight_from_journal(steps), "the learner trained something else than the journal has"
        return summary

    def assert_stopped(self) -> Status:
        """The run was stopped in order: the same up to the step that it had reached."""
        summary = self.summary()
        assert summary["state"] == "stopped", f"{summary['end_reason']}\n{self.logs()}"
        self._assert_trained_once(summary["version"])
        checkpoint = self.run_dir / "checkpoints" / f"step-{summary['version']:08d}" / "fake.json"
        assert json.loads(checkpoint.read_text())["weight"] == self.weight_from_journal(summary["version"])
        return summary

    def summary(self) -> Status:
        """What the coordinator left of its state; its ledger closes."""
        summary: Status = json.loads((self.run_dir / "summary.json").read_text())
        assert_closes(summary)
        return summary

    def _assert_trained_once(self, steps: int) -> None:
        rows = self.query("SELECT step, group_ids FROM steps WHERE committed_at IS NOT NULL ORDER BY step")
        assert [step for step, _ in rows] == list(range(1, steps + 1))
        trained = [group_id for _, group_ids in rows for group_id in json.loads(group_ids)]
        assert len(trained) == len(set(trained)) > (steps - 1) * self.config["coordinator"]["groups_per_step"]
        assert sorted(trained) == [row[0] for row in self.query("SELECT group_id FROM groups WHERE status = 'trained'")]

    def weight_from_journal(self, steps: int) -> float:
        """What a policy weighs that is trained on the journal's batches, each once and in order."""
        journal = Journal(self.run_dir / "journal.sqlite", run_id=self.config["run"]["id"])
        try:
            policy = FakePolicy(step_s=0)
            for step in range(1, steps + 1):
                batch, arrays = make_batch(step, journal.batch(step), replay=True)
                samples = to_train_samples(batch, arrays, ObjectiveConfig())
                if samples:
                    policy.train_step(samples, total_steps_done=step - 1)
            return policy.weight
        finally:
            journal.close()


def assert_closes(status: Status) -> None:
    """Tokens and groups are all accounted for."""
    ledger = status["ledger"]
    parts = ("trained", "buffered", "in_flight", "filtered", "failed", "duplicate", "lost")
    assert ledger["generated"] == sum(ledger[part] for part in parts), ledger
    live = sum(status["groups"].values())
    ended = sum(ledger[f"groups_{what}"] for what in ("trained", "filtered", "failed"))
    assert ledger["groups_admitted"] == ended + live, ledger


def processes_of(folder: Path) -> list[tuple[int, str]]:
    """Live processes (pid, command line) that have ``folder`` on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(folder) in command and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append((int(entry.name), command))
    return found


def descendants(pid: int) -> set[int]:
    """All processes under ``pid``."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def is_alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
