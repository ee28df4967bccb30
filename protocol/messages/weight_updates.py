"""Learner <-> coordinator <-> rollout: one weight update. Their sequence: ``services/coordinator/weight_update.py``."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from protocol.messages.base import Message
from protocol.versions import VersionTag


class WeightUpdateRequest(Message):
    """Learner: I want to publish ``tag``. One store address for each sender (pipeline stage), as ``host:port``."""

    kind: ClassVar[str] = "weight_update_request"

    tag: VersionTag
    stores: list[str]
    only_fenced: bool = False


class WeightUpdateMember(BaseModel):
    """A receiver: ``num_workers`` engine workers with consecutive ranks from ``first_rank`` in every sender's group."""

    model_config = ConfigDict(frozen=True)

    node_id: str
    first_rank: int
    num_workers: int


class WeightUpdatePlan(Message):
    """Coordinator -> learner and rollout nodes: who takes part. Both sides form (or keep) the groups, then say ``WeightUpdateReady``.

    ``group_key`` names the process groups, one in each sender's store: who is in the group of that name keeps it, and others
    form it. In each sender's group the sender is rank 0 and the receivers follow; ``world_size`` counts both.
    """

    kind: ClassVar[str] = "weight_update_plan"

    update_id: int
    tag: VersionTag
    stores: list[str]
    members: list[WeightUpdateMember]
    world_size: int
    group_key: str
    timeout_s: float


class WeightUpdateReady(Message):
    """The sender's groups stand. The answer is ``TransferStart`` when everybody's do, or ``WeightUpdateAborted``."""

    kind: ClassVar[str] = "weight_update_ready"

    update_id: int


class TransferStart(Message):
    """Everybody is ready: the bytes may flow."""

    kind: ClassVar[str] = "transfer_start"

    update_id: int


class WeightUpdateAborted(Message):
    """The update is off: ``reason`` names the node and its error. Old weights go on serving."""

    kind: ClassVar[str] = "weight_update_aborted"

    update_id: int
    reason: str


class WeightsLoaded(Message):
    """Rollout: I hold the new version and generate with it. Seconds of the receive, and of the pause it cost."""

    kind: ClassVar[str] = "weights_loaded"

    update_id: int
    receive_s: float
    pause_s: float


class WeightUpdateFailed(Message):
    """Learner or rollout: my side of the update failed; I am on my old weights."""

    kind: ClassVar[str] = "weight_update_failed"

    update_id: int
    error: str


class TransferDone(Message):
    """Learner: all bytes are out. Answered with ``WeightUpdateResult`` once every member has reported."""

    kind: ClassVar[str] = "transfer_done"

    update_id: int
    num_bytes: int
    send_s: float


class WeightUpdateResult(Message):
    """Who holds the version now, and who is fenced with which error."""

    kind: ClassVar[str] = "weight_update_result"

    update_id: int
    acked: list[str]
    failed: dict[str, str]
