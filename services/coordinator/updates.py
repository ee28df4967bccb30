"""Weight updates: runs the rounds of ``sync.py`` between the learner and the engines. Part of the coordinator, without I/O.

A node that fails is fenced: it gets no leases until it holds the current version. It is tried again at the next version, or
after ``UPDATE_AGAIN_S`` when the learner has nothing to train.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable

import structlog

from common.net import is_loopback
from protocol import messages as m
from protocol.codec import Received
from services.coordinator.membership import Members, Node, Reply, is_current
from services.coordinator.weight_update import StandingGroup, WeightUpdate, plan_weight_update

log = structlog.get_logger()

MAX_FAILED_UPDATES = 2  # of a node in one publication: the first may be another's death, as this one saw it
UPDATE_AGAIN_S = 5.0  # pause before a node that failed to take weights is tried again between two steps


def unreachable(stores: list[str], learner: Node, receivers: list[Node]) -> str:
    """Why ``receivers`` can't take weights at the learner's ``stores`` (``host:port``), or ''."""
    elsewhere = sorted({node.host for node in receivers if node.host != learner.host})
    loopback = [store for store in stores if is_loopback(f"tcp://{store}")]
    if not elsewhere or not loopback:
        return ""
    return (
        f"The learner on {learner.host} offers its weights at {loopback[0]}, which rollout nodes on {', '.join(elsewhere)} can't reach. Set "
        "learner.host to an address of its machine that the others use; or run.address, in the learner's config, to one of the coordinator's "
        "that is no loopback address (coordinator.bind says what to listen on)."
    )


class WeightUpdates:
    """See the module. What nobody answers is sent again after ``again_s``: a plan to a node that isn't ready, the end of a round to the
    learner. ``boot`` counts the coordinator's starts: round ids never repeat, for nodes outlive this process."""

    def __init__(
        self,
        members: Members,
        *,
        timeout_s: float,
        again_s: float,
        boot: int,
        reply: Reply,
        on_progress: Callable[[], None],
    ) -> None:
        self._members, self._timeout_s, self._again_s = members, timeout_s, again_s
        self._reply, self._on_progress = reply, on_progress
        self._update_ids = itertools.count(boot * 1_000_000 + 1)
        self._round: WeightUpdate | None = None
        self._standing = StandingGroup()
        # What the learner may not have heard, and when it was last told: the end of a round that it may sit in for as long as its limit.
        self._untold: m.WeightUpdateAborted | None = None
        self._told_at = 0.0
        self.finished: deque[dict[str, float]] = deque(maxlen=200)  # the last ones
        self.num_finished = 0

    @property
    def round(self) -> WeightUpdate | None:
        """The update that is under way."""
        return self._round

    def new_learner(self, *, again: bool) -> None:
        """No group that stands is the sender's any more: it is another process, or (``again``) was taken for dead, and may be in a round of
        before."""
        if not again:
            self._untold = None
        self._standing.break_up()
        for rollout in self._members.of_role("rollout"):
            rollout.num_failed_updates = 0

    def node_left(self, node: Node, reason: str) -> None:
        """A node is gone; the round at hand may have needed it."""
        if self._round is None:
            return
        if node.role == "learner":
            self.abort(f"the learner {node.node_id} went away")
        elif node.node_id in self._round.members:
            self.fail_member(self._round, node.node_id, f"went away: {reason}")

    def forgive(self, stall_s: float) -> None:
        """The coordinator stood still for ``stall_s``: nobody is late for it."""
        if self._round is not None:
            self._round.deadline += stall_s

    def expire(self, now: float) -> None:
        """Remind those who may not have heard of a plan or of the end of a round; end a round that is past its deadline."""
        if self._untold is not None and now - self._told_at >= self._again_s:
            self._tell_learner(self._untold, now)
        if (update := self._round) is None:
            return
        if now <= update.deadline:
            for node_id in update.untold(now, self._again_s):
                self._reply(self._members.nodes[node_id].identity, update.plan)
            return
        late = update.missing()
        for node_id in late:
            self.fail_member(update, node_id, "did not finish within run.weight_update_timeout_s", at_fault=True)
        if not late:
            self.abort("the learner did not finish within run.weight_update_timeout_s")

    def on_request(self, node: Node, message: m.WeightUpdateRequest, received: Received) -> None:
        """The learner wants to publish: plan a round."""
        if self._round is not None:
            self.abort("the learner began another update")
        self._untold = None  # it is in no round
        receivers = [
            n
            for n in self._members.of_role("rollout")
            if not (message.only_fenced and is_current(n, message.tag.version))
            and n.num_failed_updates < MAX_FAILED_UPDATES
        ]
        if reason := unreachable(message.stores, node, receivers):
            return self._reply(node.identity, m.Refused(reason=reason, fatal=False), received.seq)
        now = time.monotonic()
        self._round = plan_weight_update(
            next(self._update_ids), message, receivers, self._standing, now=now, timeout_s=self._timeout_s
        )
        self._reply(node.identity, self._round.plan, received.seq)
        for receiver in receivers:
            self._reply(receiver.identity, self._round.plan)

    def on_ready(self, node: Node, message: m.WeightUpdateReady, received: Received) -> None:
        """A side has its groups."""
        if (update := self._round_of(message.update_id, node, received)) is None:
            return
        if node.role == "learner":
            update.learner_ready_seq = received.seq
        else:
            update.ready[node.node_id] = received.seq
        if update.went:  # another request than the one that was answered
            self._reply(node.identity, m.TransferStart(update_id=update.update_id), received.seq)
        self._advance()

    def on_done(self, node: Node, message: m.WeightsLoaded, received: Received) -> None:
        """A node holds the new version."""
        if (update := self._round_of(message.update_id, node, received)) is None:
            return
        update.done[node.node_id] = message.pause_s
        node.holds, node.fenced_reason = update.tag, ""
        node.told_seq = max(node.told_seq, received.seq)  # a heartbeat of before says what it held before
        self._reply(node.identity, m.Ack(), received.seq)
        self._advance()

    def on_failed(self, node: Node, message: m.WeightUpdateFailed, received: Received) -> None:
        """A side could not go on."""
        if (update := self._round_of(message.update_id, node, received)) is None:
            return
        self._reply(node.identity, m.Ack(), received.seq)
        if node.role == "learner":
            self.abort(f"the learner failed: {message.error}")
            self._untold = None
        else:
            self.fail_member(update, node.node_id, message.error)

    def on_sent(self, node: Node, message: m.TransferDone, received: Received) -> None:
        """All bytes are out."""
        if (update := self._round_of(message.update_id, node, received)) is None:
            return
        update.learner_sent_seq = received.seq
        update.num_bytes, update.send_s = message.num_bytes, message.send_s
        self._advance()

    def _round_of(self, update_id: int, node: Node, received: Received) -> WeightUpdate | None:
        if self._round is not None and self._round.update_id == update_id:
            return self._round
        if node.role == "learner":
            self._untold = None
        self._reply(
            node.identity, m.WeightUpdateAborted(update_id=update_id, reason="that weight update is over"), received.seq
        )
        return None

    def fail_member(self, update: WeightUpdate, node_id: str, error: str, *, at_fault: bool = False) -> None:
        """Note a node's failure, and what follows from it."""
        log.warning("weight_update_failed", node=node_id, tag=str(update.tag), error=error)
        update.failed[node_id] = error
        if node := self._members.nodes.get(node_id):
            node.fenced_reason, node.failed_at = error, time.monotonic()
            node.num_failed_updates += MAX_FAILED_UPDATES if at_fault else 1
        self._advance()

    def _advance(self) -> None:
        """Send what the state of the round allows: go, abort, or the result."""
        update = self._round
        learner = next(iter(self._members.of_role("learner")), None)
        if update is None or learner is None:
            return
        if update.failed and not update.learner_sent_seq:
            self.abort("; ".join(f"{node}: {error}" for node, error in update.failed.items()))
        elif not update.went and update.all_ready:
            update.went = True
            self._reply(learner.identity, m.TransferStart(update_id=update.update_id), update.learner_ready_seq)
            for node_id, seq in update.ready.items():
                self._reply(self._members.nodes[node_id].identity, m.TransferStart(update_id=update.update_id), seq)
        elif update.settled and update.learner_sent_seq:
            self._finish(update, learner)

    def _finish(self, update: WeightUpdate, learner: Node) -> None:
        self.num_finished += 1
        self.finished.append(update.record(time.monotonic()))
        acked = sorted(set(update.done) - set(update.failed))
        result = m.WeightUpdateResult(update_id=update.update_id, acked=acked, failed=update.failed)
        self._reply(learner.identity, result, update.learner_sent_seq)
        self._round = None
        if update.failed:
            self._standing.break_up()
        if acked:
            self._on_progress()
        for node in self._members.of_role("rollout"):
            node.num_failed_updates = 0  # the next publication tries everybody again

    def abort(self, reason: str) -> None:
        """Call the round off, for everybody."""
        update, self._round = self._round, None
        if update is None:
            return
        log.warning("weight_update_aborted", tag=str(update.tag), reason=reason)
        self._standing.break_up()
        message = m.WeightUpdateAborted(update_id=update.update_id, reason=reason)
        for node_id in update.members:
            if node := self._members.nodes.get(node_id):
                self._reply(node.identity, message)
        if waiting := update.learner_sent_seq or (0 if update.went else update.learner_ready_seq):
            for learner in self._members.of_role("learner"):
                self._reply(learner.identity, message, waiting)
        else:
            self._untold = message
            self._tell_learner(message, time.monotonic())

    def _tell_learner(self, aborted: m.WeightUpdateAborted, now: float) -> None:
        self._told_at = now
        for learner in self._members.of_role("learner"):
            self._reply(learner.identity, aborted)

    def wanted(self, version: int) -> bool:
        """Some live engine has no valid weights and hasn't just failed to take them."""
        now = time.monotonic()
        return self._round is None and any(
            not is_current(node, version) and now - node.failed_at > UPDATE_AGAIN_S
            for node in self._members.of_role("rollout")
        )
