"""The worker: a clean interpreter that isolates itself once and then forks one guest per run. Never imported.

``python -S -s -B -c BOOT LEVEL FD BOX MODULES PATHS PROGRAMS``. BOOT (in ``host.py``) reads this file and those beside it as code objects,
made by another process of the same interpreter: what a compiler leaves behind in memory would be copied for every guest. FD is a
SOCK_SEQPACKET socket to the judge; BOX the guests' folder (of the host, at level ``landlock`` and ``none``); MODULES are imported here, so
that guests have them for nothing; PATHS (with colons) are readable besides the interpreter's own; PROGRAMS (with blanks) may be executed by
guests that are programs themselves.

In: first the seccomp programs, one message each; then lines (``watch.Order``) with the guest's descriptors, or ``kill``. Out: first
``ready HAS_LANDLOCK HAS_PROC`` or ``error WHY``, then one report line a run, measured here and not by the guest: ``why it was killed,
signal, exit code, cpu_s, wall_s, rss_kib, whether the box is clean``. The worker holds no tests and no code: those go over the guest's own
descriptors, past it. The judge's end closing ends the worker, and with it, as PID 1, everything inside.

Every page of this process is copied for every guest, so it imports as little as it can.
"""

from __future__ import annotations

import _signal  # ``signal`` and ``socket`` would bring ``enum``, ``selectors`` and more along
import _socket
import gc
import os
import resource
import sys
import time

_FIRST_FREE = 5  # guests have 0 to 4 at most
_THREADS = 20  # of a guest that may have several processes
_STACK_BYTES = 64 << 20  # the default of a suite
_WARM_UPS = 20  # runs of the guest's code before the first fork: what the interpreter caches then need not be copied by each guest


def _load(name: str) -> object:
    """One of the files beside this one, as the module ``forebay_NAME``."""
    module = type(sys)(f"forebay_{name}")
    sys.modules[module.__name__] = module
    exec(globals()["codes"].pop(name), module.__dict__)  # our own source, see above
    return module


def main() -> None:
    """Isolate, say so, serve."""
    level, number, box, modules, paths, executables = sys.argv[1:7]
    while (spare := os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)) < _FIRST_FREE:
        pass  # nothing of ours must lie where a guest's descriptors go
    os.dup2(int(number), spare, inheritable=False)
    os.close(int(number))
    if int(number) < _FIRST_FREE:
        os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    control = _socket.socket(fileno=spare)
    filters = [_receive(control)[0] for _ in range(5)]
    _finish_interpreter()
    for name in modules.split():
        try:
            __import__(name)
        except ImportError:  # numpy, where the interpreter has none
            pass
    _write_oom_score()
    readable = root.library_paths(paths.split(":"))
    try:
        if level == "namespaces":
            root.enter_namespaces(readable)
            _fork_init(spare)
            box = root.BOX
            proc = root.open_proc()
            root.mount_box()
        else:
            proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        _ignore_signals()
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
        os.environ.pop("LD_BIND_NOW", None)
        os.chdir(box)
        os.environ.update(HOME=box, TMPDIR=box)
        _warm_up()
        worker = Worker(level, control, box, filters, proc)
        _limit_worker(level)
        has_landlock = worker.confine(readable, executables.split())
        control.send(f"ready {int(has_landlock)} {int(proc >= 0)}".encode())
        gc.collect()
        linux.trim_heap()
        gc.freeze()
        worker.serve()
    except (OSError, KeyError) as error:
        try:
            control.send(f"error {error}".encode())
        except OSError:  # nobody is there to hear it
            pass
    finally:
        if level != "namespaces":
            try:
                root.wipe(box)
                os.chdir("/")
                os.rmdir(box)
            except OSError:  # the judge removes what is left
                pass


def _finish_interpreter() -> None:
    """What ``site`` does for an interpreter, without the ``.pth`` files of installed packages, which may import anything."""
    import site

    site.setquit()
    site.setcopyright()
    site.sethelper()
    sys.path += [path for path in site.getsitepackages() if os.path.isdir(path)]


def _write_oom_score() -> None:
    """When the node runs out of memory, the kernel takes a candidate, not the judge."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")
    except OSError:
        pass


def _fork_init(control: int) -> None:
    """Return in the child, PID 1 of the new pid namespace. The parent waits for it and leaves with it."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        linux.prctl(linux.PR_SET_PDEATHSIG, _signal.SIGKILL)
        os.close(write)
        os.read(read, 1)  # the parent is alive after the line above, or this pipe says it is not
        os.close(read)
        return
    os.write(write, b".")
    for descriptor in (read, write, control):
        os.close(descriptor)
    _, status = os.waitpid(pid, 0)
    os._exit(0 if status == 0 else 1)


