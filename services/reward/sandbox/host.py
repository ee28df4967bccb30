"""The judge's side of the sandbox: workers, the guests on them, and what they cover.

A worker (``worker.py``) is a clean interpreter that isolates itself once; each run of a program is a fork of it. What goes to and from
the program flows over descriptors made here for that run, so the worker neither sees nor delays it; ends and limits are reported by
the worker, on a socket that the guest does not have. ``start_worker`` takes the strongest level that works here.

Covered at level ``namespaces`` (a hostile test for each line in tests/integration/test_attacks.py):

- exit paths (``sys.exit``, ``os._exit``, signals): a pass needs every value or the right output, an exit code is never one;
- lying objects, patched builtins, printed markers: values cross by exact type and are compared elsewhere;
- reading the tests from frames, ``gc``, files, ``/proc``: they are never in the guest's process, its parent, or its file system;
- fork bombs, processes that outlive the run, ``exec``: seccomp refuses new processes (a suite may allow some); the worker, PID 1, kills
  what there is;
- killing or tracing the worker: PID 1 takes no signal from inside; no ptrace; no /proc;
- network and local sockets: an empty net namespace, and no socket calls;
- files of the host: a root with the interpreter's libraries, read-only, Landlock on top; one private tmpfs, wiped after each run;
- CPU (threads and processes together), wall time, memory, output, file size, descriptors: limited from outside, SIGKILL only;
- state between runs: each is a fresh fork in an empty box;
- compilers: they run in the same sandbox as what they compile;
- the node dying: the worker sees its socket close and takes everything inside with it.

Level ``landlock`` (no user namespaces here): Landlock and seccomp give the same list, with a host folder as the box and without a
bound on the box as a whole; suites that allow several processes are refused. Level ``none`` (only with ``unsafe``): limits only.

Not covered: kernel exploits, timing side channels between cores, signs that candidates running at the same time give each other (locks on
shared library files), memory of the box (64 MiB) on top of the process's where there is no
memory cgroup, tests that a policy knows by heart, helper functions that a suite itself takes from the candidate, what a readable library
on the host reveals.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from protocol.suites import Limits
from services.reward.sandbox import values
from services.reward.sandbox.filters import NoSeccomp, filters

Level = Literal["namespaces", "landlock", "none"]
Role = Literal["program", "native", "compile", "functions", "tests", "readability"]
Filter = Literal["guest", "processes", "native", "compile"]

# What a worker has imported before it forks: a program pays nothing for it, but every fork is slower for it.
_BARE = ""
_PLAIN = "typing re collections collections.abc functools itertools math heapq bisect string copy operator json"
_FULL = (
    f"{_PLAIN} abc array contextlib dataclasses datetime decimal enum fractions hashlib inspect io random statistics textwrap threading "
    "time traceback types unicodedata"
)
FLAVOURS = {"bare": _BARE, "plain": _PLAIN, "full": _FULL, "numpy": f"{_FULL} numpy", "native": _BARE}
_BUILT_IN = frozenset(
    [
        "sys",
        "os",
        "time",
        "math",
        "builtins",
        "errno",
        "gc",
        "itertools",
        "io",
        "posix",
        "marshal",
        "signal",
        "atexit",
        "__future__",
    ]
)
_IMPORT = re.compile(r"^[ \t]*(?:import[ \t]+([\w., \t]+)|from[ \t]+(\w+))", re.MULTILINE)

_SOURCES = ("worker", "linux", "root", "guest", "values", "readability")
_COMPILE = """
import marshal, sys
codes = {}
for path in sys.argv[1:]:
    with open(path, encoding='utf-8') as file:
        codes[path.rpartition('/')[2].removesuffix('.py')] = compile(file.read(), path, 'exec', dont_inherit=True)
