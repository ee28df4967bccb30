"""The sandboxes of one judge: workers by what they have imported, started when first needed, recycled, and one self-test each."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from common.errors import ConfigError
from protocol.suites import Limits
from services.reward import self_test
from services.reward.artifacts import Artifacts
from services.reward.config import RewardConfig
from services.reward.functions import Functions
from services.reward.languages import Toolchain, Toolchains
from services.reward.sandbox import values
from services.reward.sandbox.cgroups import WorkerGroups
from services.reward.sandbox.control import CannotStart, Ended, Filter, Level, Order, Report, Role
from services.reward.sandbox.flavours import flavour_of
from services.reward.sandbox.host import Worker, start_worker
from services.reward.sandbox.streams import Guest, python_program

log = structlog.get_logger()
LEVELS: tuple[Level, ...] = ("namespaces", "landlock")
_RUNS_PER_WORKER = 5000  # then a fresh one, so that nothing can pile up in it


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
        self._artifacts = Artifacts()
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
        self._artifacts.close()

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
        run = self._run_python(worker, python_program(self_test.PROBE), self_test.LIMITS, canary.encode())
        isolated = worker.level != "none"
        if problem := self_test.problem(run.report.exit_code, run.stdout, run.stderr, isolated=isolated):
            raise ConfigError(problem)

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
        frame = python_program(code, artifact, keep=keep)
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
        """Descriptor of the compiled program, or -1 and why there is none."""
        kept = self._artifacts.get(toolchain, code)
        if kept is not None:
            return kept, None
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
            said = guest.stderr.decode("utf-8", "replace")[:2000]
            return -1, said or f"The compiler failed (signal {report.signal})."
        kept = self._artifacts.keep(toolchain, code, report.artifact)
        return (-1, "The compiled program is too large, or no file.") if kept is None else (kept, None)

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
        guest = self.start_guest(worker, self.order("functions", limits), merge=True)
        finish = partial(self.finish, worker, guest)
        return Functions(guest, finish, code, artifact=artifact, keep=keep, calls=calls)

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
            reply = values.unpack(guest.exchange(code.encode("utf-8", "surrogatepass")))
            return values.Decoder().decode(reply[1])
        except (Ended, values.ValueRefused, IndexError, TypeError):
            return {}
        finally:
            self.finish(worker, guest)
