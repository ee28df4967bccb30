"""Watches an event loop from a thread: how late it is, and whose stack holds it up.

One asyncio loop per process, and nothing may block it. When something does, the log names it while it happens.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

import structlog

log = structlog.get_logger()

PING_S = 0.25
BLOCKED_S = 1.0  # the shortest heartbeat interval in use: a loop that stands longer misses a beat
SLICE_S = 0.1  # how long the watcher sleeps at a time; when a slice takes far longer, this whole process stood still
STOOD_STILL_S = 1.0


class LoopWatch:
    """``start`` on the loop's own thread. Reports ``loop_blocked`` with a stack once a blockage, and how long it was at its end.

    Where the watcher did not run either, no stack is to blame: ``process_stood_still`` (SIGSTOP, a suspended machine), or, if the
    process burnt CPU meanwhile, a call that holds Python's lock.
    """

    def __init__(self, *, ping_s: float = PING_S, blocked_s: float = BLOCKED_S) -> None:
        self.max_lag_ms = 0.0  # since the start
        self.blocked_at = ""  # the last culprit, and for how long: short, for heartbeats
        self._ping_s, self._blocked_s = ping_s, blocked_s
        self._worst_ms = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch the running loop."""
        loop, ident = asyncio.get_running_loop(), threading.get_ident()
        self._thread = threading.Thread(target=self._watch, args=(loop, ident), name="loop-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; it is gone within a slice of 0.1 s or so, and nobody waits for it."""
        self._stop.set()

    def take_lag_ms(self) -> float:
        """The worst lag since the last call, in milliseconds."""
        worst, self._worst_ms = self._worst_ms, 0.0
        return worst

    def _watch(self, loop: asyncio.AbstractEventLoop, ident: int) -> None:
        while not self._sleep(self._stop, self._ping_s, ident)[0]:
            sent, answered = time.monotonic(), threading.Event()
            try:
                loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # the loop is closed
                return
            self._await_answer(answered, sent, ident)
            lag_ms = (time.monotonic() - sent) * 1000
            self._worst_ms = max(self._worst_ms, lag_ms)
            self.max_lag_ms = max(self.max_lag_ms, lag_ms)

    def _await_answer(self, answered: threading.Event, sent: float, ident: int) -> None:
        """Until the loop answers. Time in which this thread stood still, too, is not the loop's."""
        culprit, still_s, done = "", 0.0, False
        while not done and not self._stop.is_set():
            done, more_s = self._sleep(answered, SLICE_S, ident)
            still_s += more_s
            if not done and not culprit and time.monotonic() - sent - still_s > self._blocked_s:
                culprit = self._blame(ident)
        if culprit:
            seconds = time.monotonic() - sent - still_s
            self.blocked_at = f"{culprit} for {seconds:.1f} s"
            log.warning("loop_unblocked", seconds=round(seconds, 2), at=culprit)

    def _sleep(self, event: threading.Event, seconds: float, ident: int) -> tuple[bool, float]:
        """Wait for ``event``; whether it came, and how many seconds this thread could not run though its time was up."""
        began, cpu = time.monotonic(), time.process_time()
        came = event.wait(seconds)
        slept_s = time.monotonic() - began
        if slept_s <= seconds + STOOD_STILL_S:
            return came, 0.0
        self._stood_still(slept_s, time.process_time() - cpu, ident)
        return came, slept_s

    def _blame(self, ident: int, **facts: float) -> str:
        frame = sys._current_frames().get(ident)
        if frame is None:
            return ""
        self.blocked_at = culprit = _short(frame)
        stack = "".join(traceback.format_stack(frame)[-12:])
        log.error("loop_blocked", limit_s=self._blocked_s, at=culprit, stack=stack, **facts)
        return culprit

    def _stood_still(self, seconds: float, cpu_s: float, ident: int) -> None:
        if cpu_s > seconds / 2:
            self._blame(ident, seconds=round(seconds, 2), lock_held_s=round(cpu_s, 2))
        else:
            log.warning("process_stood_still", seconds=round(seconds, 2), cpu_s=round(cpu_s, 2))


def _short(frame: FrameType) -> str:
    """Where ``frame`` is, in one short line: ``sleep_on in services/rollout/service.py:66``."""
    code = frame.f_code
    return f"{code.co_name} in {'/'.join(Path(code.co_filename).parts[-3:])}:{frame.f_lineno}"
