"""Processes that a fault run starts, and what can be seen of any process from outside."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from common.net import outgoing_ports
from tests.faults.warm import WarmProcess, nursery

_ROLES = {"services.coordinator", "services.rollout", "services.reward", "services.learner"}
ROOT = Path(__file__).resolve().parents[2]
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # prctl(2)


def free_port() -> int:
    """A TCP port of loopback for a service that is yet to start: nobody listens on it, the kernel gives it to no outgoing
    connection, and no other caller of this function gets it while this process lives.

    Raises:
        RuntimeError: there is none.
    """
    outgoing = outgoing_ports()
    some = [port for port in range(10_000, 65_536) if port not in outgoing] or list(outgoing)
    random.SystemRandom().shuffle(some)
    for port in some:
        with socket.socket() as probe, socket.socket(socket.AF_UNIX) as lock, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ: closed connections don't count
            probe.bind(("127.0.0.1", port))
            lock.bind(f"\0forebay-port-{port}")  # an abstract name (unix(7)), in the same network namespace as the port
            lock.detach()  # open until this process ends
            return port
    raise RuntimeError("no TCP port of loopback is free")


def _die_with_the_suite() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Role:
    """A process of a run, in a session of its own. Its stdout and stderr are appended to ``log``."""

    def __init__(
        self, name: str, argv: list[str], log: Path, *, env: Mapping[str, str] | None = None, warm: bool = False
    ) -> None:
        """``warm``: forked from a process that has the imports already, where ``argv`` is that of a role (see ``warm.py``)."""
        self.name, self.log, self.argv = name, log, argv
        log.touch()  # whoever looks early finds it empty
        self._log_start = log.stat().st_size
        self.process: subprocess.Popen[bytes] | WarmProcess
        if warm and argv[1] == "-m" and argv[2] in _ROLES:
            self.process = nursery().start(argv, str(log), env or {})
            return
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                argv,
                cwd=ROOT,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=_die_with_the_suite,  # one call of an already loaded function: safe beside the proxy's thread
            )

    @property
    def pid(self) -> int:
        """Of the process itself."""
        return self.process.pid

    def signal(self, signum: int) -> None:
        """To the process alone, as a user or the kernel would."""
        self.process.send_signal(signum)

    def kill(self) -> None:
        """``kill -9`` of the process alone, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def exit_code(self, timeout_s: float = 120) -> int:
        """Wait for the end.

        Raises:
            AssertionError: it goes on.
        """
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} goes on after {timeout_s} s\n{self.tail()}") from None

    def output(self) -> str:
        """All that this process has written."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """What this process has logged under ``name``."""
        return [event for event in events_in(self.output()) if event["event"] == name]

    def error(self) -> str:
        """The paragraph that it ended with, or ''."""
        return ("\n" + self.output()).partition("\nerror: ")[2]

    def tail(self) -> str:
        """The end of its log, for a failed assertion."""
        return f"--- {self.log.name}\n" + self.log.read_text(errors="replace")[-3000:]

    def reap(self) -> None:
        """End it and all that is left of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def events_in(text: str) -> list[dict[str, Any]]:
    """The events among the lines of a role's output."""
    events = []
    for line in text.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):  # the last line of a process that was killed while it wrote
                event = json.loads(line)
                if "event" in event:
                    events.append(event)
    return events


def seconds(event: Mapping[str, Any]) -> float:
    """When it was logged, in seconds since the epoch."""
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def processes_of(folder: Path) -> list[tuple[int, str]]:
    """Live processes (pid, command line) that have ``folder`` on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(folder) in command and is_alive(int(entry.name)):
                    found.append((int(entry.name), command))
    return found


def assert_none_of(folder: Path, *, within_s: float) -> None:
    """
    Raises:
        AssertionError: processes that have ``folder`` on their command line are alive after ``within_s``.
    """
    deadline = time.monotonic() + within_s
    while (alive := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive, f"still there after {within_s} s: {alive}"


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


def command_of(pid: int) -> str:
    """The command line of ``pid`` and its name, which it may have changed; empty when it is gone."""
    with contextlib.suppress(OSError):
        parts = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "comm"))
        return b"".join(parts).decode(errors="replace")
    return ""


def is_alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_gone(pids: Iterable[int], *, within_s: float) -> None:
    """
    Raises:
        AssertionError: some of ``pids`` are alive after ``within_s``.
    """
    pids = set(pids)
    deadline = time.monotonic() + within_s
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive, f"still there after {within_s} s: {alive}"
