"""The sandboxes of one judge: workers by what they have imported, started when first needed, recycled, and one self-test each."""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import stat
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import structlog

from common.errors import ConfigError
from protocol.suites import Limits
from protocol.verdicts import Verdict
from services.reward.config import RewardConfig
from services.reward.languages import Toolchain, Toolchains
from services.reward.sandbox import values
from services.reward.sandbox.cgroups import WorkerGroups
from services.reward.sandbox.guest import EXIT_MEMORY
from services.reward.sandbox.host import (
    CannotStart,
    Ended,
    Filter,
    Guest,
    Level,
    Order,
    Report,
    Role,
    Worker,
    flavour_of,
    parts,
    start_worker,
)

log = structlog.get_logger()
LEVELS: tuple[Level, ...] = ("namespaces", "landlock")
_RUNS_PER_WORKER = 5000  # then a fresh one, so that nothing can pile up in it
_MAX_ARTIFACT_BYTES = 64 << 20
_KEPT_ARTIFACTS_BYTES = 256 << 20
_SELF_TEST_LIMITS = Limits(cpu_s=10, wall_s=60)
# What a candidate could find of the judge's, it would find with this; the canary is in the judge's memory, as expected values are.
_PROBE = """
import gc, os, sys
frame, seen = sys._getframe(), []
while frame:
    seen += [frame.f_locals, frame.f_globals]
    frame = frame.f_back
seen += [o for o in gc.get_objects() if isinstance(o, (str, bytes, list, tuple))]
for fd in range(256):
    if fd > 2:
        try:
            os.read(fd, 1)
            print('descriptor', fd)
        except OSError:
            pass
text = repr(seen) + repr(dict(os.environ)) + repr(sys.argv)
for path in ('/etc/passwd', '/proc/1/environ', '/proc/self/status', '/root', '/home'):
    try:
        os.listdir(path) if os.path.isdir(path) else open(path).read()
        print('readable', path)
    except OSError:
        pass
try:
    os.fork() or os._exit(0)
    print('forked')
except OSError:
    pass
print('found' if input() in text else 'nothing')
"""


class Refused(Exception):
    """This suite can't be judged on this node; trying again changes nothing."""


@dataclass(frozen=True)
class Execution:
    """What one run of a whole program showed."""

    report: Report
    stdout: bytes
    stderr: bytes
    overflow: bool
    compile_error: str | None = None
    artifact: bytes = b""  # its code object, for the next run


