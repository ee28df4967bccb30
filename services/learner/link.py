"""The learner's line to the coordinator: an event loop in a thread of its own, with blocking calls for the training loop.

Training blocks its thread for seconds; the heartbeats of the channel must go on meanwhile. Only rank 0 has a link. When the training
thread sits in a wait that is overdue and that nothing can interrupt, the link ends the process, and says what it waited for.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from common.errors import PeerError, WaitTimeout
from common.lifecycle import end_process
from common.recorder import RECORDER
from common.waits import Overdue, WaitTable, expired
from protocol import messages as m
from protocol.channel import NodeChannel
from protocol.codec import Received
from protocol.config import RunConfig
from protocol.weights import abort_group

log = structlog.get_logger()

T = TypeVar("T")

END_GRACE_S = 3.0  # for the training thread to end by itself, once a wait of it is overdue
LOOK_S = 1.0  # between looks for such waits when the channel, which looks at each heartbeat, has failed


class NotYet:
    """``next_work`` without an answer so far: the question stays open."""


class Link:
    """Joins on construction. All methods block the caller; ``next_work`` and the sync calls end early on a stop."""

    def __init__(
        self,
        run: RunConfig,
        *,
        checkpoint_step: int,
        node_id: str = "",
        waits: WaitTable | None = None,
        stop_timeout_s: float = 5.0,
    ) -> None:
        """Join the run.

        Raises:
            PeerError: no coordinator within ``run.join_timeout_s``, or it refuses this learner.
        """
        self.run = run
        self.waits = waits or WaitTable()
        self.counters: dict[str, float] = {}
        self.signum: int | None = None
        self.run_stopped = ""  # the reason, once the coordinator has ended the run
        self._stop_timeout_s = stop_timeout_s
        self._plan: m.WeightUpdatePlan | None = None  # of the last update
        self._aborted: m.WeightUpdateAborted | None = None  # the last one that was
        self._work: asyncio.Task[Received] | None = None  # the open question for a batch
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._thread.start()
        self._stop, self._shutdown = self._call(self._make_events())
        self._node_id = node_id or f"learner-{socket.gethostname()}-{os.getpid()}"
        self.welcome = self._call(self._join(checkpoint_step))

    async def _make_events(self) -> tuple[asyncio.Event, asyncio.Event]:
        return asyncio.Event(), asyncio.Event()

    async def _join(self, checkpoint_step: int) -> m.Welcome:
        self._channel = NodeChannel(
            self.run.address,
            self.run.id,
            role="learner",
            node_id=self._node_id,
            waits=self.waits,
            keys=self.run.read_keys(),
        )
        RECORDER.describe("learner", run_dir=self.run.run_dir, node_id=self._node_id, waits=self.waits)
        self._channel.hello_fields = lambda: {"checkpoint_step": checkpoint_step}
        self._channel.beat_fields = lambda: {"counters": self.counters}
        self._tasks = [asyncio.create_task(self._watch_pushes()), asyncio.create_task(self._watch_failure())]
        return await self._channel.start(join_timeout_s=self.run.join_timeout_s)

    async def _watch_pushes(self) -> None:
        while True:
            message = (await self._channel.pushes.get()).message
            if isinstance(message, m.Shutdown):
                log.info("shutdown", reason=message.reason)
                self.run_stopped = message.reason or "the run is over"
                self._shutdown.set()
                self._stop.set()
            elif isinstance(message, m.WeightUpdateAborted):
                log.warning("weight_update_aborted", reason=message.reason)
                self._aborted = message
                await self._call_off(message)

    async def _watch_failure(self) -> None:
        """Who asks or waits through the link hears of a failure. Who sits in a collective or a broadcast does not: this ends it."""
        await asyncio.wait([self._channel.failed])
        error = self._channel.failed.exception()
        overdue = Overdue(self.waits)
        while not isinstance(error, WaitTimeout):  # the channel no longer looks
            await asyncio.sleep(LOOK_S)
            error = overdue.look()
        await asyncio.sleep(END_GRACE_S)
        end_process(error)

    async def _call_off(self, aborted: m.WeightUpdateAborted) -> None:
        """The training thread, or another rank's, may sit in a broadcast that will never end by itself."""
        plan = self._plan
        if plan is None or plan.update_id != aborted.update_id or not plan.members:
            return
        try:
            await asyncio.to_thread(
                abort_group, plan.stores, plan.group_key, aborted.reason, timeout_s=self.run.weight_update_timeout_s
            )
        except RuntimeError as error:  # a rank of ours is gone, and the world ends
            log.warning("weight_update_abort_failed", error=str(error))

    async def _begin(self, plan: m.WeightUpdatePlan) -> None:
        """Take part in an update. That it is off may have come before this, for pushes and answers are taken in by different tasks."""
        self._plan = plan
        if self._aborted is not None:
            await self._call_off(self._aborted)

    def stop_on_signals(self) -> None:
        """SIGINT and SIGTERM end the loop after the step at hand; a second one ends the process. Main thread only."""

        def on_signal(signum: int, _frame: Any) -> None:
            if self.signum is not None:  # not ``_stop``: the coordinator sets that, too
                os._exit(128 + signum)
            self.signum = signum
            self._loop.call_soon_threadsafe(self._stop.set)

        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, on_signal)

    @property
    def stopping(self) -> bool:
        """Whether a signal or the coordinator has asked for the end."""
        return self.signum is not None or bool(self.run_stopped)

    def next_work(self, step: int, *, within_s: float | None = None) -> Received | NotYet | None:
        """The answer to ``BatchRequest(step)``: Batch, WeightUpdateNeeded or EndOfData. None: stop.

        ``NotYet`` after ``within_s``: the request stays open, and the next call for the step goes on waiting for it.
        """
        return self._call(self._next_work(step, within_s))

    async def _next_work(self, step: int, within_s: float | None) -> Received | NotYet | None:
        if self._work is None:
            self._work = asyncio.create_task(self._ask_for_work(step))
        work, stop = self._work, asyncio.create_task(self._stop.wait())
        waiting = [work, stop, self._channel.failed]
        try:
            await asyncio.wait(waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            if stop.done():
                return None
            if self._channel.failed.done():
                self._channel.failed.result()
            return NotYet()
        finally:
            over = work.done() or stop.done() or self._channel.failed.done()
            stop.cancel()
            if over:
                self._work = None
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)

    async def _ask_for_work(self, step: int) -> Received:
        what, timeout_s = f"the batch of step {step}", self.run.idle_timeout_s
        with self.waits.named(what, on="coordinator", timeout_s=timeout_s, limit_key="run.idle_timeout_s", onward=True):
            return await self._channel.request(m.BatchRequest(step=step))

    def ask(self, message: m.Message, *, what: str, timeout_s: float, limit_key: str) -> m.Message:
        """Send and await the answer. Once the run was stopped, for ``learner.stop_timeout_s`` only.

        Raises:
            WaitTimeout: none within ``timeout_s``.
            PeerError: refused, or the coordinator is gone.
        """
        answer = self._call(self._ask(message, what, timeout_s, limit_key)).message
        if isinstance(answer, m.WeightUpdatePlan):
            self._call(self._begin(answer))
        return answer

    async def _ask(self, message: m.Message, what: str, timeout_s: float, limit_key: str) -> Received:
        on = self._who_answers(message)
        request: asyncio.Task[Received] = asyncio.create_task(self._channel.request(message))
        shutdown = asyncio.create_task(self._shutdown.wait())
        try:
            with self.waits.named(
                what, on=on, timeout_s=timeout_s, limit_key=limit_key, onward=on != "coordinator"
            ) as wait:
                await asyncio.wait([request, shutdown], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if not request.done() and shutdown.done():
                    await asyncio.wait([request], timeout=self._stop_timeout_s)
                if request.done():
                    return request.result()
                if shutdown.done():
                    raise PeerError(
                        f"The run was stopped ({self.run_stopped}), and the coordinator gave no {what} within "
                        f"{self._stop_timeout_s:g} s (learner.stop_timeout_s)."
                    )
                raise expired(wait)
        finally:
            for task in (request, shutdown):
                task.cancel()
            await asyncio.gather(request, shutdown, return_exceptions=True)

    def _who_answers(self, message: m.Message) -> str:
        """The coordinator passes the engines' answers on: within an update the wait is for them."""
        if isinstance(message, m.WeightUpdateReady | m.TransferDone) and self._plan is not None and self._plan.members:
            return ", ".join(member.node_id for member in self._plan.members)
        return "coordinator"

    def close(self, reason: str) -> None:
        """Say goodbye and end the thread."""

        async def leave() -> None:
            for task in self._tasks:
                task.cancel()
            await self._channel.close(reason)

        self._call(leave())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
