"""The control socket of a worker, on the judge's side: orders out, reports in. The other side, and the form of both, is in ``worker.py``."""

from __future__ import annotations

import select
import socket
from dataclasses import dataclass, field
from typing import Literal

from protocol.suites import Limits

Level = Literal["namespaces", "landlock", "none"]
Role = Literal["program", "native", "compile", "functions", "tests", "readability"]
Filter = Literal["guest", "processes", "native", "compile"]

SILENCE_S = 30.0  # a worker that is silent for this long after ten times a run's wall limit counts as dead
_MIB = 1 << 20


class WorkerDied(Exception):
    """The worker failed, not the guest: the run has no outcome."""


class CannotStart(WorkerDied):
    """There is no worker: none can be started here, or none at the moment."""


class Ended(Exception):
    """The guest is gone or was stopped; ``Guest.finish`` has the report."""


@dataclass(frozen=True)
class Order:
    """One run: which role, under which filter and limits."""

    role: Role
    filter: Filter
    limits: Limits
    # Much more address space than is used (node): what can be written to is limited instead.
    reserves_memory: bool = False

    def line(self) -> bytes:
        """For the worker."""
        limits = self.limits
        memory = (-1 if self.reserves_memory else 1) * limits.memory_mib * _MIB
        return (
            f"{self.role} {self.filter} {limits.cpu_s} {limits.wall_limit_s} {memory} {limits.stack_mib * _MIB} {limits.processes}"
        ).encode()


@dataclass(frozen=True)
class Report:
    """What a worker says of a run. ``killed``: by which limit (``cpu``, ``wall``, ``memory``, ``processes``) or by ``judge``; else empty."""

    killed: str
    signal: int
    exit_code: int
    cpu_s: float
    wall_s: float
    memory_mib: float
    clean: bool
    artifact: int = field(default=-1, compare=False)  # descriptor of what a compiler made; the reader closes it


def read_report(control: socket.socket) -> Report:
    """The report of the run that ends next; waits for it.

    Raises:
        WorkerDied: none comes, or something else.
    """
    message, descriptors = read(control, SILENCE_S)
    words = message.decode("ascii", "replace").split()
    if len(words) != 7:
        raise WorkerDied("The sandbox worker sent no report.")
    killed, number, code, cpu, wall, rss, clean = words
    return Report(
        killed="" if killed == "-" else killed,
        signal=int(number),
        exit_code=int(code),
        cpu_s=float(cpu),
        wall_s=float(wall),
        memory_mib=int(rss) / 1024,
        clean=clean == "1",
        artifact=descriptors[0] if descriptors else -1,
    )


def read(control: socket.socket, timeout_s: float) -> tuple[bytes, list[int]]:
    """A worker's next message, and the descriptor that came with it, if any.

    Raises:
        WorkerDied: it is silent for longer than ``timeout_s``, or gone.
    """
    if not select.select([control], [], [], timeout_s)[0]:
        raise WorkerDied("The sandbox worker does not answer.")
    try:
        message, descriptors, _, _ = socket.recv_fds(control, 65536, 1)
    except OSError:
        message, descriptors = b"", []
    if not message:
        raise WorkerDied("The sandbox worker went away.")
    return message, descriptors
