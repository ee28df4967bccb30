"""One weight update, as the coordinator sees it.

    learner          coordinator          rollout nodes
      | WeightUpdateRequest ----> |                     |
      | <---- WeightUpdatePlan -- | -- WeightUpdatePlan ------> |      both sides form (or keep) the process groups
      | WeightUpdateReady ------> | <------ WeightUpdateReady - |
      | <------ TransferStart -- | -- TransferStart --------> |      the answers, only when everybody is ready
      | ============== weight tensors ========> |
      | TransferDone -------> | <------- WeightsLoaded - |      or WeightUpdateFailed: that node is fenced
      | <-- WeightUpdateResult -- | -- Ack -----------> |

All but the nodes' WeightUpdatePlan are requests and their answers, which come again when they are lost; a node that isn't ready is sent its plan again.
A failure or a death before ``TransferDone`` aborts the round: all are told at once, and the learner ends whatever wait the others
sit in (``weights.abort_group``) and asks again, without a node that is at fault. After it, the node alone is fenced.
``WeightUpdate`` is the state; the service sends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.messages import WeightUpdateMember, WeightUpdatePlan, WeightUpdateRequest
from protocol.versions import VersionTag
from services.coordinator.membership import Node


@dataclass
class WeightUpdate:
    """``*_seq`` are requests of the learner that wait for their answer (0: none); ``ready`` has those of the nodes."""

    plan: WeightUpdatePlan
    started_at: float
    deadline: float
    members: dict[str, WeightUpdateMember] = field(init=False)
    told_at: dict[str, float] = field(init=False)  # when each node was last sent the plan
    ready: dict[str, int] = field(default_factory=dict)
    done: dict[str, float] = field(default_factory=dict)  # node -> seconds of its pause
    failed: dict[str, str] = field(default_factory=dict)
    learner_ready_seq: int = 0
    learner_sent_seq: int = 0
    num_bytes: int = 0
    send_s: float = 0.0
    went: bool = False

    def __post_init__(self) -> None:
        self.members = {member.node_id: member for member in self.plan.members}
        self.told_at = dict.fromkeys(self.members, self.started_at)

    @property
    def update_id(self) -> int:
        """Of the plan."""
        return self.plan.update_id

    @property
    def tag(self) -> VersionTag:
        """What is published."""
        return self.plan.tag

    @property
    def all_ready(self) -> bool:
        """Learner and every member have their groups."""
        return self.learner_ready_seq != 0 and not self.failed and set(self.members) <= set(self.ready)

    @property
    def settled(self) -> bool:
        """Every member has reported."""
        return set(self.members) <= set(self.done) | set(self.failed)

    def record(self, now: float) -> dict[str, float]:
        """A finished update for status and summary. Durations in seconds."""
        return {
            "version": self.tag.version,
            "bytes": self.num_bytes,
            "send_s": self.send_s,
            "total_s": now - self.started_at,
            "pause_s": max(self.done.values(), default=0.0),
        }

    def missing(self) -> list[str]:
        """Members that the round still waits for."""
        reported = set(self.failed) | set(self.done if self.went else self.ready)
        return sorted(set(self.members) - reported)

    def untold(self, now: float, again_s: float) -> list[str]:
        """Members that are not ready and were sent the plan ``again_s`` ago: it may be lost. They count as told ``now``."""
        late = [] if self.went else [node_id for node_id in self.missing() if now - self.told_at[node_id] >= again_s]
        self.told_at.update(dict.fromkeys(late, now))
        return late


class StandingGroup:
    """The process groups that learner and nodes hold since the last update. Only a good one's key is ever given again."""

    def __init__(self) -> None:
        self._members: list[bytes] | None = None
        self._key = ""

    def key_for(self, nodes: list[Node], update_id: int) -> str:
        """The key for these members: the standing group's, or a new one, which makes all sides form their groups anew."""
        members = sorted(node.identity for node in nodes)
        if members != self._members:
            self._members, self._key = members, f"sync-{update_id}"
        return self._key

    def break_up(self) -> None:
        """Somebody left the group, or may have: an update failed, or the learner is another one."""
        self._members = None


def plan_weight_update(
    update_id: int,
    request: WeightUpdateRequest,
    nodes: list[Node],
    standing: StandingGroup,
    *,
    now: float,
    timeout_s: float,
) -> WeightUpdate:
    """Ranks for all receivers: the sender is 0, then each node's workers in order of node id."""
    members, rank = [], 1
    for node in sorted(nodes, key=lambda node: node.node_id):
        members.append(WeightUpdateMember(node_id=node.node_id, first_rank=rank, num_workers=node.num_workers))
        rank += node.num_workers
    plan = WeightUpdatePlan(
        update_id=update_id,
        tag=request.tag,
        stores=request.stores,
        members=members,
        world_size=rank,
        group_key=standing.key_for(nodes, update_id),
        timeout_s=timeout_s,
    )
    return WeightUpdate(plan, started_at=now, deadline=now + timeout_s)
