"""Weight updates: new weights from the learner into the engines, in the phases plan, transfer, load and commit.

    learner                     coordinator                  rollout nodes
      | WeightUpdateRequest ------> |                             |
      | <------- WeightUpdatePlan - | - WeightUpdatePlan -------> |   plan: both sides form, or keep, the process groups
      | WeightUpdateReady --------> | <------ WeightUpdateReady - |
      | <---------- TransferStart - | - TransferStart ----------> |   transfer: answered when every side is ready
      | ================= weight tensors ======================== |
      | TransferDone -------------> | <---------- WeightsLoaded - |   load; or WeightUpdateFailed: that node is fenced
      | <----- WeightUpdateResult - | - Ack --------------------> |   commit: the nodes hold the version

All but the nodes' WeightUpdatePlan are requests and their answers, which come again when they are lost; a node that isn't ready gets its plan
again. A failure or a death before ``TransferDone`` aborts the update: every side gets WeightUpdateAborted, and the learner aborts its process
group, which ends the waits of the others, and asks again, without a node that is at fault. After ``TransferDone`` the node alone is fenced:
it takes no leases until it holds the current version. It is tried again at the next version, or after ``UPDATE_AGAIN_S`` when the learner
has nothing to train.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from common.net import is_loopback
from protocol import messages as m
from protocol.codec import Received
from protocol.versions import VersionTag
from services.coordinator.core.effects import Effects
from services.coordinator.core.membership import Members, Node, is_current

MAX_FAILED_UPDATES = 2  # of a node for one version: the first may be another's death, as this node saw it
UPDATE_AGAIN_S = 5.0  # pause before a node that failed to take weights is tried again between two steps


@dataclass
class WeightUpdate:
    """One update. ``*_seq`` are requests of the learner that wait for their answer (0: none); ``ready`` has those of the nodes."""

    plan: m.WeightUpdatePlan
    started_at: float
    deadline: float
    members: dict[str, m.WeightUpdateMember] = field(init=False)
    plan_sent_at: dict[str, float] = field(init=False)  # to each node, the last time
    ready: dict[str, int] = field(default_factory=dict)
    done: dict[str, float] = field(default_factory=dict)  # node -> seconds of its pause
    failed: dict[str, str] = field(default_factory=dict)
    learner_ready_seq: int = 0
    learner_done_seq: int = 0
    num_bytes: int = 0
    send_s: float = 0.0
    transfers: bool = False  # the plan phase is over

    def __post_init__(self) -> None:
        self.members = {member.node_id: member for member in self.plan.members}
        self.plan_sent_at = dict.fromkeys(self.members, self.started_at)

    @property
    def update_id(self) -> int:
        """Of the plan."""
        return self.plan.update_id

    @property
    def tag(self) -> VersionTag:
        """The version that the nodes are to hold."""
        return self.plan.tag

    @property
    def all_ready(self) -> bool:
        """Learner and every member have their groups."""
        return self.learner_ready_seq != 0 and not self.failed and self.members.keys() <= self.ready.keys()

    @property
    def all_reported(self) -> bool:
        """Every member has loaded the weights, or failed."""
        return self.members.keys() <= self.done.keys() | self.failed.keys()

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
        """Members that the phase at hand still waits for."""
        reported = set(self.failed) | set(self.done if self.transfers else self.ready)
        return sorted(set(self.members) - reported)

    def plans_to_repeat(self, now: float, again_s: float) -> list[str]:
        """Members that are not ready and were sent the plan ``again_s`` ago: it may be lost. They count as sent it ``now``."""
        if self.transfers:
            return []
        late = [node_id for node_id in self.missing() if now - self.plan_sent_at[node_id] >= again_s]
        self.plan_sent_at.update(dict.fromkeys(late, now))
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
            self._members, self._key = members, f"weights-{update_id}"
        return self._key

    def break_up(self) -> None:
        """Somebody left the group, or may have: an update failed, or the learner is another one."""
        self._members = None


def plan_weight_update(
    update_id: int,
    request: m.WeightUpdateRequest,
    nodes: list[Node],
    standing: StandingGroup,
    *,
    now: float,
    timeout_s: float,
) -> WeightUpdate:
    """Ranks for all receivers: the sender is 0, then each node's workers in order of node id."""
    members, rank = [], 1
    for node in sorted(nodes, key=lambda node: node.node_id):
        members.append(m.WeightUpdateMember(node_id=node.node_id, first_rank=rank, num_workers=node.num_workers))
        rank += node.num_workers
    plan = m.WeightUpdatePlan(
        update_id=update_id,
        tag=request.tag,
        stores=request.stores,
        members=members,
        world_size=rank,
        group_key=standing.key_for(nodes, update_id),
        timeout_s=timeout_s,
    )
    return WeightUpdate(plan, started_at=now, deadline=now + timeout_s)


