"""A network between nodes and coordinator that can be told to misbehave, frame by frame.

    node --DEALER--> ROUTER | rules | DEALER (one for each node, with its identity) --> ROUTER of the coordinator

Nodes are given the proxy's address as ``run.address``; the coordinator listens on its own. Frames go through the real sockets and
are handed on as they came, unless a rule says otherwise: drop, delay, duplicate, let later ones overtake, damage, hold until released, or
call a function at that very moment (which may kill a process). All of it happens in one thread, ``seed`` decides what chance decides, and
``seen`` keeps what passed: evidence of what the coordinator acknowledged that does not come from the coordinator's own books.

The weight broadcast does not pass here: it goes from learner to engines directly.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import zmq

from protocol.codec import peek

Direction = Literal["up", "down"]  # to the coordinator, and from it
HELD_BACK_S = 1.0  # a message that is reordered waits so long for later ones
_POLL_MS = 50  # what ``release`` and ``close`` may have to wait
_NOT_KEPT = ("heartbeat_ack", "suite", "?")  # their frames: nobody asks, and a long run has many


@dataclass(frozen=True)
class Seen:
    """One message as its sender sent it, before any rule. ``at`` is in seconds since the epoch; ``re_kind`` is the kind of the request
    that it answers ('' for a push or a request). ``frames`` of some kinds are not kept."""

    at: float
    direction: Direction
    identity: bytes
    kind: str
    seq: int
    re: int
    re_kind: str
    frames: tuple[bytes, ...]

    @property
    def node_id(self) -> str:
        """The node at the other end than the coordinator."""
        return self.identity.decode(errors="replace").rpartition("#")[0]


def body_of(seen: Seen) -> dict[str, Any]:
    """The fields of a message, without its arrays."""
    return dict(peek(seen.frames[0])["body"])


@dataclass
class Rule:
    """What happens to messages of ``kind`` (and answers to ``re_kind``) of which ``where`` is true: the first ``skip`` pass, the next
    ``count`` are hit."""

    action: str
    kind: str = ""
    direction: Direction | None = None
    re_kind: str = ""
    node_id: str = ""
    where: Callable[[Seen], bool] | None = None
    skip: int = 0
    count: int | None = 1
    probability: float = 1.0
    delay_s: float = 0.0
    call: Callable[[Seen], None] | None = None
    hits: list[float] = field(default_factory=list)  # seconds since the epoch
    held: list[tuple[bytes, Direction, list[bytes]]] = field(default_factory=list, repr=False)  # of "hold"
    changed: threading.Condition = field(default_factory=threading.Condition, repr=False)

    def fits(self, seen: Seen, chance: random.Random) -> bool:
        """Whether ``seen`` is hit; counts it if so."""
        if (
            (self.kind and self.kind != seen.kind)
            or (self.direction and self.direction != seen.direction)
            or (self.re_kind and self.re_kind != seen.re_kind)
            or (self.node_id and self.node_id != seen.node_id)
            or (self.count is not None and len(self.hits) >= self.count)
            or (self.where is not None and not self.where(seen))
            or chance.random() >= self.probability
        ):
            return False
        if self.skip:
            self.skip -= 1
            return False
        with self.changed:
            self.hits.append(seen.at)
            self.changed.notify_all()
        return True

    def wait(self, timeout_s: float = 120.0) -> float:
        """Until it has hit a message: when the first was.

        Raises:
            AssertionError: it hasn't within ``timeout_s``.
        """
        with self.changed:
            assert self.changed.wait_for(lambda: self.hits, timeout_s), f"no message within {timeout_s} s for {self}"
            return self.hits[0]


@dataclass(order=True)
class _Late:
    due: float
    order: int
    identity: bytes = field(compare=False)
    direction: Direction = field(compare=False)
    frames: Sequence[bytes] = field(compare=False)


class Proxy:
    """Starts on construction; ``close`` ends its thread. Rules apply in the order in which they were added, holds before
    all others; the first that fits wins."""

    def __init__(self, target: str, *, seed: int = 0) -> None:
        self.target = target
        self.seen: list[Seen] = []
        self._chance = random.Random(seed)
        self._rules: list[Rule] = []
        self._released: deque[Rule] = deque()
        self._cut: set[str] = set()
        self._kinds: dict[tuple[bytes, int], str] = {}  # of requests, by who sent them
        self._late: list[_Late] = []
        self._order = itertools.count()
        self._held: list[tuple[int, _Late]] = []  # reordered: how many later messages must pass first
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._front.setsockopt(zmq.LINGER, 0)
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._closing = threading.Event()
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._thread.start()

    # ---- for the suite ----

    def add(self, action: str, kind: str = "", **conditions: Any) -> Rule:
        """``action``: drop, delay, duplicate, reorder, corrupt, shorten (the last array frame), hold, or call. Conditions: see ``Rule``."""
        assert action in ("drop", "delay", "duplicate", "reorder", "corrupt", "shorten", "hold", "call"), action
        rule = Rule(action, kind, **conditions)
        self._rules.insert(
            0 if action == "hold" else len(self._rules), rule
        )  # what is held is held, whatever else is to happen
        return rule

    def when(self, kind: str, call: Callable[[Seen], None], **conditions: Any) -> Rule:
        """Call ``call`` when a message of ``kind`` comes by, before it is handed on."""
        return self.add("call", kind, call=call, **conditions)

    def release(self, rule: Rule) -> None:
        """No such rule any more; what it held goes on its way, in order. Nothing after ``clear``."""
        if rule in self._rules:
            self._rules.remove(rule)
            self._released.append(rule)

    def clear(self) -> None:
        """No rules any more; what they held is gone."""
        self._rules.clear()

    def cut(self, node_id: str) -> None:
        """Nothing passes between ``node_id`` and the coordinator, in either direction; '' is every node."""
        self._cut.add(node_id)

    def heal(self, node_id: str) -> None:
        """It passes again; what was sent meanwhile is gone."""
        self._cut.discard(node_id)

    def close(self) -> None:
        """End the thread and close the sockets.

        Raises:
            Exception: what the thread died of, so that no case passes over a broken proxy.
        """
        self._closing.set()
        self._thread.join()
        for socket in (self._front, *self._backs.values()):
            socket.close(linger=0)
        self._context.term()
        if self.failure is not None:
            raise self.failure

    # ---- the thread ----

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        try:
            while not self._closing.is_set():
                ready = dict(poller.poll(self._patience_ms()))
                self._send_due()
                if self._front in ready:
                    for _ in range(100):
                        if not self._take(self._front, None, poller):
                            break
                for identity, back in list(self._backs.items()):
                    if back in ready:
                        for _ in range(100):
                            if not self._take(back, identity, poller):
                                break
        except Exception as error:  # ``close`` raises it in the case's own thread
            self.failure = error

    def _patience_ms(self) -> float:
        due = [late.due for late in self._late[:1]] + [late.due for _, late in self._held]
        return max(0.0, min([_POLL_MS, *((at - time.monotonic()) * 1000 for at in due)]))

    def _take(self, socket: zmq.Socket[bytes], identity: bytes | None, poller: zmq.Poller) -> bool:
        """One message from ``socket``; False: there is none."""
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        if identity is None:
            identity, *frames = frames
            if identity not in self._backs:
                back = self._context.socket(zmq.DEALER)
                # One that our ROUTER made up (they begin with 0) could be the coordinator's next one, too: each counts from the same number
                # in every process, and libzmq aborts the process that finds its own number taken. It makes up another one.
                if not identity.startswith(b"\0"):
                    back.setsockopt(zmq.IDENTITY, identity)
                back.setsockopt(zmq.RECONNECT_IVL, 50)
                back.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
                back.connect(self.target)
                self._backs[identity] = back
                poller.register(back, zmq.POLLIN)
            self._pass(identity, "up", frames)
        else:
            self._pass(identity, "down", frames)
        return True

    def _pass(self, identity: bytes, direction: Direction, frames: list[bytes]) -> None:
        seen = self._look(identity, direction, frames)
        self.seen.append(seen)
        if seen.node_id in self._cut or "" in self._cut:
            return
        rule = next((rule for rule in list(self._rules) if rule.fits(seen, self._chance)), None)
        action = "" if rule is None else rule.action
        if action == "drop":
            return
        if action == "delay":
            assert rule is not None
            late = _Late(time.monotonic() + rule.delay_s, next(self._order), identity, direction, frames)
            return heapq.heappush(self._late, late)
        if action == "reorder":
            late = _Late(time.monotonic() + HELD_BACK_S, next(self._order), identity, direction, frames)
            return self._held.append((2, late))
        if action == "hold":
            assert rule is not None
            return rule.held.append((identity, direction, frames))
        if action == "call":
            assert rule is not None
            assert rule.call is not None
            rule.call(seen)
        elif action == "corrupt":
            frames = self._flip_a_bit(frames)
        elif action == "shorten":
            frames = [*frames[:-1], frames[-1][:-1]]
        self._forward(identity, direction, frames)
        if action == "duplicate":
            self._forward(identity, direction, frames)
        self._let_go(identity, direction)

    def _flip_a_bit(self, frames: list[bytes]) -> list[bytes]:
        """Any bit of any frame: of the header, of a token id, of the checksum."""
        index = self._chance.randrange(len(frames))
        damaged = bytearray(frames[index])
        if damaged:
            damaged[self._chance.randrange(len(damaged))] ^= 1 << self._chance.randrange(8)
        return [*frames[:index], bytes(damaged), *frames[index + 1 :]]

    def _look(self, identity: bytes, direction: Direction, frames: list[bytes]) -> Seen:
        header: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # what a peer sends that is no header is handed on all the same
            header = peek(frames[0])
        kind, seq, re = header.get("kind", "?"), header.get("seq", 0), header.get("re", 0)
        if direction == "up":
            self._kinds[identity, seq] = kind
        re_kind = self._kinds.get((identity, re), "") if re else ""
        kept = () if kind in _NOT_KEPT else tuple(frames)
        return Seen(time.time(), direction, identity, kind, seq, re, re_kind, kept)

    def _let_go(self, identity: bytes, direction: Direction) -> None:
        """A message has passed: those that were held back behind it come nearer."""
        waiting = self._held
        self._held = []
        for left, late in waiting:
            same = (late.identity, late.direction) == (identity, direction)
            if left - same <= 0:
                self._forward(late.identity, late.direction, late.frames)
            else:
                self._held.append((left - same, late))

    def _send_due(self) -> None:
        while self._released:
            for identity, direction, frames in self._released.popleft().held:
                self._forward(identity, direction, frames)
        now = time.monotonic()
        while self._late and self._late[0].due <= now:
            late = heapq.heappop(self._late)
            self._forward(late.identity, late.direction, late.frames)
        for held in [held for held in self._held if held[1].due <= now]:
            self._held.remove(held)
            self._forward(held[1].identity, held[1].direction, held[1].frames)

    def _forward(self, identity: bytes, direction: Direction, frames: Sequence[bytes]) -> None:
        if direction == "up":
            self._backs[identity].send_multipart(frames)
        else:
            self._front.send_multipart([identity, *frames])  # ROUTER drops it if the node is gone