class Lab:
    """Workers for one judgement at a time. Not thread-safe: each judge has its own."""

    def __init__(self, config: RewardConfig, levels: tuple[Level, ...] = LEVELS) -> None:
        self._config = config
        self._levels: tuple[Level, ...] = (*levels, "none") if config.unsafe else levels
        self._workers: dict[tuple[str, str], Worker] = {}
        self._toolchains = Toolchains()
        self._artifacts: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # compiled programs: descriptor and size
        self._groups = WorkerGroups.find()
        self.isolation = "none"

    def start(self) -> None:
        """Start the first worker; later ones must be as strong as it is.

        Raises:
            ConfigError: no isolation works on this node (and ``unsafe`` is off), the interpreter does not run, or the self-test failed.
        """
        try:
            worker = self._start("plain", self._levels)
        except CannotStart as error:
            raise ConfigError(
                f"No sandbox works on this node: {error}. Allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
                "kernel.apparmor_restrict_unprivileged_userns=0) or Landlock; or set reward.unsafe = true to judge without isolation."
            ) from None
        self._levels = (worker.level,)
        self._workers["candidate", "plain"] = worker
        self.isolation = worker.isolation
        self._self_test(worker)

    def close(self) -> None:
        """End all workers. Safe to call twice."""
        self.drop()
        while self._artifacts:
            os.close(self._artifacts.popitem()[1][0])

    # ---- workers ----

    def worker(self, flavour: str, use: str = "candidate") -> Worker:
        """A worker that is free. ``use``: ``candidate`` or ``tests``, which never share one.

        Raises:
            CannotStart: none can be started now.
        """
        worker = self._workers.get((use, flavour))
        if worker is not None and worker.num_runs < _RUNS_PER_WORKER:
            return worker
        if worker is not None:
            self._end(worker)
            del self._workers[use, flavour]
        worker = self._start(flavour, self._levels)
        try:
            self._self_test(worker)
        except ConfigError as error:
            self._end(worker)
            raise CannotStart(str(error)) from None
        self._workers[use, flavour] = worker
        return worker

    def drop(self) -> bool:
        """End all workers: what comes next gets fresh ones. Whether one for candidates had died."""
        died = any(use == "candidate" and not worker.alive for (use, _), worker in self._workers.items())
        for worker in list(self._workers.values()):
            self._end(worker)
        self._workers.clear()
        return died

    def _end(self, worker: Worker) -> None:
        worker.close()
        self._groups.remove(worker)

    def _start(self, flavour: str, levels: tuple[Level, ...]) -> Worker:
        if flavour != "native":
            worker = start_worker(self._config.interpreter, levels, flavour)
        else:
            paths, programs = self._toolchains.paths()
            worker = Worker(self._config.interpreter, levels[0], flavour, paths=paths, programs=programs)
        if self._groups.add(worker):
            worker.isolation += "+cgroup"
        log.debug("sandbox_worker_started", flavour=flavour, isolation=worker.isolation)
        return worker

    def _self_test(self, worker: Worker) -> None:
        if worker.flavour == "native":
            return  # it never runs Python; the compilers' own tests are the suites
        canary = f"canary-{secrets.token_hex(16)}"
        run = self._run_python(worker, parts(b"source", _PROBE.encode(), b""), _SELF_TEST_LIMITS, canary.encode())
        said = run.stdout.decode("utf-8", "replace").split("\n")
        if run.report.exit_code or "nothing" not in said:
            raise ConfigError(
                f"The sandbox's self-test failed: exit code {run.report.exit_code}, {said} {run.stderr.decode('utf-8', 'replace')[-300:]}. "
                "Is reward.python a CPython >= 3.10?"
            )
        if len(said) > 2 and worker.level != "none":
            raise ConfigError(f"The sandbox's self-test got out of it: {', '.join(said[:-2])}.")

    def _discard(self, worker: Worker) -> None:
        """After an anomaly: it is never used again."""
        log.warning("sandbox_worker_discarded", flavour=worker.flavour)
        self._end(worker)
        self._workers = {key: other for key, other in self._workers.items() if other is not worker}

    # ---- runs ----

    def order(
        self, role: Role, limits: Limits, *, filter_name: Filter = "guest", reserves_memory: bool = False
    ) -> Order:
        """An order within what this node allows.

        Raises:
            Refused: the suite's limits are beyond it.
        """
        if limits.memory_mib > self._config.max_memory_mib:
            raise Refused(
                f"memory_mib {limits.memory_mib} is more than reward.max_memory_mib = {self._config.max_memory_mib}."
            )
        if limits.processes > 1:
            filter_name = "processes" if filter_name == "guest" else filter_name
        return Order(role, filter_name, limits, reserves_memory)

    def start_guest(self, worker: Worker, order: Order, **options: Any) -> Guest:
        """A guest of ``worker``.

        Raises:
            Refused: it may have several processes, which this level can't count.
        """
        if order.limits.processes > 1 and not worker.counts_processes:
            raise Refused(
                f"limits.processes > 1 needs the isolation level 'namespaces' with a /proc; here is {worker.isolation}."
            )
        self._groups.limit(worker, order.limits)
        return worker.run(order, **options)

    def finish(self, worker: Worker, guest: Guest) -> Report:
        """The end of a guest: its report. A worker that could not clean up is discarded."""
        report = guest.finish()
        if not report.clean:
            self._discard(worker)
        return self._groups.corrected(worker, report)

    def run_python(
        self, code: str, artifact: bytes, limits: Limits, stdin: bytes, *, keep: bool, cap_bytes: int
    ) -> Execution:
        """Run a Python program. ``artifact``: the code object that an earlier run of the same code gave back, when asked to ``keep``."""
        frame = (
            parts(b"code", artifact, b"") if artifact else parts(b"source", _encoded(code), b"keep" if keep else b"")
        )
        return self._run_python(self.worker(flavour_of(code)), frame, limits, stdin, cap_bytes=cap_bytes)

    def _run_python(self, worker: Worker, frame: bytes, limits: Limits, stdin: bytes, cap_bytes: int = 0) -> Execution:
        guest = self.start_guest(worker, self.order("program", limits), stdin=stdin, cap_bytes=cap_bytes)
        try:
            guest.send(frame)
            guest.wait()
        finally:
            report = self.finish(worker, guest)
        said = guest.frames()
        error = None
        if not said and not frame[4:].startswith(b"code"):
            if not report.killed and not guest.overflow:  # else the limits say what it was
                error = f"The compiler died (signal {report.signal})."
        elif said and said[0][:1] == b"e":
            error = said[0][1:].decode("utf-8", "replace")
        artifact = said[0][1:] if said and said[0][:1] == b"c" else b""
        return Execution(report, bytes(guest.stdout), bytes(guest.stderr), guest.overflow, error, artifact)

    def run_native(self, toolchain: Toolchain, code: str, limits: Limits, stdin: bytes, *, cap_bytes: int) -> Execution:
        """Run a program of another language, compiled first if it has a compiler (once: what was compiled is kept).

        Raises:
            Refused: the toolchain is not installed here.
        """
        program, error = -1, None
        if toolchain.compile:
            program, error = self._compiled(toolchain, code)
        if error is not None:
            return Execution(Report("", 0, 0, 0.0, 0.0, 0.0, True), b"", b"", False, error)
        worker = self.worker("native")
        order = self.order("native", limits, filter_name="native", reserves_memory=toolchain.reserves_memory)
        guest = self.start_guest(worker, order, stdin=stdin, cap_bytes=cap_bytes, program=program)
        try:
            guest.send(toolchain.run_frame(code, limits))
            guest.wait()
        finally:
            report = self.finish(worker, guest)
        return Execution(report, bytes(guest.stdout), bytes(guest.stderr), guest.overflow)

    def _compiled(self, toolchain: Toolchain, code: str) -> tuple[int, str | None]:
        key = blake2b(_encoded(f"{toolchain.compile}\0{code}")).digest()
        if key in self._artifacts:
            self._artifacts.move_to_end(key)
            return self._artifacts[key][0], None
        worker = self.worker("native")
        limits = toolchain.compile_limits
        self._groups.limit(worker, limits)
        guest = worker.run(Order("compile", "compile", limits, reserves_memory=True))
        try:
            guest.send(toolchain.compile_frame(code))
            guest.wait()
        finally:
            report = self.finish(worker, guest)
        if report.artifact < 0 or report.exit_code or report.signal or report.killed:
            if report.artifact >= 0:
                os.close(report.artifact)
            if report.killed:
                return -1, f"The compiler passed its {report.killed} limit."
            return -1, guest.stderr.decode("utf-8", "replace")[
                :2000
            ] or f"The compiler failed (signal {report.signal})."
        descriptor, size = _sealed_copy(report.artifact)
        if descriptor < 0:
            return -1, "The compiled program is too large, or no file."
        self._artifacts[key] = (descriptor, size)
        while sum(size for _, size in self._artifacts.values()) > _KEPT_ARTIFACTS_BYTES and len(self._artifacts) > 1:
            os.close(self._artifacts.popitem(last=False)[1][0])
        return descriptor, None

    def functions(
        self,
        code: str,
        limits: Limits,
        *,
        use: str = "candidate",
        artifact: bytes = b"",
        keep: bool = False,
        calls: Sequence[bytes] | None = None,
    ) -> Functions:
        """A process that has loaded ``code`` and answers calls of its functions: ``calls`` and no others, if they are given."""
        flavour = flavour_of(code)
        worker = self.worker("plain" if flavour == "bare" else flavour, use)
        return Functions(self, worker, code, limits, artifact=artifact, keep=keep, calls=calls)

    def toolchain(self, language: str) -> Toolchain:
        """Raises ``Refused`` where it is not installed."""
        found = self._toolchains.get(language)
        if found is None:
            raise Refused(
                f"No toolchain for {language} on this node: {self._toolchains.wanted(language)} was not found."
            )
        return found

    def measure(self, code: str) -> Any:
        """The readability metrics of a program's text, by a process that never runs it: decoded, and to be taken as hostile."""
        worker = self.worker("plain")
        guest = self.start_guest(worker, self.order("readability", Limits(cpu_s=2)), merge=True)
        try:
            reply = values.unpack(guest.exchange(_encoded(code)))
            return values.Decoder().decode(reply[1])
        except (Ended, values.ValueRefused, IndexError, TypeError):
            return {}
        finally:
            self.finish(worker, guest)


