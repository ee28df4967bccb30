"""One run in a folder: its config, its roles as processes of their own, and what must be true when it has ended.

``Run`` is the one way to start and judge a run of fakes: for the fault suite, the soak, the recovery benchmark and the tests.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import PeerError
from protocol.client import ask
from protocol.messages import StopRequest
from services.tools import status as view
from tests.faults import evidence
from tests.faults.processes import Role, free_port
from tests.faults.proxy import Proxy, Rule, body_of

LUCKY = "```python\ndef f(x):\n    return x + ({sample}) % 2\n```"  # right every other time: one group, both rewards
SAME = "```python\ndef f(x):\n    return x\n```"
Status = dict[str, Any]
EVERYTHING = 1_000_000  # steps whose samples the journal keeps, so that the evidence is complete


def task_line(name: str, prompt: str = "Write f(x) that returns x.", *, code: str = "assert f(3) == 3") -> str:
    """One line of a task file; ``code`` is its tests."""
    suite = {"kind": "asserts", "entry_point": "f", "code": code}
    return json.dumps({"task_id": name, "prompt": prompt, "tests": suite}) + "\n"


def task_lines(count: int) -> str:
    """A task file of ordinary tasks."""
    return "".join(task_line(f"t{index}") for index in range(count))


def base_config(folder: Path, address: str) -> dict[str, Any]:
    """A run that takes seconds: fake engine and policy, short timeouts."""
    coordinator = {
        "tasks": str(folder / "tasks.jsonl"),
        "group_size": 2,
        "groups_per_step": 2,
        "max_steps": 5,
        "max_staleness": 2,
        "bypass_window": 2,
        "heartbeat_interval_s": 0.2,
        "node_timeout_s": 3,
        "generate_timeout_s": 20,
        "score_timeout_s": 20,
        "no_progress_timeout_s": 60,
        "keep_trained_steps": EVERYTHING,
    }
    return {
        "run": {
            "id": "loop",
            "dir": str(folder / "runs"),
            "model": str(folder / "no-model"),
            "address": address,
            "max_prompt_tokens": 64,
            "max_completion_tokens": 64,
            "join_timeout_s": 30,
            "weight_update_timeout_s": 60,
        },
        "coordinator": coordinator,
        "rollout": {"engine": "fake", "max_concurrent_groups": 4, "fake": {"completion": LUCKY, "num_tokens": 8}},
        "reward": {"workers": 1},
        "learner": {"policy": "fake", "fake_step_s": 0.05, "checkpoint_interval_steps": 2},
        "up": {"rollout_nodes": 1, "reward_nodes": 1, "stop_timeout_s": 8},
    }


class Run:
    """``Run(folder, {"coordinator.max_steps": 4})``; use as a context, which ends whatever is left.

    With ``proxied`` the nodes reach the coordinator through ``proxy``; ``address`` is always the coordinator's own. With ``warm`` the
    roles are forked from a process that has imported their modules.
    """

    def __init__(
        self,
        folder: Path,
        changes: Mapping[str, Any] | None = None,
        *,
        tasks: str | None = None,
        proxied: bool = False,
        seed: int = 0,
        warm: bool = False,
    ) -> None:
        self.folder, self.warm = folder, warm
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.proxy = Proxy(self.address, seed=seed) if proxied else None
        (folder / "tasks.jsonl").write_text(tasks or task_lines(20))
        config = base_config(folder, self.proxy.address if self.proxy else self.address)
        if proxied:
            config["coordinator"]["bind"] = self.address
        for key, value in (changes or {}).items():
            *path, last = key.split(".")
            table: Any = config
            for part in path:
                table = table.setdefault(part, {})
            table[last] = value
        if config["rollout"]["engine"] != "fake":
            config["rollout"].pop("fake", None)
        self.config = config
        self.config_path = folder / "config.json"
        self.config_path.write_text(json.dumps(config))
        self.run_dir = folder / "runs" / config["run"]["id"]
        self.roles: list[Role] = []
        self._holds: dict[int, Rule] = {}  # by the step after which they hold
        self.env: dict[str, str] = {}  # of the roles started from now on
        self.prefix: list[str] = []  # before the command of the roles started from now on

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for role in self.roles:
            role.reap()
        if self.proxy is not None:
            self.proxy.close()

    # ---- processes ----

    def start(self, role: str, name: str = "", *, overrides: Sequence[str] = ()) -> Role:
        """``python -m services.ROLE``."""
        name = name or role
        argv = [sys.executable, "-m", f"services.{role}", "--config", str(self.config_path), "--node-id", name]
        return self.spawn(name, [*argv, *(word for text in overrides for word in ("--set", text))])

    def start_all(self, *nodes: str) -> dict[str, Role]:
        """Coordinator, a reward node ``judge``, rollout nodes ``nodes`` (``a``), and the learner; if there are several of a
        kind, only when all nodes are in, so that the run does not end without one."""
        early = [role.name for role in self.roles if {"services.rollout", "services.reward"} & set(role.argv)]
        nodes = nodes or ("a",)
        roles = {"coordinator": self.start("coordinator"), "judge": self.start("reward", "judge")}
        roles |= {name: self.start("rollout", name) for name in nodes}
        if len(nodes) > 1 or early:
            self.wait_for_nodes(*early, *nodes, "judge")
        return roles | {"learner": self.start("learner")}

    def start_all_but(self, *names: str) -> dict[str, Role]:
        """As ``start_all``, without those of these names."""
        fleet = {"coordinator": "coordinator", "judge": "reward", "a": "rollout", "learner": "learner"}
        return {name: self.start(role, name) for name, role in fleet.items() if name not in names}

    def forebay(self, *words: str) -> Role:
        """The ``forebay`` command."""
        return self.spawn("forebay-" + words[0], [sys.executable, "-m", "services.cli", *words])

    def spawn(self, name: str, argv: list[str]) -> Role:
        """Any process of the run."""
        role = Role(name, [*self.prefix, *argv], self.folder / f"{name}.log", env=self.env, warm=self._is_warm)
        self.roles.append(role)
        return role

    def again(self, role: Role) -> Role:
        """Start what has ended once more, with the same command."""
        return self.again_with(role)

    def again_with(self, role: Role, *overrides: str) -> Role:
        """Likewise, with more ``--set`` at the end, which win."""
        argv = [*role.argv, *(word for text in overrides for word in ("--set", text))]
        fresh = Role(role.name, argv, role.log, env=self.env, warm=self._is_warm)
        self.roles.append(fresh)
        return fresh

    @property
    def _is_warm(self) -> bool:
        """An environment is for an interpreter that starts, a prefix for a command."""
        return self.warm and not self.env and not self.prefix

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

    def now(self) -> Status:
        """The coordinator's status, however long it takes to answer."""
        return self.wait_until(lambda _: True)

    def wait_until(self, is_so: Callable[[Status], bool], timeout_s: float = 120) -> Status:
        """Poll the status.

        Raises:
            AssertionError: it never was so, and the time is over or every process of the run has ended; with all logs.
        """
        deadline = time.monotonic() + timeout_s
        last = None
        while time.monotonic() < deadline:
            over = all(role.process.poll() is not None for role in self.roles)  # then nobody will answer any more
            status = self.status()
            if status is not None and is_so(status):
                return status
            last = status or last
            if over:
                raise AssertionError(f"never so, and the run is over; last status: {last}\n{self.logs()}")
            time.sleep(0.05)
        raise AssertionError(f"never so within {timeout_s} s; last status: {last}\n{self.logs()}")

    def wait_for_step(self, step: int, timeout_s: float = 120) -> Status:
        """Until ``step`` is committed."""
        return self.wait_until(lambda status: status["version"] >= step, timeout_s)

    @contextlib.contextmanager
    def held_at(self, step: int, timeout_s: float = 120) -> Iterator[None]:
        """Inside, ``step`` steps are committed and the next one can't be: its commit is held on its way, by the ``hold_commits`` that
        was called before the run could get so far. So what the block prepares is there in time, however slow this process is and however
        fast the run."""
        assert self.proxy is not None
        assert step in self._holds, f"no hold_commits(after={step}) before the run could be beyond it"
        rule = self._holds.pop(step)
        try:
            self.wait_for_step(step, timeout_s)
            yield
        finally:
            self.proxy.release(rule)

    def hold_commits(self, *, after: int) -> Rule:
        """No step after this one is committed until ``proxy.release`` of what this returns, or the end of ``held_at`` that step."""
        assert self.proxy is not None, "a run that is to be held is proxied"
        self._holds[after] = self.proxy.add(
            "hold", "step_committed", count=None, where=lambda seen: body_of(seen)["step"] > after
        )
        return self._holds[after]

    def wait_for_nodes(self, *names: str) -> Status:
        """Until all of them are in the run."""
        return self.wait_until(lambda s: set(names) <= {node["node_id"] for node in s["nodes"]})

    @property
    def journal(self) -> Path:
        """Its file."""
        return self.run_dir / "journal.sqlite"

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows of the journal, beside whoever writes it."""
        with contextlib.closing(sqlite3.connect(f"file:{self.journal}?mode=ro", uri=True, timeout=60)) as db:
            return db.execute(sql).fetchall()

    def commits(self) -> list[float]:
        """When each step was committed, in seconds since the epoch."""
        if not self.journal.exists():
            return []
        return [
            at for (at,) in self.query("SELECT committed_at FROM steps WHERE committed_at IS NOT NULL ORDER BY step")
        ]

    # ---- what must be true ----

    def assert_all_exit(self, *roles: Role, code: int = 0, timeout_s: float = 120) -> None:
        """Each ends, with ``code``."""
        codes = {role.name: role.exit_code(timeout_s) for role in roles}
        assert set(codes.values()) == {code}, f"{codes}\n{self.logs()}"

    def verdict(self, *, finished: bool = False) -> evidence.Verdict:
        """Every account compared; of a run whose coordinator has ended."""
        coordinator = self.config["coordinator"]
        seen = self.proxy.seen if self.proxy else []
        books = evidence.read_books(self.journal)
        verdict = evidence.judge(
            books,
            seen,
            max_staleness=coordinator["max_staleness"],
            bypass_window=coordinator["bypass_window"],
            finished=finished,
        )
        weight, step = self._trained_weight()
        if weight is not None and books.is_complete and weight != self.weight_from_journal(step):
            verdict.problems.append(f"the weights after step {step} do not follow from the journal's batches")
        return verdict

    def _trained_weight(self) -> tuple[float | None, int]:
        """The exported weight, or else the last checkpoint's, and the step it is of."""
        exported = self.run_dir / "export" / "fake.json"
        if exported.is_file():
            return json.loads(exported.read_text())["weight"], len(self.commits())
        saved = sorted((self.run_dir / "checkpoints").glob("step-*/fake.json"))
        if not saved:
            return None, 0
        last = json.loads(saved[-1].read_text())
        return last["weight"], last["step"]

    def weight_from_journal(self, steps: int) -> float:
        """See ``evidence.weight_from_journal``."""
        return evidence.weight_from_journal(self.journal, run_id=self.config["run"]["id"], steps=steps)

    def assert_finished(self, steps: int | None = None) -> Status:
        """The run did all its steps (``steps``, if the data ended), and every account agrees."""
        summary = self.summary()
        assert summary["state"] == "finished", f"{summary['end_reason']}\n{self.logs()}"
        assert summary["version"] == (self.config["coordinator"]["max_steps"] if steps is None else steps)
        assert (self.run_dir / "export" / "fake.json").is_file()
        self._assert_accounts_agree(finished=steps is None)
        return summary

    def assert_stopped(self) -> Status:
        """The run was stopped in order: the same up to the step that it had reached."""
        summary = self.summary()
        assert summary["state"] == "stopped", f"{summary['end_reason']}\n{self.logs()}"
        checkpoint = self.run_dir / "checkpoints" / f"step-{summary['version']:08d}" / "fake.json"
        assert checkpoint.is_file()
        self._assert_accounts_agree(finished=False)
        return summary

    def _assert_accounts_agree(self, *, finished: bool) -> None:
        verdict = self.verdict(finished=finished)
        assert not verdict.problems, "\n".join(verdict.problems)

    def summary(self) -> Status:
        """What the coordinator left of its state; its ledger closes."""
        summary: Status = json.loads((self.run_dir / "summary.json").read_text())
        assert not (gap := evidence.closes(summary)), gap
        return summary

    def stop(self) -> Role:
        """``forebay stop``."""
        return self.forebay("stop", "--address", self.address)

    def stop_now(self) -> None:
        """The same without the start of an interpreter, where the moment counts."""
        ask(self.address, "", StopRequest(reason="forebay stop"), timeout_s=60)

    def signal_all(self, signum: int = signal.SIGKILL) -> None:
        """To every process of the run at once, as a power cut would."""
        for role in self.roles:
            if role.process.poll() is None:
                role.signal(signum)