sys.stdout.buffer.write(marshal.dumps(codes))
"""
_BOOT = "import marshal; codes = marshal.load(open({fd}, 'rb')); exec(codes.pop('worker'))"
_ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",  # else each thread reserves 64 MiB or more, and 16 of them find no room within a limit of 512 MiB
    "LD_BIND_NOW": "1",  # every guest would otherwise look up the same symbols again
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",  # the sandbox's
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "PYTHONINTMAXSTRDIGITS": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_START_S = 60.0
_SILENCE_S = 30.0  # a worker that is silent for this long after ten times a run's wall limit counts as dead
_QUIET_S = 0.004  # at first only the end of a run is waited for: most are over before their output needs room
_PIPE_BYTES = 65536
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
    """What a worker says of a run. ``killed``: which limit (``cpu``, ``wall``, ``memory``, ``processes``), ``judge``, or empty."""

    killed: str
    signal: int
    exit_code: int
    cpu_s: float
    wall_s: float
    memory_mib: float
    clean: bool
    artifact: int = field(default=-1, compare=False)  # descriptor of what a compiler made; the reader closes it


class Guest:
    """One run of a program: its streams, frames to and from it, and at the end the report.

    ``stdin`` is all of its input. Of each output at most ``cap_bytes`` are kept; one byte more and it is stopped.
    """

    def __init__(
        self, worker: Worker, order: Order, *, stdin: bytes, cap_bytes: int, merge: bool, program: int
    ) -> None:
        self.stdout, self.stderr = bytearray(), bytearray()
        self.overflow = False
        self.report: Report | None = None
        self._worker, self._cap = worker, cap_bytes
        self._inbox, self._outbox, self._input = bytearray(), b"", memoryview(stdin)
        self._deadline = time.monotonic() + 10 * order.limits.wall_limit_s + _SILENCE_S
        self._killed = False
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        out_r, out_w = os.pipe2(os.O_CLOEXEC)
        err_r, err_w = (out_r, out_w) if merge else os.pipe2(os.O_CLOEXEC)
        if stdin:
            in_r, self._stdin = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self._stdin, False)
        else:
            in_r, self._stdin = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), -1
        self._outputs = {out_r: self.stdout} | ({} if merge else {err_r: self.stderr})
        given = [in_r, out_w, err_w, theirs.fileno()] + ([program] if program >= 0 else [])
        try:
            socket.send_fds(worker.control, [order.line()], given)
        except OSError as error:
            self.close()
            raise WorkerDied(f"The sandbox worker is gone: {error.strerror}.") from None
        finally:
            theirs.close()
            for descriptor in {in_r, out_w, err_w}:
                os.close(descriptor)
        for descriptor in self._outputs:
            os.set_blocking(descriptor, False)
        self._watched: dict[int, int] = {}
        self._poll = select.poll()
        self._watch(worker.control.fileno(), select.POLLIN)
        self._write_input()

    # ---- for judges ----

    def send(self, *bodies: bytes) -> None:
        """Frames out, as far as they go without waiting; ``receive`` and ``wait`` send the rest."""
        self._outbox += b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
        self._write_channel()

    def settle(self) -> None:
        """Give the guest a moment to end by itself before anything is read from it: each look costs more than what it may find."""
        if not self._outbox and self._stdin < 0 and self.report is None:
            self._step(_QUIET_S)

    def receive(self) -> bytes:
        """The next frame's body.

        Raises:
            Ended: the guest ended or was stopped before it.
            WorkerDied, values.ValueRefused: the worker is gone; the frame is longer than allowed.
        """
        self._watch_outputs()
        self._watch(self._channel.fileno(), select.POLLIN | (select.POLLOUT if self._outbox else 0))
        while (body := self._frame()) is None:
            if self.report is not None or self._channel.fileno() not in self._watched:
                raise Ended
            self._step(None)
        return body

    def exchange(self, body: bytes) -> bytes:
        """``send``, then ``receive``."""
        self.send(body)
        return self.receive()

    def wait(self) -> Report:
        """The report, when the guest has ended by itself or by a limit.

        Raises:
            WorkerDied: the worker is gone.
        """
        self.settle()
        if self.report is None:
            self._watch_outputs()
            self._watch(self._channel.fileno(), select.POLLIN | (select.POLLOUT if self._outbox else 0))
            if self._stdin >= 0:
                self._watch(self._stdin, select.POLLOUT)
        while self.report is None:
            self._step(None)
        return self.report

    def frames(self) -> list[bytes]:
        """All whole frames that came and were not received; after the end."""
        found = []
        while (body := self._frame()) is not None:
            found.append(body)
        return found

    def finish(self) -> Report:
        """Stop the guest if it runs; the report. The worker is free for the next run afterwards.

        Raises:
            WorkerDied: no report came.
        """
        try:
            self._kill()
            while self.report is None:
                self._step(None)
            return self.report
        finally:
            self.close()

    def close(self) -> None:
        """Give the descriptors back. Safe to call twice."""
        self._channel.close()
        for descriptor in [*self._outputs, self._stdin]:
            if descriptor >= 0:
                os.close(descriptor)
        self._outputs, self._stdin = {}, -1

    # ---- streams ----

    def _watch(self, descriptor: int, events: int) -> None:
        if self._watched.get(descriptor) != events:
            self._poll.register(descriptor, events)
            self._watched[descriptor] = events

    def _unwatch(self, descriptor: int) -> None:
        if self._watched.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def _watch_outputs(self) -> None:
        for descriptor in self._outputs:
            self._watch(descriptor, select.POLLIN)

    def _step(self, timeout_s: float | None) -> None:
        """Wait for something to happen, and do what it asks for."""
        left_s = self._deadline - time.monotonic()
        events = dict(self._poll.poll(1000 * (left_s if timeout_s is None else timeout_s) if left_s > 0 else 0))
        if not events and timeout_s is None:
            raise WorkerDied("The sandbox worker does not answer.")
        for descriptor in list(self._outputs):
            if descriptor in events:
                self._read_output(descriptor)
        channel = self._channel.fileno()
        if state := events.get(channel, 0):
            if state & select.POLLOUT:
                self._write_channel()
            if state & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._read_channel()
        if self._stdin in events:
            self._write_input()
        if self._worker.control.fileno() in events:
            self.report = self._worker.read_report()
            for descriptor in list(self._outputs):
                self._read_output(descriptor)
            self._read_channel()

    def _read_output(self, descriptor: int) -> None:
        """Until it would block, is at its end, or is too much."""
        kept = self._outputs[descriptor]
        while True:
            try:
                data = os.read(descriptor, _PIPE_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._unwatch(descriptor)
                os.close(descriptor)
                del self._outputs[descriptor]
                return
            kept += data
            if len(kept) > self._cap:
                del kept[self._cap :]
                self.overflow = True
                self._kill()
                if self.report is None:
                    return

    def _read_channel(self) -> None:
        while len(self._inbox) <= values.MAX_FRAME_BYTES:
            try:
                data = self._channel.recv(_PIPE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._unwatch(self._channel.fileno())
                return
            self._inbox += data
            if len(data) < _PIPE_BYTES and self.report is None:
                return

    def _write_channel(self) -> None:
        try:
            self._outbox = self._outbox[self._channel.send(self._outbox) :]
        except BlockingIOError:
            pass
        except OSError:  # a gone reader: its end is reported by the worker
            self._outbox = b""
        if not self._outbox and self._channel.fileno() in self._watched:
            self._watch(self._channel.fileno(), select.POLLIN)

    def _write_input(self) -> None:
        try:
            while self._input:
                self._input = self._input[os.write(self._stdin, self._input[:_PIPE_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it ended without reading all of it, as a program may
            self._input = memoryview(b"")
        if self._stdin >= 0:
            self._unwatch(self._stdin)
            os.close(self._stdin)
            self._stdin = -1

    def _frame(self) -> bytes | None:
        if len(self._inbox) < 4:
            return None
        size = values.frame_size(bytes(self._inbox[:4]))
        if len(self._inbox) < 4 + size:
            return None
        body = bytes(self._inbox[4 : 4 + size])
        del self._inbox[: 4 + size]
        return body

    def _kill(self) -> None:
        if self.report is None and not self._killed:
            self._killed = True
            with contextlib.suppress(OSError):  # a worker that is gone shows when its report is read
                self._worker.control.send(b"kill")


class Worker:
    """A sandbox process; one guest at a time.

    Raises:
        CannotStart: this level does not work here; the message says which step was refused.
    """

    def __init__(
        self,
        python: str,
        level: Level,
        flavour: str = "plain",
        *,
        paths: tuple[str, ...] = (),
        programs: tuple[str, ...] = (),
    ) -> None:
        self.level: Level = level
        self.flavour = flavour
        self.num_runs = 0
        self._box = tempfile.mkdtemp(prefix="forebay-box-") if level != "namespaces" else None
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: list[int] = []  # our ends and its: its code, its stdin, its outputs
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                parts = filters().parts(level) if level != "none" else (b"-",) * 5
                where = [
                    level,
                    str(theirs.fileno()),
                    self._box or "-",
                    FLAVOURS[flavour],
                    ":".join(paths),
                    " ".join(programs),
                ]
                self._streams.append(os.memfd_create("worker"))
                os.write(self._streams[0], _compiled(python))
                os.lseek(self._streams[0], 0, os.SEEK_SET)
                boot = _BOOT.format(fd=self._streams[0])
                # Pipes, as a guest will have: its stream objects are made when the worker starts, and take over other descriptors.
                self._streams += [*os.pipe2(os.O_CLOEXEC), *os.pipe2(os.O_CLOEXEC)]
                self._process = subprocess.Popen(
                    [python, "-S", "-s", "-B", "-c", boot, *where],
                    stdin=self._streams[1],
                    stdout=self._streams[4],
                    stderr=self._streams[4],
                    env=_ENVIRONMENT,
                    cwd="/",
                    pass_fds=[theirs.fileno(), self._streams[0]],
                    start_new_session=True,  # a Ctrl-C at the terminal is for the judge
                )
            for part in parts:
                self.control.send(part)
            answer = self._read(_START_S)[0].decode("utf-8", "replace")
            if not answer.startswith("ready "):
                raise WorkerDied(f"{level}: {answer.removeprefix('error ')}")
        except (WorkerDied, NoSeccomp, OSError) as error:
            said = self._last_words()
            self.close()
            raise CannotStart((str(error) if isinstance(error, WorkerDied) else f"{level}: {error}") + said) from None
        has_landlock, has_proc = (word == "1" for word in answer.split()[1:])
        self.counts_processes = level == "namespaces" and has_proc  # suites that allow several need it
        names = {"namespaces": "namespaces+landlock+seccomp" if has_landlock else "namespaces+seccomp"}
        self.isolation = {**names, "landlock": "landlock+seccomp", "none": "none"}[level]

    @property
    def alive(self) -> bool:
        """Whether the process is there; not whether it answers."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The host's pid of the worker's outermost process."""
        assert self._process is not None
        return self._process.pid

    def run(
        self, order: Order, *, stdin: bytes = b"", cap_bytes: int = 0, merge: bool = False, program: int = -1
    ) -> Guest:
        """Start a guest. ``merge``: both outputs in one. ``program``: descriptor of a compiled program.

        Raises:
            WorkerDied: the worker is gone.
        """
        self.num_runs += 1
        cap = cap_bytes or order.limits.output_kib * 1024
        return Guest(self, order, stdin=stdin, cap_bytes=cap, merge=merge, program=program)

    def read_report(self) -> Report:
        """The report of the run that ended.

        Raises:
            WorkerDied: none comes.
        """
        message, descriptors = self._read(_SILENCE_S)
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

    def _read(self, timeout_s: float) -> tuple[bytes, list[int]]:
        if not select.select([self.control], [], [], timeout_s)[0]:
            raise WorkerDied("The sandbox worker does not answer.")
        try:
            message, descriptors, _, _ = socket.recv_fds(self.control, 65536, 1)
        except OSError:
            message, descriptors = b"", []
        if not message:
            raise WorkerDied("The sandbox worker went away.")
        return message, descriptors

    def _last_words(self) -> str:
        """The last line that a worker printed which did not start."""
        if len(self._streams) < 5:
            return ""
        os.set_blocking(self._streams[3], False)
        with contextlib.suppress(OSError):
            lines = os.read(self._streams[3], _PIPE_BYTES).decode("utf-8", "replace").strip().splitlines()
            return f" ({lines[-1][:300]})" if lines else ""
        return ""

    def close(self) -> None:
        """End the worker and everything inside it. Safe to call twice."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)
        self.control.close()
        while self._streams:
            os.close(self._streams.pop())
        if self._process is not None:
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()  # PID 1 inside dies with its parent, and the namespace with PID 1
                self._process.wait()
        if self._box is not None:  # a folder of the host, which a killed worker could not remove
            shutil.rmtree(self._box, ignore_errors=True)


@cache
def _compiled(python: str) -> bytes:
    """The sources of a worker as code objects of this interpreter, marshalled; they are read by workers only.

    Raises:
        OSError: the interpreter can't be run.
    """
    paths = [str(Path(__file__).with_name(f"{name}.py")) for name in _SOURCES]
    done = subprocess.run(
        [python, "-S", "-s", "-B", "-c", _COMPILE, *paths], capture_output=True, env=_ENVIRONMENT, cwd="/"
    )
    if done.returncode or not done.stdout:
        raise OSError(f"{python} can't compile the worker: {done.stderr.decode('utf-8', 'replace').strip()[-300:]}")
    return done.stdout


def start_worker(python: str, levels: tuple[Level, ...], flavour: str = "plain") -> Worker:
    """A worker at the first of ``levels`` that works here.

    Raises:
        CannotStart: none does; the message says why for each.
    """
    reasons = []
    for level in levels:
        try:
            return Worker(python, level, flavour)
        except CannotStart as error:
            reasons.append(str(error))
    raise CannotStart("; ".join(reasons))


def flavour_of(code: str) -> str:
    """The smallest Python flavour that has what ``code`` imports; modules that none has are imported by the program itself."""
    names: set[str] = set()
    for match in _IMPORT.finditer(code):
        names |= {part.split()[0].partition(".")[0] for part in (match[1] or match[2]).split(",") if part.strip()}
    if names <= _BUILT_IN:
        return "bare"
    if names <= _BUILT_IN | set(_PLAIN.split()):
        return "plain"
    return "numpy" if "numpy" in names else "full"


def parts(*items: bytes) -> bytes:
    """A list of byte strings as ``guest.parts`` reads it."""
    return b"".join(len(item).to_bytes(4, "big") + item for item in items)
