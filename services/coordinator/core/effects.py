"""What one call of the core wants done: rows to write, messages to send once those are durable, and what the shell does itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from common.errors import ForebayError
from protocol.codec import Array
from protocol.messages import Message

if TYPE_CHECKING:
    from services.coordinator.core.membership import Node


class Send(NamedTuple):
    """A message to one process. ``re`` is the request that it answers; 0: none."""

    identity: bytes
    message: Message
    re: int = 0
    arrays: Mapping[str, Array] | None = None


class Record(NamedTuple):
    """Rows for the journal: ``kind`` names the statement in ``schema.STATEMENTS``, ``values`` are its parameters."""

    kind: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Read the groups of a committed step from the journal and hand them to ``Core.batch_read``."""

    identity: bytes
    seq: int
    step: int


@dataclass(frozen=True, slots=True)
class NodeDied:
    """A node left without a goodbye: its last heartbeat is kept as its report."""

    node: Node
    reason: str
    lease_ids: list[str]  # that it held


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One line of the log."""

    level: str
    event: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EndRun:
    """The run is over. ``state`` is finished, stopped or failed; ``error`` says why it failed."""

    state: str
    reason: str
    error: ForebayError | None = None


@dataclass(slots=True)
class Effects:
    """The effects of one call, in the order in which they came up within each list.

    ``records`` are written in one transaction; ``sends`` leave after it, so nobody acts on something that a crash could undo. The other
    effects need no durability. ``progress`` says whether the run has moved on.
    """

    records: list[Record] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    reads: list[ReadBatch] = field(default_factory=list)
    deaths: list[NodeDied] = field(default_factory=list)
    logs: list[LogEvent] = field(default_factory=list)
    end: EndRun | None = None
    progress: bool = False
    max_answers: int = 8192  # that are kept of each node

    def send(self, identity: bytes, message: Message) -> None:
        """A message that answers nothing. One that must arrive is sent again until its effect shows."""
        self.sends.append(Send(identity, message))

    def reply(self, node: Node, seq: int, message: Message, arrays: Mapping[str, Array] | None = None) -> None:
        """The answer to request ``seq`` of a node, kept in case the request comes again; one with arrays is made anew instead."""
        if arrays is None:
            node.answers[seq] = message
            if len(node.answers) > self.max_answers:
                node.answers.popitem(last=False)
        self.sends.append(Send(node.identity, message, seq, arrays))

    def reply_once(self, identity: bytes, seq: int, message: Message) -> None:
        """The answer to a request that changes nothing when it comes again."""
        self.sends.append(Send(identity, message, seq))

    def record(self, kind: str, *values: Any) -> None:
        """Rows for the journal."""
        self.records.append(Record(kind, values))

    def info(self, event: str, **fields: Any) -> None:
        """A line of the log, as are the next two."""
        self.logs.append(LogEvent("info", event, fields))

    def warning(self, event: str, **fields: Any) -> None:
        """See ``info``."""
        self.logs.append(LogEvent("warning", event, fields))

    def error(self, event: str, **fields: Any) -> None:
        """See ``info``."""
        self.logs.append(LogEvent("error", event, fields))

    def take(self) -> Effects:
        """All that has come up since the last call; the collector is empty afterwards."""
        taken = Effects(self.records, self.sends, self.reads, self.deaths, self.logs, self.end, self.progress)
        self.records, self.sends, self.reads, self.deaths, self.logs = [], [], [], [], []
        self.end, self.progress = None, False
        return taken
