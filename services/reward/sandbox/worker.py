"""The worker: a clean interpreter that isolates itself once and then forks one guest per job. Run by path, never imported.

``python -s -B worker.py LEVEL FD``. FD is a SOCK_SEQPACKET socket to the judge. In: ``{"role", "cpu_s", "wall_s", "memory_mib",
"output_kib"}`` with the guest's channel as a descriptor, or ``kill``. Out: first ``{"ready": level}`` or ``{"error": why}``, then one
report per job, measured here and not by the guest. The worker holds no tests and no code; those go over the channel, past it.
The judge's end closing (the node left or was killed) ends the worker, and with it, as PID 1, everything inside.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib.util
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"forebay_{name}", os.path.join(_HERE, f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
_load("values")
linux = _load("linux")
root = _load("root")
guest = _load("guest")

# Imported once here, so that a job pays nothing for them.
_PRELUDE = (
    "abc array bisect collections collections.abc copy dataclasses datetime decimal enum fractions functools hashlib heapq inspect "
    "io itertools json math operator random re statistics string textwrap time traceback types typing unicodedata"
)
_MIB = 1 << 20
_NICE_EXIT_S = 2.0


class Worker:
    """Runs jobs one after another. ``level`` is ``namespaces``, ``landlock`` or ``none``."""

    def __init__(self, level: str, control: socket.socket, baseline_bytes: int) -> None:
        self.level = level
        self.control = control
        self.baseline_bytes = baseline_bytes
        self.ruleset = -1
        self.program = b""
        if level == "namespaces":
            self.box = root.BOX
            root.fresh_box(first=True)
        else:
            self.box = tempfile.mkdtemp(prefix="forebay-box-")
        if level != "none":
            self.program = linux.seccomp_program(deny_signals=level == "landlock")
        if level == "landlock":
            devices = [f"/dev/{name}" for name in root._DEVICES]
            self.ruleset = linux.landlock_ruleset(root.library_paths() + devices, self.box)

    def serve(self) -> None:
        """Jobs until the judge goes away."""
        while True:
            message, descriptors, _, _ = socket.recv_fds(self.control, 4096, 1)
            if not message:
                return
            if message == b"kill":  # crossed with the report of a job that ended by itself
                continue
            report = self.run(json.loads(message), descriptors[0])
            if report is None:
                return
            self.control.send(json.dumps(report).encode())

    def run(self, job: dict[str, Any], channel: int) -> dict[str, Any] | None:
        """One job: fork, watch, kill, reap, clean. ``None`` when the judge went away meanwhile."""
        out_r, out_w = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._become_guest(job, channel, out_w)
        os.close(channel)
        os.close(out_w)
        started = time.monotonic()
        killed, written = self._watch(job, pid, out_r, started)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._kill_the_rest(pid)
        _, status, usage = os.wait4(pid, 0)
        with contextlib.suppress(ChildProcessError):
            while self.level == "namespaces":
                os.waitpid(-1, 0)
        wall_s = time.monotonic() - started
        os.close(out_r)
        self._clean_box()
        if killed == "gone":
            return None
        return {
            "killed": killed,
            "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
            "exit": os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "wall_s": wall_s,
            "memory_mib": usage.ru_maxrss / 1024,
            "output_bytes": written,
        }

    def _watch(self, job: dict[str, Any], pid: int, out_r: int, started: float) -> tuple[str, int]:
        """Drain the output and wait for the guest's end, a limit or the judge. Why it ended (``""``: by itself) and bytes written."""
        written, cap = 0, int(job["output_kib"]) * 1024
        clock = linux.cpu_clock_of(pid)
        pidfd = os.pidfd_open(pid)
        poll = select.poll()
        for descriptor in (self.control.fileno(), out_r, pidfd):
            poll.register(descriptor, select.POLLIN)
        try:
            while True:
                cpu_left = job["cpu_s"] - time.clock_gettime(clock)
                wall_left = job["wall_s"] - (time.monotonic() - started)
                if cpu_left <= 0:
                    return "cpu", written
                if wall_left <= 0:
                    return "wall", written
                # Half of what is left: threads may burn CPU faster than the wall clock runs.
                events = dict(poll.poll(max(5, int(1000 * min(cpu_left / 2, wall_left)))))
                if out_r in events:
                    data = os.read(out_r, 65536)
                    written += len(data)
                    if not data:
                        poll.unregister(out_r)
                    if written > cap:
                        return "output", written
                if self.control.fileno() in events:
                    return ("judge" if self.control.recv(4096) else "gone"), written
                if pidfd in events and out_r not in events:
                    return "", written
        except OSError:  # the clock of a process that has just gone
            return "", written
        finally:
            os.close(pidfd)

    def _kill_the_rest(self, pid: int) -> None:
        if self.level == "namespaces" and os.getpid() == 1:  # -1 is everything inside the pid namespace, and only there
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        elif self.level == "none":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def _clean_box(self) -> None:
        if self.level == "namespaces":
            root.fresh_box()
            return
        for name in os.listdir(self.box):
            path = os.path.join(self.box, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)

    def _become_guest(self, job: dict[str, Any], channel: int, out_w: int) -> None:
        """In the fork: descriptors, limits, privileges, filters; then the guest's own loop. Never returns."""
        code = 70
        try:
            os.setpgid(
                0, 0
            )  # a session of its own would be a scheduler group (sched(7), autogroup): late on a busy node
            self._arrange_descriptors(channel, out_w)
            os.chdir(self.box)
            os.environ.update(HOME=self.box, TMPDIR=self.box)
            tempfile.tempdir = None  # this process has asked for the host's
            self._limit(job)
            linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
            if self.level != "none":
                linux.drop_capabilities()
            if self.ruleset >= 0:
                linux.install_landlock(4)
                os.close(4)
            if self.program:
                linux.install_seccomp(self.program)
            serve = guest.run_tests if job["role"] == "tests" else guest.serve_candidate
            serve(guest.Channel(socket.socket(fileno=3)))
            code = 0
        except BaseException:  # a guest that failed says so by its exit code; the judge knows what it asked for
            pass
        finally:
            os._exit(code)

    def _arrange_descriptors(self, channel: int, out_w: int) -> None:
        """0 reads nothing, 1 and 2 are the output, 3 is the channel, 4 the Landlock ruleset if there is one. No others."""
        wanted = [os.open("/dev/null", os.O_RDONLY), out_w, out_w, channel]
        if self.ruleset >= 0:
            wanted.append(self.ruleset)
        copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64) for descriptor in wanted]  # out of each other's way first
        for target, source in enumerate(copies):
            os.dup2(source, target)
        linux.close_other_descriptors(len(copies))

    def _limit(self, job: dict[str, Any]) -> None:
        memory = self.baseline_bytes + int(job["memory_mib"]) * _MIB
        seconds = int(job["cpu_s"]) + 2  # a backstop: the worker's own watch is finer
        limits = [(resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_CORE, 0)]
        limits += [(resource.RLIMIT_FSIZE, 32 * _MIB), (resource.RLIMIT_NOFILE, 256)]
        if self.level == "namespaces":  # elsewhere it would count all processes of this user
            limits.append((resource.RLIMIT_NPROC, 64))
        for which, value in limits:
            hard = resource.getrlimit(which)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (value, value))


