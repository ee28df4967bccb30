"""``forebay up``: all roles on this machine as processes of their own: spawn, watch, ordered stop.

Children are tied to this process (PR_SET_PDEATHSIG): if it is killed, they get SIGTERM. They run in sessions of their own, so a
Ctrl-C reaches only this process, which then ends the run through the coordinator, and by signals only what is left after that.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import IO

from rich.console import Console
from rich.live import Live

from common.errors import ConfigError, ForebayError, PeerError
from common.lifecycle import die_with_parent
from protocol.client import ask
from protocol.messages import StopRequest
from services.config import Config, load_config, require_consistent
from services.tools import status as view

POLL_S = 0.5
START_TIMEOUT_S = 30.0
DONE = (0, 130, 143)  # it ended in order, by itself or because somebody told it to
NOT_RESTARTED = (2, 3, 6, 7, 9)  # an error that would come again (common/errors.py)
RUN_IS_OVER = (*NOT_RESTARTED, 5)  # of the coordinator: it has told everybody to leave


@dataclass
class Child:
    """One role's process; ``argv`` starts it again after a crash."""

    name: str
    argv: list[str]
    env: dict[str, str]
    log_path: Path
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    done: bool = False
    files: list[IO[bytes]] = field(default_factory=list)

    def start(self) -> None:
        """Spawn with its output appended to its log."""
        log_file = self.log_path.open("ab")
        self.files.append(log_file)
        self.process = subprocess.Popen(
            self.argv,
            env={**os.environ, **self.env},
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),  # this process has no threads when it spawns
        )

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self.process.poll() if self.process else None

    def signal_group(self, signum: int) -> None:
        """Signal the process and what it started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signum)

    def last_words(self) -> str:
        """The error paragraph of its log, or its last lines."""
        lines = self.log_path.read_text(errors="replace").splitlines() if self.log_path.exists() else []
        for index in range(len(lines) - 1, -1, -1):
            if lines[index].startswith("error: "):
                until_next_event = itertools.takewhile(lambda line: not line.startswith("{"), lines[index:])
                return "\n".join(until_next_event)[:2000].removeprefix("error: ")
        return "\n".join(lines[-15:])


class Stopped(Exception):
    """A signal asked for the end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def main(config_path: Path | None, resume: Path | None, overrides: list[str]) -> int:
    """Body of ``forebay up``.

    Raises:
        ForebayError: nothing could be started, or a role failed for good.
    """
    config, fresh = _prepare(config_path, resume, overrides)
    run_dir = config.run.run_dir.resolve()
    console = Console()
    console.print(
        f"[bold]{'Starting' if fresh else 'Resuming'} run {config.run.id}[/bold]; logs of every role in {run_dir / 'logs'}",
        soft_wrap=True,
    )
    fleet = Fleet(config, run_dir, console, [] if fresh else overrides)  # a fresh run's config has them already
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _raise_stopped)
    try:
        fleet.start(fresh)
        fleet.watch()
        code = 0
    except Stopped as stop:
        console.print(f"\nStopping in order (signal {stop.signum}); again to end at once.")
        fleet.stop_in_order()
        console.print(f"Stopped. Go on with: forebay up --resume {config.run.run_dir}")
        code = 128 + stop.signum
    finally:
        fleet.end_all()
    if (summary := _read_summary(run_dir)) is not None:
        fleet.show_news(summary | {"nodes": []})
        console.print()
        console.print(view.final_tables(summary, log_dir=str(run_dir / "logs")))
    return code


def _raise_stopped(signum: int, _frame: FrameType | None) -> None:
    signal.signal(signum, signal.SIG_DFL)  # a second one ends this process, and with it the children
    raise Stopped(signum)