class Functions:
    """A candidate's functions in their own process. ``compile_error`` and ``raised`` say what loading them came to.

    When all calls are known beforehand they are sent along with the code and the process ends after the last; then most runs are over
    before anything of them has to be read here.
    """

    def __init__(
        self,
        lab: Lab,
        worker: Worker,
        code: str,
        limits: Limits,
        *,
        artifact: bytes,
        keep: bool,
        calls: Sequence[bytes] | None,
    ) -> None:
        self._lab, self._worker = lab, worker
        self.guest = lab.start_guest(worker, lab.order("functions", limits), merge=True)
        self.report: Report | None = None
        self.compile_error: str | None = None
        self.raised: str | None = None
        self.artifact = artifact
        self.compiled = bool(artifact)
        self._sent_ahead = calls is not None
        self.loaded = False
        source = (
            parts(b"code", artifact, b"") if artifact else parts(b"source", _encoded(code), b"keep" if keep else b"")
        )
        try:
            if calls is None:
                self.guest.send(source)
            else:
                self.guest.send(source, *calls, b"")
                self.guest.settle()
            self._load(artifact)
        except Ended:
            pass
        except values.ValueRefused as error:  # it wrote to the channel itself
            self.raised = f"The program's answer can't be read: {error}"
        except BaseException:
            self.finish()
            raise

    def _load(self, artifact: bytes) -> None:
        if not artifact:
            said = self.guest.receive()
            if said[:1] == b"e":
                self.compile_error = said[1:].decode("utf-8", "replace")
                return
            self.compiled, self.artifact = True, said[1:]
        reply = values.unpack(self.guest.receive())
        if reply == ["loaded"]:
            self.loaded = True
        elif isinstance(reply, list) and len(reply) == 3 and isinstance(reply[1], str) and isinstance(reply[2], str):
            self.raised = f"{reply[1][:80]}: {reply[2][:300]}"
        else:
            raise values.ValueRefused("Not a reply.")

    def call(self, frame: bytes) -> bytes:
        """One call, encoded; the encoded reply.

        Raises:
            Ended: the process ended or was stopped before it answered.
        """
        return self.guest.exchange(frame)

    def answer(self, frame: bytes) -> bytes:
        """The encoded reply to the next call, which is sent now unless all were sent before. Raises as ``call`` does."""
        return self.reply() if self._sent_ahead else self.call(frame)

    def reply(self) -> bytes:
        """The encoded reply to the next of ``calls``. Raises as ``call`` does."""
        return self.guest.receive()

    def finish(self) -> Report:
        """End the process."""
        if self.report is None:
            self.report = self._lab.finish(self._worker, self.guest)
        return self.report


