"""The judge's side of the sandbox: how a worker is started, and what it covers.

A worker (``worker.py``) is a clean interpreter that isolates itself once; each run of a program is a fork of it. What goes to and from
the program flows over descriptors made for that run (``streams.py``), so the worker neither sees nor delays it; ends and limits are reported
by the worker, on a socket that the guest does not have (``control.py``). ``start_worker`` takes the strongest level that works here.

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
import shutil
import socket
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from services.reward.sandbox.control import CannotStart, Level, Order, WorkerDied, read
from services.reward.sandbox.filters import NoSeccomp, filters
from services.reward.sandbox.flavours import FLAVOURS
from services.reward.sandbox.streams import Guest

_SOURCES = ("worker", "linux", "root", "watch", "guest", "values", "readability")
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
_START_S = 60.0  # in which a worker must have isolated itself


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
                seccomp = filters().parts(level) if level != "none" else (b"-",) * 5
                self._process = self._spawn(python, theirs.fileno(), paths, programs)
            for program in seccomp:
                self.control.send(program)
            answer = read(self.control, _START_S)[0].decode("utf-8", "replace")
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

    def _spawn(
        self, python: str, control: int, paths: tuple[str, ...], programs: tuple[str, ...]
    ) -> subprocess.Popen[bytes]:
        """Start the process; its arguments are in the docstring of ``worker.py``."""
        where = [
            self.level,
            str(control),
            self._box or "-",
            FLAVOURS[self.flavour],
            ":".join(paths),
            " ".join(programs),
        ]
        self._streams.append(os.memfd_create("worker"))
        os.write(self._streams[0], _compiled(python))
        os.lseek(self._streams[0], 0, os.SEEK_SET)
        # Pipes, as a guest will have: its stream objects are made when the worker starts, and take over other descriptors.
        self._streams += [*os.pipe2(os.O_CLOEXEC), *os.pipe2(os.O_CLOEXEC)]
        return subprocess.Popen(
            [python, "-S", "-s", "-B", "-c", _BOOT.format(fd=self._streams[0]), *where],
            stdin=self._streams[1],
            stdout=self._streams[4],
            stderr=self._streams[4],
            env=_ENVIRONMENT,
            cwd="/",
            pass_fds=[control, self._streams[0]],
            start_new_session=True,  # a Ctrl-C at the terminal is for the judge
        )

    def _last_words(self) -> str:
        """The last line that a worker printed which did not start."""
        if len(self._streams) < 5:
            return ""
        os.set_blocking(self._streams[3], False)
        with contextlib.suppress(OSError):
            lines = os.read(self._streams[3], 65536).decode("utf-8", "replace").strip().splitlines()
            return f" ({lines[-1][:300]})" if lines else ""
        return ""

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
        return Guest(self.control, order, stdin=stdin, cap_bytes=cap, merge=merge, program=program)

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
