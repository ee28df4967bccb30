"""What a process knows of itself when something goes wrong: its last log lines, open waits and stacks, as one report.

A role that ends with an error leaves its report in ``RUN/reports``; the coordinator asks the others for theirs when it fails the run;
``forebay postmortem`` gathers them. One recorder per process, like its log: ``RECORDER``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError, ForebayError
from common.scrub import scrub_config, scrub_text
from common.waits import WaitTable

RING_LINES = 500
MAX_LINE = 2000  # characters of one log line in a report
MAX_TRACE = 50_000  # characters, the end of it
MAX_REPORT_BYTES = 1 << 20
_PACKAGES = {"torch": "torch", "vllm": "vllm", "megatron": "megatron-core", "zmq": "pyzmq", "numpy": "numpy"}


class Recorder:
    """See the module. ``describe`` says whose process this is; until then there is nowhere to write to."""

    def __init__(self) -> None:
        self.role = ""
        self.node_id = ""
        self.waits = WaitTable()
        self.facts: Callable[[], dict[str, Any]] = dict  # the role's own part of a report
        self._run_dir: Path | None = None
        self._config: dict[str, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = False
        self._ring: deque[dict[str, Any]] = deque(maxlen=RING_LINES)

    def keep(self, _logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """A structlog processor: remembers the event and passes it on."""
        self._ring.append(dict(event))
        return event

    def describe(
        self,
        role: str,
        *,
        run_dir: Path | None = None,
        config: dict[str, Any] | None = None,
        node_id: str = "",
        waits: WaitTable | None = None,
    ) -> None:
        """Fill in what is known by now. ``config`` is the whole resolved config as plain data; called on the loop's thread."""
        self.role = role
        self.node_id = node_id or self.node_id or role
        self._run_dir = run_dir or self._run_dir
        self._config = config or self._config
        self.waits = waits or self.waits
        with contextlib.suppress(RuntimeError):  # before there is a loop
            self._loop = asyncio.get_running_loop()

    @property
    def path(self) -> Path | None:
        """Where this process's report goes; None where the run's folder is not on this host."""
        if self._run_dir is None or not self._run_dir.is_dir():
            return None
        return self._run_dir / "reports" / f"{Path(self.node_id).name}-{os.getpid()}.json"

    def report(self, error: BaseException | None = None) -> dict[str, Any]:
        """Everything, as plain data without secrets. Times are seconds; ``at`` is since the epoch."""
        now = time.monotonic()
        report = {
            "role": self.role,
            "node_id": self.node_id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "at": time.time(),
            "argv": [scrub_text(word) for word in sys.argv],
            "error": None if error is None else _paragraph(error),
            "traceback": None if error is None else scrub_text("".join(traceback.format_exception(error))[-MAX_TRACE:]),
            "waits": [
                {
                    "what": wait.what,
                    "on": wait.on,
                    "age_s": now - wait.since,
                    "deadline_s": wait.deadline - wait.since,
                    "limit_key": wait.limit_key,
                }
                for wait in self.waits.snapshot()
            ],
            "threads": stacks(),
            "tasks": _tasks(self._loop),
            "versions": versions(),
            "config": scrub_config(self._config),
            "log": [
                scrub_text(json.dumps(event, default=str)[: 2 * MAX_LINE])[:MAX_LINE] for event in list(self._ring)
            ],  # a copy: others go on logging
        }
        with contextlib.suppress(Exception):  # the role's own part may be what is broken; the rest is worth having
            report["facts"] = self.facts()
        return report

    def report_bytes(self, error: BaseException | None = None) -> bytes:
        """The report as JSON of at most ``MAX_REPORT_BYTES``: the oldest log lines go first."""
        report = self.report(error)
        while len(data := json.dumps(report, indent=1, default=str).encode()) > MAX_REPORT_BYTES:
            for name in ("log", "tasks", "facts", "config"):
                if report.get(name):
                    report[name] = report[name][len(report[name]) // 2 + 1 :] if name == "log" else None
                    break
            else:
                return data[:MAX_REPORT_BYTES]
        return data

    def write(self, error: BaseException | None = None) -> Path | None:
        """Leave the report in the run's folder, if that is here. Never raises: the process has worse to tell."""
        try:
            path = self.path
            if path is None or self._ended or isinstance(error, ConfigError):  # that one ended before it began
                return None
            self._ended = error is not None  # the first error is the one that counts
            return write_atomically(path, self.report_bytes(error))
        except Exception as problem:  # see above; what is lost is the report
            print(f"The report of this process could not be written: {problem}", file=sys.stderr, flush=True)
            return None


RECORDER = Recorder()


def write_atomically(path: Path, data: bytes) -> Path:
    """``data`` in a file of ``path``'s name that is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(data)
    partial.rename(path)
    return path


def stacks() -> dict[str, str]:
    """The stack of every thread of this process, by its name."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, 'unknown')} ({ident})": "".join(traceback.format_stack(frame)[-30:])
        for ident, frame in sys._current_frames().items()
    }


@functools.cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def versions() -> dict[str, str]:
    """Versions of Python, Forebay and what this process has loaded; nothing is imported for it."""
    loaded = {package: _version(package) for module, package in _PACKAGES.items() if module in sys.modules}
    return {"python": platform.python_version(), "forebay": _version("forebay"), **loaded}


def _paragraph(error: BaseException) -> str:
    return scrub_text(str(error) if isinstance(error, ForebayError) else f"{type(error).__name__}: {error}")


def _tasks(loop: asyncio.AbstractEventLoop | None) -> list[str]:
    """Where each task of the loop is suspended, from any thread."""
    if loop is None:
        return []
    for _ in range(5):
        with contextlib.suppress(RuntimeError):  # the set of tasks changed meanwhile
            tasks = asyncio.all_tasks(loop)
            return [
                f"{task.get_name()}: "
                + " <- ".join(
                    f"{frame.f_code.co_name} {'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno}"
                    for frame in reversed(task.get_stack(limit=8))
                )
                for task in tasks
            ]
    return []