def _encoded(code: str) -> bytes:
    return code.encode("utf-8", "surrogatepass")


def _sealed_copy(artifact: int) -> tuple[int, int]:
    """A private, unchangeable copy of a file that came out of a sandbox; closes it. ``(-1, 0)``: no regular file, or too large."""
    try:
        status = os.fstat(artifact)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_ARTIFACT_BYTES:
            return -1, 0
        copy = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(artifact, "rb", closefd=False) as source, open(copy, "wb", closefd=False) as target:
            target.write(source.read(_MAX_ARTIFACT_BYTES))
        fcntl.fcntl(
            copy, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        )
        return copy, status.st_size
    finally:
        os.close(artifact)


def limit_verdict(report: Report, limits: Limits, *, overflow: bool, stderr: bytes = b"") -> tuple[Verdict, str] | None:
    """What the limits say of a run, in the order of SANDBOX 1.5: security, output, memory, time; ``None``: it kept them."""
    if report.signal == signal.SIGSYS:
        return Verdict.SECURITY_VIOLATION, "Killed for a forbidden system call."
    if overflow:
        return Verdict.OUTPUT_LIMIT, "More output than the limit."
    if report.killed == "memory" or report.exit_code == EXIT_MEMORY:
        return Verdict.MEMORY_LIMIT, f"More memory than {limits.memory_mib} MiB."
    if report.signal == signal.SIGKILL and not report.killed and report.memory_mib >= 0.9 * limits.memory_mib:
        return Verdict.MEMORY_LIMIT, "Killed by the kernel, out of memory."
    if report.signal in (signal.SIGABRT, signal.SIGSEGV) and (
        b"std::bad_alloc" in stderr[-4096:] or b"heap out of memory" in stderr[-8192:]
    ):
        return Verdict.MEMORY_LIMIT, f"More memory than {limits.memory_mib} MiB."
    if report.killed in ("cpu", "wall"):
        return Verdict.TIME_LIMIT, f"The {report.killed} time limit passed."
    if report.signal == signal.SIGXCPU:
        return Verdict.TIME_LIMIT, "The cpu time limit passed."
    if report.killed == "processes":
        return Verdict.RUNTIME_ERROR, f"More processes than {limits.processes}."
    return None