def _ignore_signals() -> None:
    """A PID 1 takes no signal from inside that it has no handler for, so it must have none (Python installs one for SIGINT)."""
    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP):
        _signal.signal(number, _signal.SIG_DFL if os.getpid() == 1 else _signal.SIG_IGN)


def _warm_up() -> None:
    """Run small programs here, a few times, over descriptors that lead nowhere."""
    program = _frame(_frame(b"source") + _frame(b"import sys\nprint(end='')") + _frame(b""))
    functions = _frame(_frame(b"source") + _frame(b"def f(a):\n    return [a, 1.5]") + _frame(b""))
    call = _frame(b'["call","f",["t",[3]],["d",[]],[]]')
    roles = [(guest.run_program, program)]
    if "forebay_values" in sys.modules:
        roles.append((guest.serve_functions, functions + call + _frame(b"")))
    # What ends an interpreter must not run in this one: guests would find threading shut down, and join no thread at their end.
    hidden = {name: sys.modules.pop(name) for name in ("threading", "atexit") if name in sys.modules}
    for role, frames in roles * _WARM_UPS:
        mine, theirs = _socket.socketpair()
        os.dup2(theirs.fileno(), guest.CHANNEL)
        mine.send(frames)
        role()
        os.dup2(0, guest.CHANNEL, inheritable=False)  # keeps the number taken
        mine.close()
        theirs.close()
    sys.modules.pop("solution", None)
    sys.modules.update(hidden)
    gc.collect()


def _frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def _limit_worker(level: str) -> None:
    """Limits that are the same for all guests, which inherit them."""
    limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, root.BOX_BYTES), (resource.RLIMIT_NOFILE, 256)]
    if level == "namespaces":  # elsewhere it would count all processes and threads of this user
        limits.append((resource.RLIMIT_NPROC, 128))
    for which, value in limits:
        _limit(which, value, value)
    _limit(resource.RLIMIT_STACK, _STACK_BYTES)