def _prepare(config_path: Path | None, resume: Path | None, overrides: list[str]) -> tuple[Config, bool]:
    if (config_path is None) == (resume is None):
        raise ConfigError("forebay up takes a config file, or --resume with a run's folder.")
    if resume is not None:
        if not (resume / "config.json").is_file():
            raise ConfigError(f"{resume.resolve()} is not the folder of a run: it has no config.json.")
        if not os.access(resume, os.W_OK):
            raise ConfigError(f"The run's folder {resume.resolve()} can't be written here: mend its rights.")
        config = load_config(resume / "config.json", overrides)
        if (its_own := config.run.run_dir.resolve()) != resume.resolve():
            raise ConfigError(
                f"The config in {resume.resolve()} is of a run in {its_own}. Go to the folder in which it was started; if the run has "
                f"moved, say so: --set run.dir={resume.resolve().parent} (run.id must be the folder's name)."
            )
        require_consistent(config, str(resume / "config.json"))
        return config, False
    assert config_path is not None
    config = load_config(config_path, overrides)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    config = config.model_copy(update={"run": config.run.model_copy(update={"id": f"{config.run.id}-{stamp}"})})
    require_consistent(config, str(config_path))
    run_dir = config.run.run_dir
    try:
        run_dir.mkdir(parents=True)
        (run_dir / "config.json").write_text(config.model_dump_json(indent=1))
    except OSError as error:
        raise ConfigError(
            f"run.dir: {run_dir} can't be made: {error.strerror}. Choose another with --set run.dir=DIR."
        ) from None
    return config, True


def _read_summary(run_dir: Path) -> view.Status | None:
    path = run_dir / "summary.json"
    return json.loads(path.read_text()) if path.is_file() else None


def _how_it_failed(code: int | None) -> str:
    return f"no answer within {START_TIMEOUT_S:.0f} s" if code is None else _how_it_ended(code)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    killed = f"was killed by {signal.Signals(-code).name}"
    return (
        f"{killed} (if by nobody here, the machine may be out of memory: see dmesg)"
        if -code == signal.SIGKILL
        else killed
    )


