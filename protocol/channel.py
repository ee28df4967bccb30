"""A node's side of a run: ``NodeChannel``, a DEALER that talks to the coordinator's ROUTER (``protocol.router``).

Why nothing is lost: whatever must arrive is a *request* with a sequence number, kept by the node until its answer comes, and
sent again when the coordinator comes back or the answer is late. The coordinator answers only after the effect is durable,
and knows a repeated result by its sample. Why nothing grows without bound: a node has at most ``capacity`` leases and one
open request for each finished sample of them; ZeroMQ's own queues have a high-water mark, and frames a size limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
import zmq
import zmq.asyncio

from common.errors import NotTakenBack, PeerError, ProtocolError
from common.loop_watch import LoopWatch
from common.recorder import RECORDER
from common.waits import Overdue, Wait, WaitTable
from protocol.codec import MAX_ARRAY_BYTES, Array, ForeignPeer, Received, decode, encode
from protocol.messages import (
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Message,
    Refused,
    Report,
    ReportRequest,
    WaitInfo,
    Welcome,
)
from protocol.router import HIGH_WATER_MARK
from protocol.security import Keys

log = structlog.get_logger()

HELLO_AGAIN_S = 5.0  # a hello or its answer may be lost with a coordinator that dies
MAX_WAITS = 100  # in one heartbeat, the oldest first: more would tell nobody more


@dataclass(slots=True)
class _Pending:
    future: asyncio.Future[Received]
    frames: list[bytes | memoryview]
    sent_at: float


class NodeChannel:
    """A node's line to the coordinator: hello, heartbeats, requests with answers, and pushes (leases, syncs, shutdown).

    ``start`` joins; ``request`` sends and awaits the answer; ``pushes`` yields what the coordinator sends unasked.
    Reconnection is inside: when the coordinator restarts, the node says hello again and sends its open requests again.

    The liveness contract is kept here: heartbeats carry the node's open waits, and one that nobody ends in time fails the channel.
    """

    def __init__(
        self, address: str, run_id: str, *, role: str, node_id: str, waits: WaitTable, keys: Keys | None = None
    ) -> None:
        self.address = address
        self.role = role
        self.node_id = node_id
        self.waits = waits
        self.run_id = run_id
        self.capacity = 0
        self.welcome: Welcome | None = None
        self.hello_fields: Callable[[], dict[str, Any]] = dict  # role's own fields of Hello
        self.beat_fields: Callable[[], dict[str, Any]] = dict  # role's own fields of Heartbeat
        self.pushes: asyncio.Queue[Received] = asyncio.Queue()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._seq = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"{node_id}#{uuid.uuid4().hex}".encode())
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_ARRAY_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        if keys is not None:
            keys.secure_client(self._socket)
        self._socket.connect(address)
        self._tasks: list[asyncio.Task[None]] = []
        self._loop_watch = LoopWatch()
        self._heard_at = asyncio.get_running_loop().time()
        self._rejoining = False
        self._join_timeout_s = 0.0

    async def start(self, *, join_timeout_s: float) -> Welcome:
        """Say hello and start the heartbeats. Later on, a coordinator that is silent for ``join_timeout_s`` fails the node.

        Raises:
            PeerError: the coordinator isn't there within ``join_timeout_s``, or refuses this node.
        """
        self._join_timeout_s = join_timeout_s
        self._loop_watch.start()
        self._tasks.append(asyncio.create_task(self._receive(), name="receive"))
        try:
            with self._wait_for_welcome(join_timeout_s):
                async with asyncio.timeout(join_timeout_s):
                    await self._hello()
        except TimeoutError:
            raise PeerError(
                f"No coordinator answers at {self.address} for {join_timeout_s:.0f} s. Start it (forebay coordinator), or "
                "correct run.address in the config (with keys, run.key_file too, on both sides); run.join_timeout_s is how long a "
                "node waits for it."
            ) from None
        self._tasks.append(asyncio.create_task(self._beat(join_timeout_s), name="heartbeat"))
        assert self.welcome is not None
        return self.welcome

    async def request(self, message: Message, *, arrays: Mapping[str, Array] | None = None) -> Received:
        """Send and await the answer, for ever if need be: the caller names and bounds the wait.

        Raises:
            PeerError: the coordinator refused the message, or is gone.
            WaitTimeout: the channel failed because a wait of this process was overdue.
        """
        if self.failed.done():
            self.failed.result()
        seq = next(self._seq)
        frames = encode(message, run_id=self.run_id, seq=seq, arrays=arrays)
        future: asyncio.Future[Received] = asyncio.get_running_loop().create_future()
        self._pending[seq] = _Pending(future, frames, asyncio.get_running_loop().time())
        try:
            await self._socket.send_multipart(frames, copy=False)
            received = await future
        finally:
            self._pending.pop(seq, None)
        if isinstance(received.message, Refused):
            raise PeerError(f"The coordinator refused {message.kind}: {received.message.reason}")
        return received

    async def tell(self, message: Message, *, arrays: Mapping[str, Array] | None = None) -> None:
        """Send without waiting for the answer (which is read and dropped)."""
        frames = encode(message, run_id=self.run_id, seq=next(self._seq), arrays=arrays)
        await self._socket.send_multipart(frames, copy=False)

    async def guard(self, body: Coroutine[Any, Any, None]) -> None:
        """Run ``body``, a node's loop over ``pushes``, to its end.

        Raises:
            PeerError: the line failed first (and ``body`` was cancelled); or whatever ``body`` raises.
            WaitTimeout: a wait of this process was overdue; likewise.
        """
        task = asyncio.create_task(body)
        try:
            await asyncio.wait([task, self.failed], return_when=asyncio.FIRST_COMPLETED)
            (self.failed if self.failed.done() else task).result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def beat_now(self) -> None:
        """A heartbeat at once, after the node's capacity, leases or version changed."""
        await self.tell(self._heartbeat())

    async def close(self, reason: str = "") -> None:
        """Say goodbye and close. Does not wait for open requests: finish them first."""
        self._loop_watch.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.welcome is not None:
            await self.tell(Goodbye(reason=reason))
        self._socket.close()
        self._context.term()

    async def _hello(self) -> None:
        hello = Hello(
            role=self.role,
            node_id=self.node_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            capacity=self.capacity,
            run_uid=self.welcome.run_uid if self.welcome else "",
            **self.hello_fields(),
        )
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HELLO_AGAIN_S):
                    received = await self.request(hello)
                assert isinstance(received.message, Welcome)
                self.welcome = received.message
                return

    def _wait_for_welcome(self, timeout_s: float) -> contextlib.AbstractContextManager[Wait]:
        what = f"a welcome at {self.address}"
        return self.waits.named(what, on="coordinator", timeout_s=timeout_s, limit_key="run.join_timeout_s")

    def _heartbeat(self) -> Heartbeat:
        now = time.monotonic()
        waits = [
            WaitInfo(
                what=wait.what,
                on=wait.on,
                age_s=now - wait.since,
                deadline_s=wait.deadline - wait.since,
                limit_key=wait.limit_key,
                onward=wait.onward,
            )
            for wait in self.waits.snapshot()[:MAX_WAITS]
        ]
        return Heartbeat(
            capacity=self.capacity,
            waits=waits,
            loop_lag_ms=self._loop_watch.take_lag_ms(),
            loop_lag_max_ms=self._loop_watch.max_lag_ms,
            blocked_at=self._loop_watch.blocked_at,
            **self.beat_fields(),
        )

    async def _beat(self, silence_limit_s: float) -> None:
        assert self.welcome is not None
        loop = asyncio.get_running_loop()
        overdue = Overdue(self.waits)
        while not self.failed.done():
            await self.beat_now()
            await self._send_again(older_than_s=self.welcome.node_timeout_s)
            due = loop.time() + self.welcome.heartbeat_interval_s
            await asyncio.sleep(self.welcome.heartbeat_interval_s)
            late_s = max(0.0, loop.time() - due)
            if loop.time() - self._heard_at > silence_limit_s + late_s:
                self._fail(
                    PeerError(
                        f"The coordinator at {self.address} has been silent for {silence_limit_s:.0f} s "
                        "(run.join_timeout_s). Restart it, then this node; the run goes on from its journal."
                    )
                )
            elif error := overdue.look():
                log.error("wait_overdue", error=str(error))
                self._fail(error)

    async def _send_again(self, *, older_than_s: float) -> int:
        """Requests whose answer is late, or that went to a coordinator before this one. Returns how many."""
        now = asyncio.get_running_loop().time()
        late = [pending for pending in self._pending.values() if now - pending.sent_at >= older_than_s]
        for pending in late:
            pending.sent_at = now
            await self._socket.send_multipart(pending.frames, copy=False)
        return len(late)

    def _fail(self, error: Exception) -> None:
        """The line is of no use any more: every open request, and ``failed``, raise ``error``."""
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(error)
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # who awaits it gets it; without anybody, asyncio must not print its trace at exit

    async def _receive(self) -> None:
        try:
            while True:
                frames = await self._socket.recv_multipart(copy=False)
                self._heard_at = asyncio.get_running_loop().time()
                if (received := _decode_or_drop([frame.buffer for frame in frames])) is None:
                    continue
                message = received.message
                if received.re and (pending := self._pending.get(received.re)):
                    if not pending.future.done():
                        pending.future.set_result(received)
                elif isinstance(message, HeartbeatAck) and not message.known:
                    self._tasks.append(asyncio.create_task(self._rejoin(), name="rejoin"))
                elif isinstance(message, ReportRequest):
                    data = np.frombuffer(RECORDER.report_bytes(), dtype=np.uint8)
                    await self.tell(Report(pid=os.getpid()), arrays={"json_utf8": data})
                elif isinstance(message, Refused) and message.fatal:
                    raise PeerError(f"The coordinator refused this node: {message.reason}")
                elif isinstance(message, Refused):  # it came damaged; a request is sent again when its answer is late
                    log.warning("frame_refused", reason=message.reason)
                elif not received.re or isinstance(message, HeartbeatAck):
                    self.pushes.put_nowait(received)
        except (PeerError, ProtocolError) as error:
            self._fail(error)

    async def _rejoin(self) -> None:
        """The coordinator does not know us: it restarted. Join again and send every open request again."""
        if self._rejoining:
            return
        self._rejoining = True
        try:
            with self._wait_for_welcome(self._join_timeout_s):
                await self._hello()
            # First: counts of this moment, not of one in which what is sent now has been answered.
            await self.beat_now()
            num_requests = await self._send_again(older_than_s=0)
            log.info("rejoined", resent=num_requests)
        except PeerError as error:
            self._fail(NotTakenBack(str(error)))
        finally:
            self._rejoining = False


def _decode_or_drop(frames: list[memoryview]) -> Received | None:
    """The message; None for a damaged one: a request's answer is asked for again, and a lost push shows as a lease that expires.

    Raises:
        ForeignPeer: of another protocol version.
    """
    try:
        return decode(frames)
    except ForeignPeer:
        raise
    except ProtocolError as error:
        log.warning("frame_refused", reason=str(error))
        return None
