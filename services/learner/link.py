"""The learner's line to the coordinator: an event loop in a thread of its own, with blocking calls for the training loop.

Training blocks its thread for seconds; the heartbeats of the channel must go on meanwhile. Only rank 0 has a link.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

from common.errors import PeerError
from common.waits import WaitTable
from protocol import messages as m
from protocol.channel import NodeChannel
from protocol.codec import Received
from protocol.config import RunConfig
from protocol.weights import abort_group

log = structlog.get_logger()

T = TypeVar("T")


class Link:
    """Joins on construction. All methods block the caller; ``next_work`` and the sync calls end early on a stop."""

    def __init__(self, run: RunConfig, *, checkpoint_step: int, node_id: str = "") -> None:
        """Join the run.

        Raises:
            PeerError: no coordinator within ``run.join_timeout_s``, or it refuses this learner.
        """
        self.run = run
        self.waits = WaitTable()
        self.counters: dict[str, float] = {}
        self._plan: m.SyncPlan | None = None  # of the last update
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._thread.start()
        self._stop = self._call(self._make_event())
        self._node_id = node_id or f"learner-{socket.gethostname()}-{os.getpid()}"
        self.welcome = self._call(self._join(checkpoint_step))

    async def _make_event(self) -> asyncio.Event:
        return asyncio.Event()

    async def _join(self, checkpoint_step: int) -> m.Welcome:
        self._channel = NodeChannel(
            self.run.address,
            self.run.id,
            role="learner",
            node_id=self._node_id,
            waits=self.waits,
            keys=self.run.read_keys(),
        )
        self._channel.hello_fields = lambda: {"checkpoint_step": checkpoint_step}
        self._channel.beat_fields = lambda: {"counters": self.counters}
        self._pushes = asyncio.create_task(self._watch_pushes())
        return await self._channel.start(join_timeout_s=self.run.join_timeout_s)

    async def _watch_pushes(self) -> None:
        while True:
            message = (await self._channel.pushes.get()).message
            if isinstance(message, m.Shutdown):
                log.info("shutdown", reason=message.reason)
                self._stop.set()
            elif isinstance(message, m.SyncAborted):
                log.warning("sync_aborted", reason=message.reason)
                await self._call_off(message)

    async def _call_off(self, aborted: m.SyncAborted) -> None:
        """The training thread, or another rank's, may sit in a broadcast that will never end by itself."""
        plan = self._plan
        if plan is None or plan.sync_id != aborted.sync_id or not plan.members:
            return
        try:
            await asyncio.to_thread(
                abort_group, plan.stores, plan.group_key, aborted.reason, timeout_s=self.run.sync_timeout_s
            )
        except RuntimeError as error:  # a rank of ours is gone, and torchrun ends the others
            log.warning("sync_abort_failed", error=str(error))

    def stop_on_signals(self) -> None:
        """SIGINT and SIGTERM end the loop after the step at hand; a second one ends the process. Main thread only."""

        def on_signal(signum: int, _frame: Any) -> None:
            if self.signum is not None:  # not ``_stop``: the coordinator sets that, too
                os._exit(128 + signum)
            self.signum = signum
            self._loop.call_soon_threadsafe(self._stop.set)

        self.signum: int | None = None
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, on_signal)

    def next_work(self, step: int) -> Received | None:
        """The answer to ``BatchRequest(step)``: Batch, Resync or EndOfData. None: stop."""
        return self._call(self._next_work(step))

    async def _next_work(self, step: int) -> Received | None:
        with self.waits.named(f"the batch of step {step}", on="coordinator"):
            return await self._or_stop(self._channel.request(m.BatchRequest(step=step)))

    def ask(self, message: m.Message, *, what: str, timeout_s: float) -> m.Message:
        """Send and await the answer.

        Raises:
            WaitTimeout: none within ``timeout_s``.
            PeerError: refused, or the coordinator is gone.
        """
        request: Callable[[], Coroutine[Any, Any, Received]] = lambda: self._channel.request(message)  # noqa: E731
        received = self._call(
            self.waits.wait_for(request(), what, on="coordinator", timeout_s=timeout_s, limit_key="run.sync_timeout_s")
        )
        if isinstance(received.message, m.SyncPlan):
            self._plan = received.message
        return received.message

    def close(self, reason: str) -> None:
        """Say goodbye and end the thread."""

        async def leave() -> None:
            self._pushes.cancel()
            await self._channel.close(reason)

        self._call(leave())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _or_stop(self, request: Coroutine[Any, Any, T]) -> T | None:
        work = asyncio.create_task(request)
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait([work, stop, self._channel.failed], return_when=asyncio.FIRST_COMPLETED)
        try:
            if work.done():
                return work.result()
            if self._channel.failed.done():
                raise self._channel.failed.exception() or PeerError("The coordinator is gone.")
            return None
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
