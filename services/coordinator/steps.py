"""Steps: the learner's batches, handed out once or again, and its commits. Part of the coordinator.

A batch is fixed in the journal before it leaves. A step that was committed before is read from there for a learner that trains it again;
of such a replay only the last step, the committed version, is published anew.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import structlog

from common.errors import ForebayError, InvariantError
from protocol import messages as m
from protocol.codec import Received
from protocol.versions import VersionTag
from services.coordinator.batches import batch_metrics, make_batch
from services.coordinator.config import CoordinatorConfig
from services.coordinator.journal import Journal
from services.coordinator.membership import Members, Node, Reply
from services.coordinator.pool import Pool
from services.coordinator.updates import WeightUpdates
from services.coordinator.waits import HandedOut

log = structlog.get_logger()

RECENT_STEPS = 200  # whose metrics are kept at hand; the journal has all
FIRST_STEPS = 5  # whose reward is what a run's last steps are compared with


class StepDesk:
    """See the module. ``on_replay_read`` is called when a batch was read from the journal, with the error if that failed."""

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        pool: Pool,
        members: Members,
        updates: WeightUpdates,
        journal: Journal,
        reply: Reply,
        on_progress: Callable[[], None],
        on_replay_read: Callable[[ForebayError | None], None],
    ) -> None:
        self._config, self._pool, self._members, self._updates, self._journal = config, pool, members, updates, journal
        self._reply, self._on_progress, self._on_replay_read = reply, on_progress, on_replay_read
        self.handed_out: HandedOut | None = None
        first, recent = journal.steps(first=FIRST_STEPS, last=RECENT_STEPS)
        self.first_rewards = [metrics.get("reward/mean", 0.0) for _, _, metrics in first]
        self.recent = deque(recent, maxlen=RECENT_STEPS)  # (step, seconds since the epoch, metrics)
        self._waiting: tuple[bytes, int, int] | None = None  # a learner's identity, its request, the step
        self._heard: tuple[bytes, int] = (b"", 0)  # a learner's identity, its last request for a batch or commit
        self._replays: set[asyncio.Task[None]] = set()

    def on_batch_request(self, node: Node, message: m.BatchRequest, received: Received) -> None:
        """Answered when there is something: see ``answer``. One that is late, for its learner has gone on, would be taken for a replay."""
        if node.identity == self._heard[0] and received.seq < self._heard[1]:
            return
        self._heard = (node.identity, received.seq)
        self.handed_out = None  # who asks is at no step
        self._waiting = (node.identity, received.seq, message.step)

    def answer(self, tag: VersionTag) -> None:
        """Give the learner that waits its batch; or the end of the data; or the word that engines need the weights of ``tag``, the committed
        ones, before there is one."""
        if self._waiting is None:
            return
        identity, seq, step = self._waiting
        version = tag.version
        if step <= version:
            self._hand_out(identity, step)
            replay = asyncio.create_task(self._replay(identity, seq, step))
            self._replays.add(replay)
            replay.add_done_callback(self._replays.discard)
        elif self._pool.finished:
            end = m.EndOfData(reason=f"{version} of {self._config.max_steps} steps are done")
            self._reply(identity, end, seq)
        elif groups := self._pool.take_batch(step):
            self._hand_out(identity, step)
            batch, arrays = make_batch(step, groups, replay=False)
            self._reply(identity, batch, seq, arrays)
        elif self._updates.wanted(version):
            self._reply(identity, m.WeightUpdateNeeded(tag=tag), seq)
        else:
            return
        self._waiting = None

    def _hand_out(self, identity: bytes, step: int) -> None:
        if learner := self._members.by_identity(identity):
            self.handed_out = HandedOut(step, learner.node_id, time.monotonic())

    async def _replay(self, identity: bytes, seq: int, step: int) -> None:
        try:
            groups = await asyncio.to_thread(self._journal.batch, step)
            batch, arrays = make_batch(step, groups, replay=True, publish=self._is_last_published(step))
            self._reply(identity, batch, seq, arrays)
        except ForebayError as error:
            return self._on_replay_read(error)
        except ValueError as error:  # of a batch that has nothing in it
            return self._on_replay_read(InvariantError(f"The batch of step {step} can't be read again: {error}."))
        return self._on_replay_read(None)

    def _is_last_published(self, step: int) -> bool:
        """Whether no engine has had newer weights: those of a step that was published and not committed are newer, and come next."""
        held = [node.holds.version for node in self._members.of_role("rollout") if node.holds is not None]
        return step == self._pool.version and max(held, default=0) <= step

    def on_commit(self, node: Node, message: m.StepCommitted, received: Received) -> None:
        """The learner has done a step: its groups are trained, its version is the run's."""
        self._heard = (node.identity, received.seq)
        fixed = [group for group in self._pool.groups.values() if group.step == message.step]
        metrics = (batch_metrics(fixed, self._pool.version) if fixed else {}) | message.metrics
        batch = self._pool.commit(message.step, metrics)
        node.checkpoint_step = max(node.checkpoint_step, message.checkpoint_step)
        self._pool.forget(replay_from=message.replay_from)
        if self.handed_out and message.step >= self.handed_out.step:
            self.handed_out = None
        if batch:
            self._on_progress()
            self.recent.append((message.step, time.time(), metrics))
            if len(self.first_rewards) < FIRST_STEPS:
                self.first_rewards.append(metrics.get("reward/mean", 0.0))
            log.info("step", step=message.step, **{key: round(value, 4) for key, value in metrics.items()})
        self._reply(node.identity, m.Ack(accepted=bool(batch)), received.seq)

    def learner_back(self, node: Node) -> None:
        """It lost us, or this coordinator's earlier life, for a while, and goes on with what it had: maybe a step. Else it asks again at once."""
        self.handed_out = HandedOut(self._pool.version + 1, node.node_id, time.monotonic())

    def node_left(self, node: Node) -> None:
        """A learner that is gone waits for nothing, and what it had is handed out again."""
        if self.handed_out and self.handed_out.node_id == node.node_id:
            self.handed_out = None
        if self._waiting and self._waiting[0] == node.identity:
            self._waiting = None

    def forgive(self, stall_s: float) -> None:
        """The coordinator stood still for ``stall_s``: the learner is not late for it."""
        if self.handed_out is not None:
            self.handed_out = replace(self.handed_out, since=self.handed_out.since + stall_s)

    def close(self) -> None:
        """Nobody waits for a replay any more."""
        for replay in self._replays:
            replay.cancel()