class Fleet:
    """The children of one run. The coordinator is first in and last out."""

    def __init__(self, config: Config, run_dir: Path, console: Console, overrides: list[str]) -> None:
        self.config, self.run_dir, self.console = config, run_dir, console
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        self._overrides = overrides
        self._keys = config.run.read_keys()
        self._seen_nodes: set[str] = set()
        self._shown_step = 0
        self.coordinator = self._child("coordinator", "coordinator")
        self.others = [self._child("learner", "learner")] if config.up.learner_procs else []
        self.others += [self._child("rollout", f"rollout-{i}", i) for i in range(config.up.rollout_nodes)]
        self.others += [self._child("reward", f"reward-{i}") for i in range(config.up.reward_nodes)]

    def _child(self, role: str, name: str, index: int = 0) -> Child:
        up = self.config.up
        argv = [sys.executable, "-m", f"services.{role}", "--config", str(self.run_dir / "config.json")]
        argv += [word for override in self._overrides for word in ("--set", override)]
        argv += [] if role == "coordinator" else ["--node-id", name]
        env: dict[str, str] = {}
        if role == "learner" and up.learner_procs > 1:
            argv += ["--ranks", str(up.learner_procs)]
        if role == "learner" and up.learner_devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, up.learner_devices))
        if role == "rollout" and up.rollout_devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, up.rollout_devices[index]))
        return Child(name, argv, env, self.run_dir / "logs" / f"{name}.log")

    def start(self, fresh: bool) -> None:
        """The coordinator first; the others when it answers.

        Raises:
            ForebayError: the coordinator doesn't come up; a fresh run then leaves no folder behind.
        """
        self.coordinator.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            code = self.coordinator.returncode
            if code is not None or time.monotonic() > deadline:
                words = self.coordinator.last_words()
                self.end_all()
                if fresh:
                    shutil.rmtree(self.run_dir)
                raise (
                    ConfigError(words)
                    if code == 2
                    else ForebayError(f"The coordinator did not come up ({_how_it_failed(code)}). {words}")
                )
            try:
                status = view.fetch(self.config.run.address, self.config.run.id, keys=self._keys, timeout_s=0.5)
            except PeerError:
                continue
            if self.coordinator.process is not None and status.get("pid") == self.coordinator.process.pid:
                self._shown_step = status["version"]  # steps of an earlier life were shown then
                break
            time.sleep(POLL_S)  # the run is alive already; our coordinator ends and says so
        for child in self.others:
            child.start()
        self.console.print(
            f"Coordinator is up at {self.config.run.address}; loading models in {len(self.others)} processes."
        )

    def watch(self) -> None:
        """Show progress until the coordinator ends; restart what crashes.

        Raises:
            ForebayError: a role failed for good; the message has its last words.
        """
        rates = view.Rates()
        live = Live(console=self.console, refresh_per_second=4, transient=True) if self.console.is_terminal else None
        with live or contextlib.nullcontext():
            while True:
                self._restart_crashed()
                if self.coordinator.done:
                    break
                status = self._status()
                if status is not None:
                    self.show_news(status)
                    if live:
                        live.update(view.render(status, rates))
                time.sleep(POLL_S)
        self._await_exit([*self.others], self.config.up.stop_timeout_s)

    def show_news(self, status: view.Status) -> None:
        """A line for each node that joined and each step that was committed since the last look."""
        for node in status["nodes"]:
            if node["node_id"] not in self._seen_nodes:
                self._seen_nodes.add(node["node_id"])
                self.console.print(f"{node['node_id']} joined after {status['uptime_s']:.0f} s", highlight=False)
        for row in status["steps"]:
            if row["step"] > self._shown_step:
                self._shown_step = row["step"]
                self.console.print(view.step_line(row), soft_wrap=True, highlight=False)

    def _status(self) -> view.Status | None:
        try:
            return view.fetch(self.config.run.address, self.config.run.id, keys=self._keys, timeout_s=2.0)
        except PeerError:
            return None  # it is starting again or ending; ``watch`` sees which

    def _restart_crashed(self) -> None:
        for child in [self.coordinator, *self.others]:
            code = child.returncode
            if code is None or child.done:
                continue
            if code in DONE:
                child.done = True
            elif (
                code in (RUN_IS_OVER if child is self.coordinator else NOT_RESTARTED)
                or child.restarts >= self.config.up.max_restarts
            ):
                error = ForebayError(
                    f"{child.name} {_how_it_ended(code)}: {child.last_words()}\n"
                    f"All that is known of the run, in one archive: forebay postmortem {self.run_dir}"
                )
                error.exit_code = max(1, code)
                raise error
            else:
                child.restarts += 1
                self.console.print(
                    f"[yellow]{child.name} {_how_it_ended(code)}; starting it again ({child.restarts}).[/yellow]"
                )
                child.signal_group(signal.SIGKILL)  # what it may have left in its session
                child.start()

    def stop_in_order(self) -> None:
        """Ask the coordinator to end the run, which tells every node; then wait."""
        with contextlib.suppress(PeerError):  # it isn't there: ``end_all`` does the rest
            ask(
                self.config.run.address,
                self.config.run.id,
                StopRequest(reason="forebay up was interrupted"),
                timeout_s=2.0,
                keys=self._keys,
            )
        self._await_exit([*self.others, self.coordinator], self.config.up.stop_timeout_s)

    def _await_exit(self, children: list[Child], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(c.process and c.returncode is None for c in children):
            time.sleep(0.05)

    def end_all(self) -> None:
        """SIGTERM, 3 s, SIGKILL to whatever is left."""
        children = [*self.others, self.coordinator]
        for signum, patience_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 2.0)):
            left = [child for child in children if child.process and child.returncode is None]
            for child in left:
                child.signal_group(signum)
            self._await_exit(left, patience_s)
        for child in children:
            child.signal_group(signal.SIGKILL)  # what a dead leader may have left in its session
            for log_file in child.files:
                log_file.close()
