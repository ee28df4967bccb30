"""Learner <-> coordinator <-> rollout: one weight update. Their sequence: ``services/coordinator/sync.py``."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from protocol.messages.base import Message
from protocol.versions import VersionTag


class SyncRequest(Message):
    """Learner: I want to publish ``tag``. One store address for each sender (pipeline stage), as ``host:port``."""

    kind: ClassVar[str] = "sync_request"

    tag: VersionTag
    stores: list[str]
    only_fenced: bool = False


class SyncMember(BaseModel):
    """A receiver: ``num_workers`` engine workers with consecutive ranks from ``first_rank`` in every sender's group."""

    model_config = ConfigDict(frozen=True)

    node_id: str
    first_rank: int
    num_workers: int


class SyncPlan(Message):
    """Coordinator -> learner and rollout nodes: who takes part. Both sides form (or keep) the groups, then say ``SyncReady``.

    ``group_key`` names the process groups, one in each sender's store: who is in the group of that name keeps it, and others
    form it. In each sender's group the sender is rank 0 and the receivers follow; ``world_size`` counts both.
    """

    kind: ClassVar[str] = "sync_plan"

    sync_id: int
    tag: VersionTag
    stores: list[str]
    members: list[SyncMember]
    world_size: int
    group_key: str
    timeout_s: float


class SyncReady(Message):
    """The sender's groups stand. The answer is ``SyncGo`` when everybody's do, or ``SyncAborted``."""

    kind: ClassVar[str] = "sync_ready"

    sync_id: int


class SyncGo(Message):
    """Everybody is ready: the bytes may flow."""

    kind: ClassVar[str] = "sync_go"

    sync_id: int


class SyncAborted(Message):
    """The update is off: ``reason`` names the node and its error. Old weights go on serving."""

    kind: ClassVar[str] = "sync_aborted"

    sync_id: int
    reason: str


class SyncDone(Message):
    """Rollout: I hold the new version and generate with it. Seconds of the receive, and of the pause it cost."""

    kind: ClassVar[str] = "sync_done"

    sync_id: int
    receive_s: float
    pause_s: float


class SyncFailed(Message):
    """Learner or rollout: my side of the update failed; I am on my old weights."""

    kind: ClassVar[str] = "sync_failed"

    sync_id: int
    error: str


class SyncSent(Message):
    """Learner: all bytes are out. Answered with ``SyncResult`` once every member has reported."""

    kind: ClassVar[str] = "sync_sent"

    sync_id: int
    num_bytes: int
    send_s: float


class SyncResult(Message):
    """Who holds the version now, and who is fenced with which error."""

    kind: ClassVar[str] = "sync_result"

    sync_id: int
    acked: list[str]
    failed: dict[str, str]
