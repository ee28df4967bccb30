"""How a process starts, stops and says why: signals, parent death, exit codes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from common.errors import ForebayError
from common.recorder import RECORDER

_PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with_parent(signum: int) -> None:
    """Ask the kernel to send this process ``signum`` when its parent dies (Linux): no role outlives a killed parent."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


class StopSignal:
    """SIGINT and SIGTERM as an event of the loop. A second signal ends the process at once."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.signum: int | None = None
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._on_signal, signum)

    def _on_signal(self, signum: int) -> None:
        if self.event.is_set():
            os._exit(128 + signum)
        self.signum = signum
        self.event.set()

    async def interrupts(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Await ``work``, and cancel it if a signal comes first: then True."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self.event.wait())
        try:
            await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return False
            return True
        finally:
            for each in (task, stopped):
                each.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)

    @property
    def exit_code(self) -> int:
        """0 when no signal came, else 128 + its number."""
        return 0 if self.signum is None else 128 + self.signum


def run_main(main: Callable[[], Coroutine[Any, Any, int]], *, native_threads: bool = False) -> int:
    """Run an async main to its exit code. A ``ForebayError`` is printed as its paragraph; anything else with its trace.

    Either leaves a report of the process in the run's folder, for ``forebay postmortem``. ``native_threads``: libraries of this process
    may have threads in operations that nothing ends (see ``leave``); then this doesn't return.
    """

    async def reported() -> int:
        try:
            code = await main()
        except Exception as error:  # while the loop and its tasks are still there to be looked at
            RECORDER.write(error)
            code = say(error)
        if native_threads:
            leave(code)
        return code

    try:
        return asyncio.run(reported())
    except KeyboardInterrupt:
        return 130


def say(error: Exception) -> int:
    """Print the last words of a process: the paragraph of an expected error, the trace of any other. Returns the exit code."""
    if isinstance(error, ForebayError):
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    traceback.print_exception(error)
    return 1


def leave(code: int) -> NoReturn:
    """End this process now, when all of our own is closed.

    Python would first wait for threads that sit in a broadcast or in a store's connect, which end at their own limit, and torch's native
    threads can abort an interpreter that is taken down around them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_process(error: ForebayError) -> NoReturn:
    """Say why, leave a report, and end this process now, whatever its other threads are in."""
    RECORDER.write(error)
    leave(say(error))