def _address_space_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _ignore_signals() -> None:
    """A PID 1 takes no signal from inside that it has no handler for, so it must have none (Python installs one for SIGINT)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL if os.getpid() == 1 else signal.SIG_IGN)


def _fork_init() -> None:
    """Return in the child, PID 1 of the new pid namespace. The parent waits for it and leaves with it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(write)
        os.read(read, 1)  # the parent is alive after the line above, or this pipe says it is not
        os.close(read)
        return
    os.write(write, b".")
    for descriptor in (read, write, int(sys.argv[2])):
        os.close(descriptor)
    _, status = os.waitpid(pid, 0)
    os._exit(0 if status == 0 else 1)


def main() -> None:
    """Isolate, say so, serve."""
    level, control = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    for name in _PRELUDE.split():
        importlib.import_module(name)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # when the node runs out of memory, the kernel takes a candidate, not the judge
    worker = None
    try:
        baseline = _address_space_bytes()
        if level == "namespaces":
            root.enter_namespaces()
            _fork_init()
        _ignore_signals()
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
        worker = Worker(level, control, baseline)
        box = None if level == "namespaces" else worker.box
        control.send(json.dumps({"ready": level, "box": box}).encode())
        gc.collect()
        gc.freeze()
        worker.serve()
    except (OSError, KeyError) as error:
        with contextlib.suppress(OSError):
            control.send(json.dumps({"error": str(error)}).encode())
    finally:
        if worker is not None and level != "namespaces":
            shutil.rmtree(worker.box, ignore_errors=True)


main()
