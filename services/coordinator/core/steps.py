"""Steps: the learner's batches, handed out once or again, and its commits.

A batch is fixed in the journal before it leaves. A step that was committed before is read from there for a learner that trains it again;
of such a replay only the last step, the committed version, goes to the engines again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.errors import InvariantError
from protocol import messages as m
from protocol.codec import Received
from protocol.versions import VersionTag
from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.batches import batch_metrics, make_batch
from services.coordinator.core.effects import Effects, ReadBatch, Send
from services.coordinator.core.groups import Group
from services.coordinator.core.membership import Members, Node
from services.coordinator.core.pool import Pool
from services.coordinator.core.weight_updates import WeightUpdates

RECENT_STEPS = 200  # whose metrics are kept in memory; the journal has all
FIRST_STEPS = 5  # whose reward is what a run's last steps are compared with
CommittedStep = tuple[int, float, dict[str, float]]  # step, seconds since the epoch, metrics


@dataclass(frozen=True, slots=True)
class HandedOut:
    """The batch that the learner has and has not committed. ``since`` is of the monotonic clock."""

    step: int
    node_id: str
    since: float


class Steps:
    """See the module. ``first`` and ``recent`` are committed steps of the journal, oldest first; ``epoch_s`` is added to a monotonic time
    to get seconds since the epoch."""

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        pool: Pool,
        members: Members,
        updates: WeightUpdates,
        effects: Effects,
        first: Sequence[CommittedStep],
        recent: Sequence[CommittedStep],
        epoch_s: float,
    ) -> None:
        self._config, self._pool, self._members, self._updates = config, pool, members, updates
        self._effects, self._epoch_s = effects, epoch_s
        self.handed_out: HandedOut | None = None
        self.first_rewards = [metrics.get("reward/mean", 0.0) for _, _, metrics in first]
        self.recent = deque(recent, maxlen=RECENT_STEPS)
        self._waiting: tuple[bytes, int, int] | None = None  # a learner's identity, its request, the step
        self._latest: tuple[bytes, int] = (b"", 0)  # a learner's identity, its last request for a batch or commit

    def on_batch_request(self, node: Node, message: m.BatchRequest, received: Received, now: float) -> None:
        """Answered when there is something: see ``answer``. A late one, whose learner has gone on, would be taken for a replay."""
        if node.identity == self._latest[0] and received.seq < self._latest[1]:
            return
        self._latest = (node.identity, received.seq)
        self.handed_out = None  # a learner that asks is at no step
        self._waiting = (node.identity, received.seq, message.step)

    def answer(self, tag: VersionTag, now: float) -> None:
        """Give the waiting learner its batch; or the end of the data; or the request to load the weights of ``tag``, the committed version,
        into engines that lack them, before there is a batch."""
        if self._waiting is None or (learner := self._members.by_identity.get(self._waiting[0])) is None:
            return
        identity, seq, step = self._waiting
        version = tag.version
        if step <= version:
            self.handed_out = HandedOut(step, learner.node_id, now)
            self._effects.reads.append(ReadBatch(identity, seq, step))
        elif self._pool.finished:
            end = m.EndOfData(reason=f"{version} of {self._config.max_steps} steps are done")
            self._effects.reply(learner, seq, end)
        elif groups := self._pool.take_batch(step):
            self.handed_out = HandedOut(step, learner.node_id, now)
            batch, arrays = make_batch(step, groups, replay=False)
            self._effects.reply(learner, seq, batch, arrays)
        elif self._updates.wanted(version, now):
            self._effects.reply(learner, seq, m.WeightUpdateNeeded(tag=tag))
        else:
            return
        self._waiting = None

    def replay(self, read: ReadBatch, groups: Sequence[Group]) -> None:
        """The groups of a committed step were read.

        Raises:
            InvariantError: the batch has nothing in it.
        """
        try:
            batch, arrays = make_batch(read.step, groups, replay=True, publish=self._is_newest_held(read.step))
        except ValueError as error:
            raise InvariantError(f"The batch of step {read.step} can't be read again: {error}.") from None
        self._effects.sends.append(Send(read.identity, batch, read.seq, arrays))

    def _is_newest_held(self, step: int) -> bool:
        """Whether no engine has had newer weights: those of a step that was sent and not committed are newer, and come next."""
        held = [node.holds.version for node in self._members.of_role("rollout") if node.holds is not None]
        return step == self._pool.version and max(held, default=0) <= step

    def on_commit(self, node: Node, message: m.StepCommitted, received: Received, now: float) -> None:
        """The learner has done a step: its groups are trained, its version is the run's."""
        self._latest = (node.identity, received.seq)
        fixed = [group for group in self._pool.groups.values() if group.step == message.step]
        metrics = (batch_metrics(fixed, self._pool.version) if fixed else {}) | message.metrics
        batch = self._pool.commit(message.step, metrics)
        node.checkpoint_step = max(node.checkpoint_step, message.checkpoint_step)
        self._pool.forget(replay_from=message.replay_from)
        if self.handed_out and message.step >= self.handed_out.step:
            self.handed_out = None
        if batch:
            self._effects.progress = True
            for rollout in self._members.of_role("rollout"):  # those without the new version take no leases
                self._members.index(rollout, self._pool.version)
            self.recent.append((message.step, self._epoch_s + now, metrics))
            if len(self.first_rewards) < FIRST_STEPS:
                self.first_rewards.append(metrics.get("reward/mean", 0.0))
            rounded = {key: round(value, 4) for key, value in metrics.items()}
            self._effects.info("step", step=message.step, **rounded)
        self._effects.reply(node, received.seq, m.Ack(accepted=bool(batch)))

    def learner_back(self, node: Node, now: float) -> None:
        """It was cut off for a while and goes on with what it had: maybe a step. Else it asks again at once."""
        self.handed_out = HandedOut(self._pool.version + 1, node.node_id, now)

    def node_left(self, node: Node) -> None:
        """A learner that is gone waits for nothing, and its batch is handed out again."""
        if self.handed_out and self.handed_out.node_id == node.node_id:
            self.handed_out = None
        if self._waiting and self._waiting[0] == node.identity:
            self._waiting = None

    def extend_deadlines(self, stall_s: float) -> None:
        """The coordinator stood still for ``stall_s``: the learner is not late for it."""
        if self.handed_out is not None:
            self.handed_out = replace(self.handed_out, since=self.handed_out.since + stall_s)