class Worker:
    """Runs guests one after another. ``level`` is ``namespaces``, ``landlock`` or ``none``."""

    def __init__(self, level: str, control: _socket.socket, box: str, programs: list[bytes], proc: int) -> None:
        self.level, self.control, self.box, self.proc = level, control, box, proc
        made = [linux.SeccompProgram(program) for program in programs]
        self.base, self.no_signals = made[0], made[4]
        self.filters = dict(zip(("guest", "processes", "native"), made[1:4], strict=True))
        self.rulesets: dict[str, int] = {}
        self.watch = watch.Watch(level, control, proc)
        pages = int(watch.read_proc(proc, f"{os.getpid()}/statm").split()[0]) if proc >= 0 else 0
        self.baseline_bytes = pages * watch.PAGE or 1 << 28
        self.empty_inodes = os.statvfs(box).f_ffree if level == "namespaces" else -1

    # ---- isolation of the worker itself ----

    def confine(self, readable: list[str], programs: list[str]) -> bool:
        """The filters that lie under all guests; whether Landlock is among them.

        Raises:
            OSError: a filter can't be had that this level is not safe without.
        """
        if self.level == "none":
            return False
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        devices = [f"/dev/{name}" for name in root.DEVICES if os.path.exists(f"/dev/{name}")]
        has_landlock = linux.landlock_abi() >= 3
        if not has_landlock and self.level == "landlock":
            raise OSError(f"Landlock ABI {linux.landlock_abi()}: 3 is needed where there are no user namespaces")
        if has_landlock:
            libraries = [path for path in readable if "/lib" in path] if programs else []  # the loader is among them
            self.rulesets["run"] = linux.landlock_ruleset(readable, libraries + programs[:1], devices, self.box)
            self.rulesets["compile"] = linux.landlock_ruleset(readable, readable + programs, devices, self.box)
        if self.level == "namespaces":
            linux.drop_capabilities()
            self.base.install()
            if has_landlock and not programs:  # guests that may execute something get theirs one by one
                if self.proc >= 0:
                    linux.landlock_add(self.rulesets["run"], self.proc)
                linux.install_landlock(self.rulesets["run"])
                for ruleset in self.rulesets.values():
                    os.close(ruleset)
                self.rulesets.clear()
        return has_landlock

    # ---- serving ----

    def serve(self) -> None:
        """Runs until the judge goes away."""
        while True:
            line, descriptors = _receive(self.control)
            if not line:
                return
            if line == b"kill":  # crossed with the report of a run that ended by itself
                continue
            result = self.run(watch.Order(line), descriptors)
            if result is None:
                return
            report, artifact = result
            if artifact < 0:
                self.control.send(report)
            else:
                rights = artifact.to_bytes(4, sys.byteorder)
                self.control.sendmsg([report], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
                os.close(artifact)

    def run(self, order: watch.Order, descriptors: list[int]) -> tuple[bytes, int] | None:
        """One guest: fork, watch, kill, reap, clean; the report, and the compiled program of a compiler run (else -1). ``None``
        when the judge went away meanwhile."""
        started = time.monotonic()
        usage = watch.Usage()
        pid = os.fork()
        if pid == 0:
            self._become_guest(order, descriptors)
        killed = self.watch.wait(order, pid, started, usage)
        for descriptor in descriptors:
            os.close(descriptor)
        self.watch.kill(pid)
        _, status, own = os.wait4(pid, 0)
        usage.add(own)
        self.watch.reap(usage)
        wall_s = time.monotonic() - started
        if killed == "gone":
            return None
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
        artifact = self._open_artifact() if order.role == "compile" and not killed else -1
        clean = self._clean_box(artifact)
        report = f"{killed or '-'} {number} {code} {usage.cpu_s:.6f} {wall_s:.6f} {usage.rss_kib} {int(clean)}".encode()
        return report, artifact

    def _open_artifact(self) -> int:
        """The compiled program in the box, or -1: opened from inside and never through a link; the judge looks at what it is."""
        try:
            return os.open(os.path.join(self.box, "main"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return -1

    def _clean_box(self, artifact: int) -> bool:
        """Empty the box; whether that worked. If it did not, the worker must not be used again."""
        if self.level == "namespaces" and os.statvfs(self.box).f_ffree == self.empty_inodes:
            return True
        try:
            root.wipe(self.box)
        except OSError:
            return False
        held = artifact >= 0  # a file that is open still counts
        return self.level != "namespaces" or os.statvfs(self.box).f_ffree + held == self.empty_inodes

    # ---- the guest ----

    def _become_guest(self, order: watch.Order, descriptors: list[int]) -> None:
        """In the fork: limits, privileges, filters, descriptors; then the guest's own part. Never returns."""
        code = guest.EXIT_FAILED
        try:
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)  # as a program finds them
            _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)
            _signal.signal(_signal.SIGHUP, _signal.SIG_DFL)
            if self.level != "namespaces":
                # Not a session: that would be a scheduler group (sched(7), autogroup), late on a busy node.
                os.setpgid(0, 0)
            self._limit(order)
            if self.level == "landlock":
                linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
                linux.drop_capabilities()
            if self.rulesets:
                linux.install_landlock(self.rulesets["compile" if order.filter == "compile" else "run"])
            for target, descriptor in enumerate(descriptors):
                os.dup2(descriptor, target, inheritable=target < 3)
            os.closerange(len(descriptors), 1 << 16)
            if self.level == "landlock":
                self.base.install()
                if linux.landlock_abi() < 6:  # else Landlock keeps signals inside
                    self.no_signals.install()
            if self.level != "none" and order.filter != "compile":
                self.filters[order.filter].install()
            code = guest.ROLES[order.role]()
        except BaseException:  # a guest that failed says so by its exit code; the judge knows what it asked for
            pass
        finally:
            os._exit(code)

    def _limit(self, order: watch.Order) -> None:
        seconds = int(order.cpu_s) + 2  # a backstop: the worker's own watch is finer
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        memory = self.baseline_bytes + order.memory_bytes
        if order.memory_limit == resource.RLIMIT_DATA:
            memory += 16 * order.stack_bytes  # a stack for each thread that node makes counts, used or not
        resource.setrlimit(order.memory_limit, (memory, memory))
        if order.processes > 1 and self.level == "namespaces":
            most = _THREADS + order.processes  # this worker and threads count too; processes are counted from outside
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        if order.stack_bytes != _STACK_BYTES:
            _limit(resource.RLIMIT_STACK, order.stack_bytes)


def _receive(control: _socket.socket) -> tuple[bytes, list[int]]:
    message, ancillary, _, _ = control.recvmsg(1 << 16, 64)
    raw = b"".join(data for _, _, data in ancillary)
    return message, [int.from_bytes(raw[i : i + 4], sys.byteorder) for i in range(0, len(raw) - 3, 4)]


def _limit(which: int, soft: int, hard: int | None = None) -> None:
    """At most what is allowed here anyway; without ``hard``, the hard limit stays."""
    allowed = resource.getrlimit(which)[1]
    if allowed != resource.RLIM_INFINITY:
        soft, hard = min(soft, allowed), allowed if hard is None else min(hard, allowed)
    resource.setrlimit(which, (soft, allowed if hard is None else hard))


sys.path[:] = [path for path in sys.path if path]
linux = _load("linux")
root = _load("root")
watch = _load("watch")
if len(sys.argv[4]) > 1:  # there will be functions to serve, not only programs without imports
    _load("values")
    _load("readability")
guest = _load("guest")
main()
