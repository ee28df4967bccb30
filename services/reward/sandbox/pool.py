"""The judge's side of the sandbox: workers, jobs on them, and what they cover.

A worker (``worker.py``) is a clean interpreter that isolates itself once; each job is a fork of it. Frames go between judge and guest
over a socket pair made for that job, so the worker neither sees nor delays them; ends and limits are reported by the worker, on
a socket the guest does not have. ``start_worker`` takes the strongest level that works here.

Covered at level ``namespaces`` (one hostile test a line in tests/integration/test_sandbox.py):

- exit paths (``sys.exit``, ``os._exit``, signals): a pass needs every value, an exit code is never one;
- lying objects, patched builtins, printed markers: values cross by exact type and are compared elsewhere;
- reading the tests from frames, ``gc``, files, ``/proc``: they are never in the guest's process, its parent, or its file system;
- fork bombs, processes that outlive the job, ``exec``: seccomp refuses new processes; the worker, PID 1, kills what there is;
- killing or tracing the worker: PID 1 takes no signal from inside; no ptrace; no /proc;
- network and local sockets: an empty net namespace, and no socket calls;
- files of the host: a root with the interpreter's libraries, read-only; one private tmpfs, thrown away after each job;
- CPU (threads together), wall time, memory of the process, output, file size, descriptors: limited from outside, SIGKILL only;
- state between jobs: each job is a fresh fork in a fresh box;
- the node dying: the worker sees its socket close and takes everything inside with it.

Level ``landlock`` (no user namespaces here): Landlock and seccomp give the same list, with a host folder as the box and without a
file-size bound on the box as a whole. Level ``none`` (only with ``unsafe``): limits only; files, network and processes are open.

Not covered: kernel exploits, timing side channels between cores, memory of the box (32 MiB) on top of the process's, tests that
a policy knows by heart, helper functions that a suite itself takes from the candidate, what a readable library on the host reveals.
"""

from __future__ import annotations

import contextlib
import json
import select
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Literal

from protocol.suites import Limits
from services.reward.sandbox import values

Level = Literal["namespaces", "landlock", "none"]
ISOLATION = {"namespaces": "namespaces+seccomp", "landlock": "landlock+seccomp", "none": "none"}
_WORKER = Path(__file__).with_name("worker.py")
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",  # the sandbox's
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_START_S = 30.0
_GRACE_S = 10.0  # how long past a job's wall limit a worker may stay silent before it counts as dead


class WorkerDied(Exception):
    """The worker failed, not the guest: the job has no verdict."""


class Ended(Exception):
    """The guest is gone or was stopped; ``Session.finish`` has the report."""


class Session:
    """One guest: frames to and from it, and at the end the worker's report."""

    def __init__(self, worker: Worker, channel: socket.socket, wall_s: float) -> None:
        self._worker = worker
        self._channel = channel
        self._deadline = time.monotonic() + wall_s + _GRACE_S
        self._report: dict[str, Any] | None = None

    def send(self, message: Any) -> None:
        """One message out, which must not need a reply to drain (use ``exchange`` for anything large)."""
        self._transfer(values.pack(message), receive=False)

    def receive(self) -> bytes:
        """The next frame's body.

        Raises:
            Ended, WorkerDied, values.ValueRefused: no frame; the frame is too long.
        """
        return self._transfer(b"", receive=True)

    def exchange(self, frame: bytes) -> bytes:
        """A packed frame out and one body in; neither side can block the other. Raises as ``receive`` does."""
        return self._transfer(frame, receive=True)

    def _transfer(self, out: bytes, *, receive: bool) -> bytes:
        pending, got, size = memoryview(out), bytearray(), -1
        poll = select.poll()
        channel, control = self._channel.fileno(), self._worker.control.fileno()
        poll.register(control, select.POLLIN)
        while pending or receive:
            poll.register(channel, (select.POLLIN if receive else 0) | (select.POLLOUT if pending else 0))
            events = dict(poll.poll(max(0.0, self._deadline - time.monotonic()) * 1000))
            if not events:
                raise WorkerDied("The sandbox worker does not answer.")
            state = events.get(channel, 0)
            if state & select.POLLOUT and pending:
                with contextlib.suppress(BlockingIOError, ConnectionError):  # a gone reader shows as POLLHUP below
                    pending = pending[self._channel.send(pending[: 1 << 18]) :]
            if state & (select.POLLIN | select.POLLHUP | select.POLLERR):
                size = self._take(got, size)
                if size >= 0 and len(got) == size:
                    return bytes(got)
            elif control in events and not state & select.POLLOUT:
                self._report = self._worker.read_report()
                raise Ended
        return b""

    def _take(self, got: bytearray, size: int) -> int:
        """Read some of the frame into ``got``; the body's size once known, else -1."""
        try:
            part = self._channel.recv(4 - len(got) if size < 0 else min(size - len(got), 1 << 18))
        except BlockingIOError:
            return size
        except ConnectionError:
            part = b""
        if not part:
            raise Ended
        got += part
        if size < 0 and len(got) == 4:
            size = values.frame_size(bytes(got))
            got.clear()
        return size

    def finish(self) -> dict[str, Any]:
        """Stop the guest if it runs; the worker's report. The worker is free for the next job afterwards.

        Raises:
            WorkerDied: no report came.
        """
        with contextlib.suppress(OSError):
            self._channel.close()
        if self._report is None:
            self._report = self._worker.stop_job()
        return self._report


