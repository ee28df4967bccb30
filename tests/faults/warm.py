"""Roles without the seconds of importing torch: a process that has imported everything forks each of them.

    python -m tests.faults.warm        started by ``Nursery``; orders on stdin, news on stdout, one JSON object a line

A forked role is a process of its own, with a session of its own, and runs ``services.cli.main`` with the words of its command; only the
imports are shared. ``make faults`` starts its roles so, because importing is nine tenths of what a short run costs; its times of
recovery are therefore those of the system without the start of an interpreter, which ``bench/recovery.py`` measures.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1  # prctl(2)
START_S = 300.0  # for the first role: the imports, beside whatever else this machine does


class WarmProcess:
    """As much of ``subprocess.Popen`` as a role needs."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self._nursery = nursery

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that ended it), or None while it runs."""
        return self._nursery.code_of(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """
        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        code = self._nursery.wait_for(self.pid, timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"warm process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, signum: int) -> None:
        """To the process alone."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The warm process, seen from the suite. ``start`` is for one thread; the processes that it gives are for any."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", "tests.faults.warm")) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        atexit.register(self.close)
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)  # of orders
        self._started: dict[int, int] = {}  # order -> pid
        self._codes: dict[int, int] = {}
        self._is_over = False
        self._reader = threading.Thread(target=self._read, name="nursery", daemon=True)
        self._reader.start()

    def start(self, argv: list[str], log: str, env: Mapping[str, str]) -> WarmProcess:
        """``argv`` is as for ``Popen``, and must be ``python -m services.ROLE ...``."""
        assert self._process.stdin is not None
        number = next(self._numbers)
        with contextlib.suppress(BrokenPipeError):  # it is gone, as will be seen below
            self._process.stdin.write(json.dumps({"number": number, "argv": argv, "log": log, "env": dict(env)}) + "\n")
            self._process.stdin.flush()
        with self._changed:
            self._changed.wait_for(lambda: number in self._started or self._is_over, START_S)
            assert number in self._started, "the warm process does not start roles any more"
            return WarmProcess(self, self._started.pop(number))

    def code_of(self, pid: int) -> int | None:
        """See ``WarmProcess.poll``."""
        with self._changed:
            return self._codes.get(pid, -signal.SIGKILL if self._is_over else None)

    def wait_for(self, pid: int, timeout_s: float | None) -> int | None:
        """See ``WarmProcess.wait``; None: it runs on."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._codes or self._is_over, timeout_s)
        return self.code_of(pid)

    def close(self) -> None:
        """End the warm process; its children die with it."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # of an order that it did not read
                    pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            news = json.loads(line)
            with self._changed:
                if "code" in news:
                    self._codes[news["pid"]] = news["code"]
                else:
                    self._codes.pop(news["pid"], None)  # of an earlier process of this number
                    self._started[news["number"]] = news["pid"]
                self._changed.notify_all()
        with self._changed:
            self._is_over = True  # and all that it had started die with it
            self._changed.notify_all()


_nursery: list[Nursery] = []


def nursery() -> Nursery:
    """This process's one, started when it is first asked for."""
    if not _nursery:
        _nursery.append(Nursery())
    return _nursery[0]


# ---- the warm process itself ----


def main() -> None:
    """Fork what is ordered, and tell of each end, until stdin closes."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the suite, which ends the roles
    _import_all()
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data is not None:  # a child's pidfd
                selector.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(key.data, 0)
                _tell({"pid": key.data, "code": os.waitstatus_to_exitcode(status)})
                continue
            line = sys.stdin.readline()
            if not line:
                return
            order = json.loads(line)
            pid = os.fork()
            if pid == 0:
                selector.close()
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                _become(order)
            _tell({"number": order["number"], "pid": pid})  # before its end can be told
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)


def _import_all() -> None:
    import importlib

    for name in (
        "torch.distributed",
        "services.learner.service",
        "services.learner.fake_policy",
        "services.rollout.service",
        "services.rollout.fake_engine",
        "services.reward.service",
        "services.coordinator.service",
        "services.cli",
    ):
        importlib.import_module(name)


def _tell(news: dict[str, Any]) -> None:
    print(json.dumps(news), flush=True)


def _become(order: dict[str, Any]) -> None:
    """The role's process. Ends as an interpreter does that was started for it."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(order["env"])
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    _, _, module, *words = order["argv"]
    from services.cli import main as cli

    raise SystemExit(cli([module.removeprefix("services."), *words]))


if __name__ == "__main__":
    main()
