"""Any node <-> coordinator: joining, beating, leaving, the plain answers, and reports of what a process is at."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from protocol.messages.base import Message
from protocol.versions import VersionTag


class WaitInfo(BaseModel):
    """A named wait (``common.waits``). Times are seconds of age, not clock readings: clocks differ."""

    model_config = ConfigDict(frozen=True)

    what: str
    on: str
    age_s: float
    deadline_s: float | None = None  # how long it may take in all
    limit_key: str = ""  # the config key that says so
    onward: bool = False  # see common.waits.Wait


class OpenLease(BaseModel):
    """A lease that a node holds when it says hello again: ``sample_index`` None: of a group to generate; else: to score."""

    model_config = ConfigDict(frozen=True)

    lease_id: str
    group_id: int
    sample_index: int | None = None


class Hello(Message):
    """First message of a node. ``capacity`` is how many leases it will hold at once: its credits."""

    kind: ClassVar[str] = "hello"

    role: str
    node_id: str
    host: str
    pid: int
    capacity: int = 0
    holds: VersionTag | None = None
    run_uid: str = ""  # from an earlier Welcome; empty on the first contact
    checkpoint_step: int = -1  # learner only: the step its weights are at
    num_workers: int = 0  # rollout only: engine workers that take weights, one rank of a process group each
    isolation: str = ""  # reward only: what its sandbox is made of
    open_leases: list[OpenLease] = []  # of an earlier session: a coordinator that restarted lets them stand
    # Rollout only: generated ones that it knows a coordinator to have counted; -1: it does not say.
    settled_tokens: int = -1


class Welcome(Message):
    """Answer to ``Hello``: the run goes on at ``tag``; beat every ``heartbeat_interval_s``."""

    kind: ClassVar[str] = "welcome"

    run_uid: str
    tag: VersionTag
    heartbeat_interval_s: float
    node_timeout_s: float


class Refused(Message):
    """The coordinator won't deal with the sender or with its message; ``reason`` is a sentence for people."""

    kind: ClassVar[str] = "refused"

    reason: str
    fatal: bool = True


class Heartbeat(Message):
    """Node is alive: renews its leases, reports its waits and counters, and restates its capacity (0 = draining)."""

    kind: ClassVar[str] = "heartbeat"

    capacity: int
    lease_ids: list[str] = []
    holds: VersionTag | None = None
    waits: list[WaitInfo] = []
    counters: dict[str, float] = {}
    loop_lag_ms: float = 0.0  # the worst since the last beat
    loop_lag_max_ms: float = 0.0  # the worst of this process
    blocked_at: str = ""  # what last held up its event loop, and for how long


class HeartbeatAck(Message):
    """``known`` False: the coordinator does not know this node (it restarted): say ``Hello`` again.

    ``lost_lease_ids`` are leases that the node holds and the coordinator has given to others: stop working on them.
    """

    kind: ClassVar[str] = "heartbeat_ack"

    known: bool = True
    lost_lease_ids: list[str] = []


class Goodbye(Message):
    """The node leaves in order; it holds no lease any more."""

    kind: ClassVar[str] = "goodbye"

    reason: str = ""


class Ack(Message):
    """The request is done, and durable where it had to be. ``accepted`` False: it was late or double, and was dropped."""

    kind: ClassVar[str] = "ack"

    accepted: bool = True
    reason: str = ""


class Shutdown(Message):
    """Coordinator -> node: the run is over; leave."""

    kind: ClassVar[str] = "shutdown"

    reason: str


class ReportRequest(Message):
    """Coordinator -> node: what do you wait for, where are your threads? Answered with ``Report``, whatever the node is doing."""

    kind: ClassVar[str] = "report_request"


class Report(Message):
    """The state of a process for a post-mortem. Array: ``json_utf8`` uint8 [N], as ``common.recorder`` makes it."""

    kind: ClassVar[str] = "report"
    arrays: ClassVar[tuple[str, ...]] = ("json_utf8",)

    pid: int