class Worker:
    """A sandbox process; one job at a time, owned by one thread at a time.

    Raises:
        WorkerDied: this level does not work here; the message says which step was refused.
    """

    def __init__(self, python: str, level: Level) -> None:
        self.level: Level = level
        self.num_jobs = 0
        self._box: str | None = None
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [python, "-s", "-B", str(_WORKER), level, str(theirs.fileno())]
            null = subprocess.DEVNULL
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=null,
                    stdout=null,
                    stderr=null,
                    env=_ENVIRONMENT,
                    cwd="/",
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # a Ctrl-C at the terminal is for the judge
                )
            except OSError as error:
                self.control.close()
                raise WorkerDied(f"The interpreter {python} can't be started: {error.strerror}.") from None
        try:
            answer = self._read(_START_S)
        except WorkerDied:
            self.close()
            raise
        self._box = answer.get("box")
        if "error" in answer:
            self.close()
            raise WorkerDied(f"{level}: {answer['error']}")

    @property
    def pid(self) -> int:
        """The host's pid of the worker's outermost process."""
        return self._process.pid

    def open(self, role: Literal["candidate", "tests"], limits: Limits) -> Session:
        """Fork a guest.

        Raises:
            WorkerDied: the worker is gone.
        """
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        job = {"role": role, **limits.model_dump(), "wall_s": limits.wall_limit_s}
        with theirs:
            try:
                socket.send_fds(self.control, [json.dumps(job).encode()], [theirs.fileno()])
            except OSError as error:
                mine.close()
                raise WorkerDied(f"The sandbox worker is gone: {error.strerror}.") from None
        self.num_jobs += 1
        return Session(self, mine, limits.wall_limit_s)

    def stop_job(self) -> dict[str, Any]:
        """Kill the running guest, unless it ended by itself just now; its report."""
        with contextlib.suppress(OSError):
            if not select.select([self.control], [], [], 0)[0]:
                self.control.send(b"kill")
        return self.read_report()

    def read_report(self) -> dict[str, Any]:
        """The report of the job that ended.

        Raises:
            WorkerDied: none comes.
        """
        return self._read(_GRACE_S)

    def _read(self, timeout_s: float) -> dict[str, Any]:
        if not select.select([self.control], [], [], timeout_s)[0]:
            raise WorkerDied("The sandbox worker does not answer.")
        try:
            message = self.control.recv(65536)
        except OSError:
            message = b""
        if not message:
            raise WorkerDied("The sandbox worker went away.")
        return dict(json.loads(message))

    def shut(self) -> None:
        """Tell the worker to end, from any thread; a thread that waits for its job gets ``WorkerDied``."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the worker and everything inside it. Safe to call twice."""
        self.shut()
        self.control.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()  # PID 1 inside dies with its parent, and the namespace with PID 1
            self._process.wait()
        if self._box is not None:  # a folder of the host, which a killed worker could not remove
            shutil.rmtree(self._box, ignore_errors=True)


def start_worker(python: str, levels: tuple[Level, ...]) -> Worker:
    """A worker at the first of ``levels`` that works here.

    Raises:
        WorkerDied: none does; the message says why for each.
    """
    reasons = []
    for level in levels:
        try:
            return Worker(python, level)
        except WorkerDied as error:
            reasons.append(str(error))
    raise WorkerDied("; ".join(reasons))
