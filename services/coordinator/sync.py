"""One weight update, as the coordinator sees it.

    learner          coordinator          rollout nodes
      | SyncRequest ----> |                     |
      | <---- SyncPlan -- | -- SyncPlan ------> |      both sides form (or keep) the process groups
      | SyncReady ------> | <------ SyncReady - |
      | <------ SyncGo -- | -- SyncGo --------> |      only when everybody is ready
      | ============== weight tensors ========> |
      | SyncSent -------> | <------- SyncDone - |      or SyncFailed: that node is fenced
      | <-- SyncResult -- |                     |

A failure or a death before ``SyncGo`` aborts the round: the learner asks again, without the node. After it, the learner is
told at once, by name. ``SyncRound`` is the state; the service sends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.messages import SyncMember, SyncPlan, SyncRequest
from protocol.versions import VersionTag
from services.coordinator.membership import Node


@dataclass
class SyncRound:
    """``*_seq`` are requests of the learner that wait for their answer (0: none)."""

    sync_id: int
    tag: VersionTag
    members: dict[str, SyncMember]
    started_at: float
    deadline: float
    ready: set[str] = field(default_factory=set)
    done: dict[str, float] = field(default_factory=dict)  # node -> seconds of its pause
    failed: dict[str, str] = field(default_factory=dict)
    learner_ready_seq: int = 0
    learner_sent_seq: int = 0
    went: bool = False

    @property
    def all_ready(self) -> bool:
        """Learner and every member have their groups."""
        return self.learner_ready_seq != 0 and not self.failed and self.ready >= set(self.members)

    @property
    def settled(self) -> bool:
        """Every member has reported."""
        return set(self.members) <= set(self.done) | set(self.failed)

    def missing(self) -> list[str]:
        """Members that the round still waits for."""
        reported = set(self.failed) | (set(self.done) if self.went else self.ready)
        return sorted(set(self.members) - reported)


def plan_round(
    sync_id: int, request: SyncRequest, nodes: list[Node], *, now: float, timeout_s: float
) -> tuple[SyncRound, SyncPlan]:
    """Ranks for all receivers: the sender is 0, then each node's workers in order of node id."""
    members, rank = [], 1
    for node in sorted(nodes, key=lambda node: node.node_id):
        members.append(SyncMember(node_id=node.node_id, first_rank=rank, num_workers=node.num_workers))
        rank += node.num_workers
    plan = SyncPlan(
        sync_id=sync_id,
        tag=request.tag,
        stores=request.stores,
        members=members,
        world_size=rank,
        group_key="+".join(f"{node.node_id}@{node.pid}" for node in sorted(nodes, key=lambda node: node.node_id)),
        timeout_s=timeout_s,
    )
    round_ = SyncRound(sync_id, request.tag, {m.node_id: m for m in members}, now, now + timeout_s)
    return round_, plan
