"""A guest from outside: what it may use, what it used, the end of it and of all that it started. Loaded by path in a worker, as root.py is.

Little is done here before a guest ends: every page that is written to while it runs has to be copied.
"""

from __future__ import annotations

import _signal
import _socket
import os
import resource
import select
import time

import forebay_linux as linux  # the worker registers linux.py under this name

_POLL_S = 0.05  # how often the processes of a guest that may have several are counted
_READY_POLL_S = 0.02  # how often a guest is looked at that is over its wall limit and waits for a CPU
_TICKS = os.sysconf("SC_CLK_TCK")
PAGE = resource.getpagesize()


class Order:
    """One run, as the judge asks for it: ``ROLE FILTER cpu_s wall_s memory_bytes stack_bytes processes``, blank-separated.
    Negative memory is a limit of what can be written to, not of the address space."""

    def __init__(self, line: bytes) -> None:
        role, filter_name, cpu, wall, memory, stack, processes = line.decode("ascii").split()
        self.role, self.filter = role, filter_name
        self.cpu_s, self.wall_s = float(cpu), float(wall)
        self.memory_bytes, self.stack_bytes, self.processes = abs(int(memory)), int(stack), int(processes)
        self.memory_limit = resource.RLIMIT_AS if int(memory) > 0 else resource.RLIMIT_DATA
        self.first_look_s = max(0.005, min(self.cpu_s / 2, self.wall_s, _POLL_S if self.processes > 1 else 1e6))


class Usage:
    """What the processes of a guest have used that were reaped."""

    def __init__(self) -> None:
        self.cpu_s, self.rss_kib = 0.0, 0

    def add(self, usage: resource.struct_rusage) -> None:
        """One more process."""
        self.cpu_s += usage.ru_utime + usage.ru_stime
        self.rss_kib = max(self.rss_kib, usage.ru_maxrss)


class Watch:
    """The guests of one worker, one after another. ``level`` as the worker's; ``proc``: descriptor of a /proc that shows them, or -1."""

    def __init__(self, level: str, control: _socket.socket, proc: int) -> None:
        self._level, self._control, self._proc = level, control, proc
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def wait(self, order: Order, pid: int, started: float, usage: Usage) -> str:
        """Wait for the guest's end, a limit or the judge. Why it ended (``""``: by itself)."""
        pidfd = os.pidfd_open(pid)
        self._poll.register(pidfd, select.POLLIN)
        timeout_s = order.first_look_s
        waited_s = 0.0  # for a busy CPU: no time of the program's
        try:
            while True:
                for descriptor, _ in self._poll.poll(timeout_s * 1000):
                    if descriptor == pidfd:
                        return ""
                    return "judge" if self._control.recv(4096) else "gone"
                if order.processes > 1:
                    self.reap(usage, but=pid)
                    if reason := self._over_limits(order, usage):
                        return reason
                cpu_left = order.cpu_s - usage.cpu_s - time.clock_gettime(linux.cpu_clock_of(pid))
                wall_left = order.wall_s + waited_s - (time.monotonic() - started)
                if cpu_left <= 0:
                    return "cpu"
                if wall_left <= 0:
                    more_s = self._wait_for_cpu_s(pid) - waited_s
                    if more_s < 0.001 and not self._is_ready(pid):
                        return "wall"
                    waited_s += more_s
                    wall_left = max(more_s, _READY_POLL_S)
                # Half of what is left: threads may burn CPU faster than the wall clock runs.
                timeout_s = max(0.005, min(cpu_left / 2, wall_left, _POLL_S if order.processes > 1 else 1e6))
        except OSError:  # the clock of a process that has just gone
            return ""
        finally:
            self._poll.unregister(pidfd)
            os.close(pidfd)

    def _over_limits(self, order: Order, usage: Usage) -> str:
        """The limits of several processes together, as far as /proc shows them."""
        if self._level != "namespaces" or self._proc < 0:
            return ""
        cpu_s, resident, count = usage.cpu_s, 0, 0
        for name in os.listdir(self._proc):
            if not name.isdigit() or name == "1":
                continue
            try:
                after = read_proc(self._proc, f"{name}/stat").rpartition(")")[2].split()
                memory = read_proc(self._proc, f"{name}/statm").split()
            except OSError:  # it has just ended
                continue
            count += 1
            cpu_s += sum(int(ticks) for ticks in after[11:15]) / _TICKS  # utime stime cutime cstime, proc(5)
            resident += (int(memory[1]) - int(memory[2])) * PAGE  # without the pages of files and shared memory
        if count > order.processes:
            return "processes"
        if cpu_s > order.cpu_s:
            return "cpu"
        return "memory" if resident > order.memory_bytes else ""

    def _wait_for_cpu_s(self, pid: int) -> float:
        """How long the guest's main thread was ready to run and had no CPU (proc(5), schedstat), but for a wait that still goes on."""
        try:
            return int(read_proc(self._proc, f"{pid}/schedstat").split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def _is_ready(self, pid: int) -> bool:
        """Whether the guest's main thread runs, or waits for a CPU: it is no sleeper, and the CPU limit is for what it does then."""
        try:
            return read_proc(self._proc, f"{pid}/stat").rpartition(")")[2].split()[0] == "R"
        except (OSError, IndexError):
            return False

    def kill(self, pid: int) -> None:
        """The guest and all that it started."""
        try:
            os.kill(-1 if self._level == "namespaces" else pid, _signal.SIGKILL)  # -1: the pid namespace, and only that
        except (ProcessLookupError, PermissionError):
            pass

    def reap(self, usage: Usage, but: int = 0) -> None:
        """Processes that the guest left to this one, their new parent. ``but`` is alive and not to be touched."""
        while True:
            try:
                if but:
                    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                    if ended is None or ended.si_pid == but:
                        return
                elif self._level != "namespaces":
                    self._kill_children()
                pid, _, own = os.wait4(-1, os.WNOHANG if but else 0)
            except ChildProcessError:
                return
            if pid == 0:
                return
            usage.add(own)

    def _kill_children(self) -> None:
        """Where there is no pid namespace: what is left of the guest, now that this process is its parent."""
        me = os.getpid()
        for pid in read_proc(self._proc, f"{me}/task/{me}/children").split():
            os.kill(int(pid), _signal.SIGKILL)


def read_proc(proc: int, name: str) -> str:
    """The beginning of a file of /proc, given by its descriptor. Raises ``OSError`` where there is none, or no more."""
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        return os.read(descriptor, 4096).decode("ascii", "replace")
    finally:
        os.close(descriptor)
