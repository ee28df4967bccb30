"""The coordinator's side of a run: a ROUTER to which every node's ``NodeChannel`` (``protocol.channel``) connects.

Why nothing is lost: the coordinator answers a request only after its effect is durable, and a node keeps it until then. Why nothing grows
without bound: ZeroMQ's queues have a high-water mark, messages to a peer that doesn't read are dropped (its requests come again),
and one wake-up takes in so many messages and no more.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import structlog
import zmq
import zmq.asyncio

from common.errors import ConfigError, ProtocolError
from common.net import outgoing_ports
from protocol.codec import MAX_ARRAY_BYTES, Array, ForeignPeer, Received, decode, encode
from protocol.messages import Ack, Message, Refused
from protocol.security import Keys

log = structlog.get_logger()

HIGH_WATER_MARK = 10_000  # messages for one peer
Outgoing = tuple[bytes, Message, int, Mapping[str, Array] | None]  # identity, message, seq that it answers or 0, arrays

MAX_TAKEN = 512  # messages at one wake-up: what else the loop has to do comes in between
# As plain numbers: adding pyzmq's enums anew for each frame costs more than sending it.
_NOW = int(zmq.NOBLOCK)
_NOW_WITH_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


def _who_may_have(address: str) -> str:
    """What is worth knowing about the port of a ``tcp://`` address that is taken."""
    port, outgoing = address.rpartition(":")[2], outgoing_ports()
    if not port.isdecimal() or int(port) not in outgoing:
        return ""
    return (
        f"Any connection of this machine may have port {port}: its kernel takes those from {outgoing[0]} to {outgoing[-1]} "
        "for outgoing ones. Choose one outside. "
    )


def _seed_names() -> None:
    """Let the next ROUTER's names for nameless peers begin at a number that no peer knows.

    libzmq counts them up from a ``rand()`` that it never seeds, so every process begins at the same one, and it aborts the process when
    a peer has declared the name that it makes up next. It has no way to refuse such a peer: ZAP is not shown what peers declare.
    """
    ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))


class CoordinatorSocket:
    """ROUTER: messages in with the sender's identity, messages out to an identity. Bad frames are refused, not raised.

    A plain socket under asyncio's selector, not ``zmq.asyncio``: one wake-up takes in all that has arrived, and sending never
    waits. Frames are copied: they are small against the cost of ZeroMQ's bookkeeping for those that are not.
    """

    def __init__(self, bind: str, run_id: str, *, keys: Keys | None = None) -> None:
        """Bind; with ``keys``, only their holders get in.

        Raises:
            ConfigError: the address is taken or malformed.
        """
        self.run_id = run_id
        self._context = zmq.asyncio.Context()  # the authenticator's kind
        _seed_names()
        # A plain one: pyzmq's types know sockets of their own kind of context only.
        self._socket: Any = zmq.Socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_ARRAY_BYTES)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._seq = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        self._arrival = asyncio.Event()
        self._authenticator = None if keys is None else keys.authenticator(self._context)
        if keys is not None:
            keys.secure_server(self._socket)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            advice = (
                f"{_who_may_have(bind)}If another run is using the port, stop it or choose another with --set run.address=tcp://HOST:PORT."
                if error.errno == zmq.EADDRINUSE
                else "It must be an address of this machine (coordinator.bind; else run.address), and one that this user may listen on."
            )
            raise ConfigError(
                f"The coordinator can't listen on {bind}: {os.strerror(error.errno or 0)}. {advice}"
            ) from None
        self._loop.add_reader(self._socket.FD, self._arrival.set)

    async def recv(self) -> list[tuple[bytes, Received]]:
        """All good messages that have arrived, at least one, with the identities that they came from.

        Bad ones are answered with ``Refused`` and logged.
        """
        while True:
            self._arrival.clear()
            if messages := self._take():
                return messages
            await self._arrival.wait()

    def _take(self) -> list[tuple[bytes, Received]]:
        messages = []
        for _ in range(MAX_TAKEN):
            try:
                identity, *frames = self._next_message()
            except zmq.Again:
                break
            try:
                received = decode(frames)
                if received.run_id not in ("", self.run_id):
                    raise ForeignPeer(
                        f"This coordinator serves run {self.run_id!r}; the message is of run {received.run_id[:64]!r}. "
                        "Two runs share an address, or the config names another run."
                    )
                messages.append((identity, received))
            except ProtocolError as error:
                log.warning("message_refused", peer=identity.decode(errors="replace"), reason=str(error))
                self.send(identity, Refused(reason=str(error), fatal=isinstance(error, ForeignPeer)))
        return messages

    def _next_message(self) -> list[bytes]:
        """The frames of one message. Not ``recv_multipart``, which asks the socket whether there is more and not the frame, at twice the cost.

        Raises:
            zmq.Again: there is none.
        """
        frame = self._socket.recv(_NOW, False)
        frames = [frame.bytes]
        while frame.more:
            frame = self._socket.recv(_NOW, False)
            frames.append(frame.bytes)
        return frames

    def send(
        self, identity: bytes, message: Message, *, re: int = 0, arrays: Mapping[str, Array] | None = None
    ) -> bool:
        """Send; False when the peer is gone or doesn't read (its leases will expire, and its requests come again)."""
        try:
            return self._send(identity, message, re, arrays)
        finally:
            self._look_again()

    def send_all(self, messages: Iterable[Outgoing]) -> None:
        """``send`` each; acknowledgements that a peer would get one after the other go as one."""
        for identity, message, re, arrays in _together(messages):
            self._send(identity, message, re, arrays)
        self._look_again()

    def _send(self, identity: bytes, message: Message, re: int, arrays: Mapping[str, Array] | None) -> bool:
        frames = encode(message, run_id=self.run_id, seq=next(self._seq), re=re, arrays=arrays)
        try:
            self._socket.send(identity, _NOW_WITH_MORE)
            if arrays is None:
                self._socket.send(frames[0], _NOW)
            else:
                self._socket.send_multipart(frames, _NOW, copy=False)
        except zmq.ZMQError as error:
            log.info(
                "peer_unreachable", peer=identity.decode(errors="replace"), kind=message.kind, error=error.strerror
            )
            return False
        return True

    def _look_again(self) -> None:
        """ZeroMQ's descriptor tells of a change once, and sending may have taken that in."""
        if self._socket.EVENTS & zmq.POLLIN:
            self._arrival.set()

    def close(self) -> None:
        """Close the socket; queued answers get up to one second to leave."""
        self._loop.remove_reader(self._socket.FD)
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


def _together(messages: Iterable[Outgoing]) -> Iterator[Outgoing]:
    """``messages`` in each peer's order, with one ``Ack`` for all requests of a peer that are acknowledged without another message between.

    A wake-up takes in many results of a node, and a message costs far more than a number in it.
    """
    waiting: dict[bytes, tuple[Ack, list[int]]] = {}
    for identity, message, re, arrays in messages:
        if type(message) is Ack and re and message.accepted and not message.reason:
            waiting.setdefault(identity, (message, []))[1].append(re)
            continue
        if identity in waiting:
            yield _acknowledge(identity, *waiting.pop(identity))
        yield identity, message, re, arrays
    for identity, (ack, requests) in waiting.items():
        yield _acknowledge(identity, ack, requests)


def _acknowledge(identity: bytes, ack: Ack, requests: list[int]) -> Outgoing:
    first, *others = requests
    return identity, ack.model_copy(update={"also": others}) if others else ack, first, None