def unreachable(stores: list[str], learner: Node, receivers: list[Node]) -> str:
    """Why ``receivers`` can't take weights at the learner's ``stores`` (``host:port``), or ''."""
    elsewhere = sorted({node.host for node in receivers if node.host != learner.host})
    loopback = [store for store in stores if is_loopback(f"tcp://{store}")]
    if not elsewhere or not loopback:
        return ""
    return (
        f"The learner on {learner.host} offers its weights at {loopback[0]}, which rollout nodes on {', '.join(elsewhere)} "
        "can't reach. Set learner.host to an address of its machine that the others use; or run.address, in the learner's "
        "config, to one of the coordinator's that is no loopback address (coordinator.bind says what to listen on)."
    )


class WeightUpdates:
    """See the module. What nobody answers is sent again after ``again_s``: a plan to a node that isn't ready, an abort to the learner.

    ``boot`` counts the coordinator's starts: update ids never repeat, for nodes outlive this process. ``reindex(node)`` is called when a node
    holds another version.
    """

    def __init__(
        self,
        members: Members,
        *,
        timeout_s: float,
        again_s: float,
        boot: int,
        effects: Effects,
        reindex: Callable[[Node], None],
    ) -> None:
        self._members, self._timeout_s, self._again_s = members, timeout_s, again_s
        self._effects, self._reindex = effects, reindex
        self._update_ids = itertools.count(boot * 1_000_000 + 1)
        self.current: WeightUpdate | None = None
        self._standing = StandingGroup()
        # An abort that the learner has not confirmed, and when it was last sent: it may sit in the update for as long as its limit.
        self._unconfirmed_abort: m.WeightUpdateAborted | None = None
        self._abort_sent_at = 0.0
        self.finished: deque[dict[str, float]] = deque(maxlen=200)  # the last ones
        self.num_finished = 0

    # ---- members come and go ----

    def new_learner(self, *, again: bool) -> None:
        """The standing group has another sender: a new process; or (``again``) the learner was cut off, and may still be in an update."""
        if not again:
            self._unconfirmed_abort = None
        self._standing.break_up()
        for rollout in self._members.of_role("rollout"):
            rollout.num_failed_updates = 0

    def node_left(self, node: Node, reason: str, now: float) -> None:
        """A node is gone; the update at hand may have needed it."""
        if self.current is None:
            return
        if node.role == "learner":
            self.abort(f"the learner {node.node_id} went away", now)
        elif node.node_id in self.current.members:
            self._fail_member(self.current, node.node_id, f"went away: {reason}", now)

    def extend_deadlines(self, stall_s: float) -> None:
        """The coordinator stood still for ``stall_s``: nobody is late for it."""
        if self.current is not None:
            self.current.deadline += stall_s

    def expire(self, now: float) -> None:
        """Repeat what may be lost; end an update that is past its deadline."""
        if self._unconfirmed_abort is not None and now - self._abort_sent_at >= self._again_s:
            self._send_abort(self._unconfirmed_abort, now)
        if (update := self.current) is None:
            return
        if now <= update.deadline:
            for node_id in update.plans_to_repeat(now, self._again_s):
                self._effects.send(self._members.nodes[node_id].identity, update.plan)
            return
        late = update.missing()
        for node_id in late:
            error = "did not finish within run.weight_update_timeout_s"
            self._fail_member(update, node_id, error, now, at_fault=True)
        if not late:
            self.abort("the learner did not finish within run.weight_update_timeout_s", now)

    def wanted(self, version: int, now: float) -> bool:
        """Some live engine has no valid weights and hasn't just failed to take them."""
        return self.current is None and any(
            not is_current(node, version) and now - node.failed_at > UPDATE_AGAIN_S
            for node in self._members.by_role["rollout"].values()
        )

    # ---- messages ----

    def on_request(self, node: Node, message: m.WeightUpdateRequest, received: Received, now: float) -> None:
        """The learner has weights for the engines: plan an update."""
        if self.current is not None:
            self.abort("the learner began another update", now)
        self._unconfirmed_abort = None  # it is in no update
        receivers = [
            rollout
            for rollout in self._members.of_role("rollout")
            if not (message.only_fenced and is_current(rollout, message.tag.version))
            and rollout.num_failed_updates < MAX_FAILED_UPDATES
        ]
        if reason := unreachable(message.stores, node, receivers):
            return self._effects.reply(node, received.seq, m.Refused(reason=reason, fatal=False))
        update = self.current = plan_weight_update(
            next(self._update_ids), message, receivers, self._standing, now=now, timeout_s=self._timeout_s
        )
        self._effects.reply(node, received.seq, update.plan)
        for receiver in receivers:
            self._effects.send(receiver.identity, update.plan)

    def on_ready(self, node: Node, message: m.WeightUpdateReady, received: Received, now: float) -> None:
        """A side has its groups."""
        if (update := self._update_of(message.update_id, node, received)) is None:
            return
        if node.role == "learner":
            update.learner_ready_seq = received.seq
        else:
            update.ready[node.node_id] = received.seq
        if update.transfers:  # another request than the one that was answered
            self._effects.reply(node, received.seq, m.TransferStart(update_id=update.update_id))
        self._advance(now)

    def on_loaded(self, node: Node, message: m.WeightsLoaded, received: Received, now: float) -> None:
        """A node holds the new version."""
        if (update := self._update_of(message.update_id, node, received)) is None:
            return
        update.done[node.node_id] = message.pause_s
        node.holds, node.fenced_reason = update.tag, ""
        node.state_seq = max(node.state_seq, received.seq)  # an older heartbeat has what it held before
        self._reindex(node)
        self._effects.reply(node, received.seq, m.Ack())
        self._advance(now)

    def on_failed(self, node: Node, message: m.WeightUpdateFailed, received: Received, now: float) -> None:
        """A side could not go on."""
        if (update := self._update_of(message.update_id, node, received)) is None:
            return
        self._effects.reply(node, received.seq, m.Ack())
        if node.role == "learner":
            self.abort(f"the learner failed: {message.error}", now)
            self._unconfirmed_abort = None
        else:
            self._fail_member(update, node.node_id, message.error, now)

    def on_transfer_done(self, node: Node, message: m.TransferDone, received: Received, now: float) -> None:
        """All bytes are out."""
        if (update := self._update_of(message.update_id, node, received)) is None:
            return
        update.learner_done_seq = received.seq
        update.num_bytes, update.send_s = message.num_bytes, message.send_s
        self._advance(now)

    def _update_of(self, update_id: int, node: Node, received: Received) -> WeightUpdate | None:
        if self.current is not None and self.current.update_id == update_id:
            return self.current
        if node.role == "learner":
            self._unconfirmed_abort = None
        over = m.WeightUpdateAborted(update_id=update_id, reason="that weight update is over")
        self._effects.reply(node, received.seq, over)
        return None

    # ---- the phases ----

    def _fail_member(
        self, update: WeightUpdate, node_id: str, error: str, now: float, *, at_fault: bool = False
    ) -> None:
        """Note a node's failure, and what follows from it."""
        self._effects.warning("weight_update_failed", node=node_id, tag=str(update.tag), error=error)
        update.failed[node_id] = error
        if node := self._members.nodes.get(node_id):
            node.fenced_reason, node.failed_at = error, now
            node.num_failed_updates += MAX_FAILED_UPDATES if at_fault else 1
        self._advance(now)

    def _advance(self, now: float) -> None:
        """Go on to the phase that the reports allow, or abort."""
        update, learner = self.current, self._members.learner
        if update is None or learner is None:
            return
        if update.failed and not update.learner_done_seq:
            self.abort("; ".join(f"{node}: {error}" for node, error in update.failed.items()), now)
        elif not update.transfers and update.all_ready:
            update.transfers = True
            start = m.TransferStart(update_id=update.update_id)
            self._effects.reply(learner, update.learner_ready_seq, start)
            for node_id, seq in update.ready.items():
                self._effects.reply(self._members.nodes[node_id], seq, start)
        elif update.all_reported and update.learner_done_seq:
            self._finish(update, learner, now)

    def _finish(self, update: WeightUpdate, learner: Node, now: float) -> None:
        self.num_finished += 1
        self.finished.append(update.record(now))
        acked = sorted(set(update.done) - set(update.failed))
        result = m.WeightUpdateResult(update_id=update.update_id, acked=acked, failed=update.failed)
        self._effects.reply(learner, update.learner_done_seq, result)
        self.current = None
        if update.failed:
            self._standing.break_up()
        if acked:
            self._effects.progress = True
        for node in self._members.of_role("rollout"):
            node.num_failed_updates = 0  # the next version goes to every node again

    def abort(self, reason: str, now: float) -> None:
        """Abort the update at hand, on every side."""
        update, self.current = self.current, None
        if update is None:
            return
        self._effects.warning("weight_update_aborted", tag=str(update.tag), reason=reason)
        self._standing.break_up()
        message = m.WeightUpdateAborted(update_id=update.update_id, reason=reason)
        for node_id in update.members:
            if node := self._members.nodes.get(node_id):
                self._effects.send(node.identity, message)
        if waiting := update.learner_done_seq or (0 if update.transfers else update.learner_ready_seq):
            if learner := self._members.learner:
                self._effects.reply(learner, waiting, message)
        else:
            self._unconfirmed_abort = message
            self._send_abort(message, now)

    def _send_abort(self, aborted: m.WeightUpdateAborted, now: float) -> None:
        self._abort_sent_at = now
        if learner := self._members.learner:
            self._effects.send(learner.identity, aborted)
