"""A coordinator without sockets, nodes that behave as badly as real ones can, and crashes that leave what a real crash leaves.

Messages go through ``Core.handle``, records into a real journal, and messages reach the nodes only after those are written. A crash loses what wasn't flushed, records and messages alike; or it comes after the write,
and only the first few of the messages were sent. Nodes keep their open requests and send them again, as ``NodeChannel`` does.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.loop_watch import LoopWatch
from protocol import messages as m
from protocol.codec import Received
from protocol.config import RunConfig
from protocol.suites import AssertSuite
from protocol.tasks import Task
from protocol.verdicts import JudgeResult, Verdict
from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.core import Core, SavedRun
from services.coordinator.core.effects import Effects, Send
from services.coordinator.core.steps import FIRST_STEPS, RECENT_STEPS
from services.coordinator.journal import Journal

SUITE = AssertSuite(kind="asserts", entry_point="f", code="assert f(1) == 1")
BROKEN = JudgeResult(verdict=Verdict.INFRA_ERROR, message="no disk")
REWARDS = [
    JudgeResult(verdict=Verdict.WRONG_ANSWER, reward=0.0),
    JudgeResult(verdict=Verdict.ACCEPTED, reward=1.0),
]


class Clock:
    """The core's time: it goes on only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0


@dataclass
class Draft:
    """A generate lease as its node sees it, with the completion at hand."""

    lease: m.GenerateLease
    todo: list[int]
    segments: list[m.Segment] = field(default_factory=list)
    told_to_stop: bool = False

    @property
    def num_tokens(self) -> int:
        """Of the unfinished completion."""
        return sum(segment.num_tokens for segment in self.segments)


class Process:
    """A node process with its open requests. ``world`` carries what it says."""

    role = ""

    def __init__(self, world: World, name: str, life: int) -> None:
        self.world, self.name, self.identity = world, name, f"{name}#{life}".encode()
        self.alive = True
        self.capacity = 3
        self.run_uid = ""
        self.leases: dict[str, Any] = {}
        self.pending: dict[int, tuple[m.Message, dict[str, Any]]] = {}
        self.said: list[int] = []  # sequence numbers of all its requests
        self._requests: dict[int, tuple[m.Message, dict[str, Any]]] = {}
        self._seq = itertools.count(1)

    def request(self, message: m.Message, **arrays: Any) -> None:
        """Send, and keep until it is answered."""
        seq = next(self._seq)
        self.pending[seq] = self._requests[seq] = (message, arrays)
        self.said.append(seq)
        self.world.say(self, seq, message, arrays)

    def say_again(self, seq: int, *, as_new: bool) -> tuple[m.Message, dict[str, Any]]:
        """A request that was sent before: the same bytes, or its content under a new number."""
        message, arrays = self._requests[seq]
        if as_new:
            self.request(message, **arrays)
        else:
            self.world.say(self, seq, message, arrays)
        return message, arrays

    def hello(self) -> None:
        """Join, or join again. One that waits for its answer is given up."""
        self.pending = {seq: sent for seq, sent in self.pending.items() if not isinstance(sent[0], m.Hello)}
        fields = {"role": self.role, "node_id": self.name, "host": "h", "pid": 1, "capacity": self.capacity}
        self.request(m.Hello(**fields, run_uid=self.run_uid, **self.hello_fields()))

    def hello_fields(self) -> dict[str, Any]:
        """The role's own."""
        return {}

    def beat(self) -> None:
        """A heartbeat, which isn't sent again."""
        beat = m.Heartbeat(capacity=self.capacity, lease_ids=list(self.leases), **self.beat_fields())
        self.world.say(self, next(self._seq), beat, {})

    def beat_fields(self) -> dict[str, Any]:
        """The role's own."""
        return {}

    def write_everywhere(self) -> None:
        """Get into the middle of all completions at hand."""

    def receive(self, message: m.Message, re: int, arrays: dict[str, Any]) -> None:
        """What the coordinator sends."""
        if re in self.pending:
            request, sent = self.pending.pop(re)
            if isinstance(message, m.Welcome):
                self.beat()
                self.run_uid = message.run_uid
                for seq, (open_request, its_arrays) in list(self.pending.items()):
                    self.world.say(self, seq, open_request, its_arrays)
            elif isinstance(message, m.Refused):
                assert "has ended" in message.reason, message.reason
                self.alive = False
            else:
                self.on_answer(request, sent, message, arrays)
        elif isinstance(message, m.HeartbeatAck):
            if not message.known:
                self.hello()
            self.on_lost(message.lost_lease_ids)
        elif isinstance(message, m.CancelLease):
            self.on_lost([message.lease_id])
        elif isinstance(message, m.Shutdown):
            self.alive = False
        else:
            self.on_push(message)

    def on_answer(self, request: m.Message, sent: dict[str, Any], answer: m.Message, arrays: dict[str, Any]) -> None:
        """Its request is done."""

    def on_push(self, message: m.Message) -> None:
        """A lease."""

    def on_lost(self, lease_ids: list[str]) -> None:
        """Leases to stop working on."""


class Rollout(Process):
    """Generates. Each completion's first token is a serial number of its own, so that contents can be told apart."""

    role = "rollout"

    def __init__(self, world: World, name: str, life: int, holds: m.VersionTag) -> None:
        super().__init__(world, name, life)
        self.holds = holds
        self.generated = self.sent = self.settled = 0  # tokens: all, those of its results, those of answered results
        self.beaten = 0  # ``generated`` as of its last heartbeat

    def hello_fields(self) -> dict[str, Any]:
        """Weights, and the leases at work."""
        open_leases = [m.OpenLease(lease_id=key, group_id=draft.lease.group_id) for key, draft in self.leases.items()]
        return {"holds": self.holds, "open_leases": open_leases, "settled_tokens": self.settled}

    def beat_fields(self) -> dict[str, Any]:
        """True counters."""
        self.beaten = self.generated
        return {"holds": self.holds, "counters": {"generated_tokens": float(self.generated)}}

    def on_push(self, message: m.Message) -> None:
        """Take the lease."""
        if isinstance(message, m.GenerateLease):
            self.leases[message.lease_id] = Draft(message, list(message.sample_indices))

    def on_lost(self, lease_ids: list[str]) -> None:
        """Remember it; acted on later."""
        for lease_id in lease_ids:
            if lease_id in self.leases:
                self.leases[lease_id].told_to_stop = True

    def write(self, draft: Draft, num_tokens: int) -> None:
        """Some tokens of the completion at hand, with the weights of this moment."""
        self.generated += num_tokens
        last = draft.segments[-1] if draft.segments else None
        if last is not None and last.version == self.holds.version:
            draft.segments[-1] = m.Segment(version=last.version, num_tokens=last.num_tokens + num_tokens)
        else:
            draft.segments.append(m.Segment(version=self.holds.version, num_tokens=num_tokens))

    def write_everywhere(self) -> None:
        """A token of each."""
        for draft in self.leases.values():
            if draft.todo:
                self.write(draft, 1)

    def finish(self, lease_id: str, *, text: str, malformed: bool = False) -> None:
        """Send the completion at hand."""
        draft = self.leases[lease_id]
        self.write(draft, 1)
        index, serial, count = draft.todo.pop(0), next(self.world.serials), draft.num_tokens
        result = m.SampleResult(
            lease_id=lease_id,
            group_id=draft.lease.group_id,
            sample_index=index,
            text=text,
            finish_reason="stop",
            segments=draft.segments[:-1] if malformed else draft.segments,
        )
        draft.segments = []
        self.sent += count
        self.request(
            result,
            prompt_ids=np.asarray([1, 2], np.int32),
            completion_ids=np.asarray([serial] + [7] * (count - 1), np.int32),
            logprobs=np.full(count, -1.0, np.float32),
        )
        self._end_if_done(lease_id)

    def give_up(self, lease_id: str, *, failed: bool, permanent: bool = False) -> None:
        """The lease failed, or is given back."""
        num_tokens = self.leases[lease_id].num_tokens
        self.sent += num_tokens
        if failed:
            self.request(m.LeaseFailed(lease_id=lease_id, error="boom", permanent=permanent, num_tokens=num_tokens))
        else:
            self.request(m.LeaseCancelled(lease_id=lease_id, reason="cancelled", num_tokens=num_tokens))
        draft = self.leases[lease_id]
        draft.todo, draft.segments = [], []
        self._end_if_done(lease_id)

    def _end_if_done(self, lease_id: str) -> None:
        """A lease is held until all that it brought about is acknowledged."""
        draft = self.leases.get(lease_id)
        waits = any(getattr(message, "lease_id", None) == lease_id for message, _ in self.pending.values())
        if draft is not None and not draft.todo and not waits:
            del self.leases[lease_id]

    def on_answer(self, request: m.Message, sent: dict[str, Any], answer: m.Message, arrays: dict[str, Any]) -> None:
        """Acknowledged: the world's model takes note."""
        if isinstance(request, m.SampleResult):
            self.settled += sent["completion_ids"].size
            if answer.accepted:
                self.world.on_sample_acked(request, int(sent["completion_ids"][0]))
        elif isinstance(request, m.LeaseFailed | m.LeaseCancelled):
            self.settled += request.num_tokens
        self._end_if_done(getattr(request, "lease_id", ""))


class Reward(Process):
    """Judges."""

    role = "reward"

    def hello_fields(self) -> dict[str, Any]:
        """The leases at work."""
        leases_ = [
            m.OpenLease(lease_id=key, group_id=lease.group_id, sample_index=lease.sample_index)
            for key, lease in self.leases.items()
        ]
        return {"open_leases": leases_}

    def on_push(self, message: m.Message) -> None:
        """Take the lease."""
        if isinstance(message, m.ScoreLease):
            self.leases[message.lease_id] = message

    def judge(self, lease_id: str, result: JudgeResult) -> None:
        """Answer with a verdict."""
        lease = self.leases.pop(lease_id)
        fields = {name: getattr(lease, name) for name in ("lease_id", "group_id", "sample_index")}
        self.request(m.ScoreResult(**fields, result=result))

    def give_up(self, lease_id: str, *, failed: bool) -> None:
        """The lease failed, or is given back."""
        del self.leases[lease_id]
        if failed:
            self.request(m.LeaseFailed(lease_id=lease_id, error="boom"))
        else:
            self.request(m.LeaseCancelled(lease_id=lease_id, reason="cancelled"))

    def on_answer(self, request: m.Message, sent: dict[str, Any], answer: m.Message, arrays: dict[str, Any]) -> None:
        """Acknowledged: the world's model takes note."""
        if isinstance(request, m.ScoreResult) and request.result.reward is not None:
            self.world.on_score_acked(request)


class Learner(Process):
    """Trains what it is given. ``step`` is the version of its weights; ``world.checkpoints`` outlive it."""

    role = "learner"

    def __init__(self, world: World, life: int, step: int) -> None:
        super().__init__(world, "learner", life)
        self.step = self.began_at = step
        self.batch: m.Batch | None = None
        self.trained = False  # the batch at hand
        self.weight_update_needed = self.ended = False

    def hello_fields(self) -> dict[str, Any]:
        """Where this process began."""
        return {"checkpoint_step": self.began_at}

    def ask(self) -> None:
        """For the next batch, unless it waits for something."""
        if not self.pending and self.batch is None and not self.weight_update_needed and not self.ended:
            self.request(m.BatchRequest(step=self.step + 1))

    def train(self, reached: list[Rollout]) -> None:
        """An optimizer step, or only a publication; ``reached`` take the weights."""
        if self.batch is not None and not self.trained:
            self.trained = True
            self.step += 1
            if self.batch.publish:
                self._publish(reached)
        elif self.weight_update_needed:
            self.weight_update_needed = False
            self._publish(reached)

    def _publish(self, reached: list[Rollout]) -> None:
        for node in reached:
            node.holds = m.VersionTag(version=self.step)

    def commit(self) -> None:
        """The step is done."""
        if self.batch is not None and self.trained and not self.pending:
            kept = self.world.checkpoints
            self.request(m.StepCommitted(step=self.step, metrics={}, checkpoint_step=max(kept), replay_from=min(kept)))

    def on_answer(self, request: m.Message, sent: dict[str, Any], answer: m.Message, arrays: dict[str, Any]) -> None:
        """A batch, or a word on why there is none."""
        match answer:
            case m.Batch():
                self.world.on_batch(answer, arrays)
                self.batch, self.trained = answer, False
            case m.WeightUpdateNeeded():
                assert answer.tag.version == self.step
                self.weight_update_needed = True
            case m.EndOfData():
                self.world.on_end_of_data(self.step)
                self.ended = True
            case m.Ack() if isinstance(request, m.StepCommitted):
                self.world.on_commit_acked(request.step)
                if self.trained and request.step == self.step:
                    self.batch = None


class World:
    """See the module. ``on_*`` are what nodes were told: facts that no crash may undo; the machine overrides them."""

    def __init__(self, folder: Path, config: CoordinatorConfig, num_tasks: int) -> None:
        self.clock = Clock()
        self.loop = asyncio.new_event_loop()
        self.folder, self.config = folder, config
        self.tasks = [Task(task_id=str(i), prompt="p", tests=SUITE) for i in range(num_tasks)]
        self.serials = itertools.count(1)
        self.lives = itertools.count(1)
        self.nodes: list[Process] = []  # of all times
        self.checkpoints = {0}
        self.inbox: list[tuple[bytes, Received]] = []
        self.hold = 0  # messages that are handled before the next flush
        self.start()

    def start(self) -> None:
        """A coordinator on the journal as it is."""
        self.journal = Journal(self.folder / "journal.sqlite", run_id="r")
        self.journal._db.execute("PRAGMA synchronous = OFF")  # nobody pulls the plug here, and a test has many writes
        run = RunConfig(id="r", dir=self.folder, model=self.folder)
        first, recent = self.journal.steps(first=FIRST_STEPS, last=RECENT_STEPS)
        saved = SavedRun(self.journal.run_uid, self.journal.meta, self.journal.state, first, recent)
        self.core = Core(
            run, self.config, self.tasks, saved,
            now=self.clock.now, epoch_s=0.0, lease_prefix=f"life{next(self.lives)}",
        )  # fmt: skip
        self.run, self.loop_watch = run, LoopWatch()  # for a status
        self.effects: list[Effects] = []  # not carried out yet
        self.failure: Exception | None = None

    def close(self) -> None:
        """End everything."""
        self.journal.close()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    # ---- messages ----

    def say(self, node: Process, seq: int, message: m.Message, arrays: dict[str, Any]) -> None:
        """On its way to the coordinator."""
        self.inbox.append((node.identity, Received(message, "r", seq, 0, arrays)))

    def pump(self) -> None:
        """Let messages go to and fro until nobody has anything to say; or until so many are handled as ``hold`` says."""
        self.loop.run_until_complete(self._pump())

    async def _pump(self) -> None:
        for _ in range(1000):
            while self.inbox:
                self.effects.append(self.core.handle([self.inbox.pop(0)], self.clock.now))
                if self.hold:
                    self.hold -= 1
                    if self.hold:
                        continue
                    break
            if self.hold:
                return
            for outgoing in await self._flush():
                self._deliver(*outgoing)
            if not self.inbox:
                return
        raise AssertionError("the coordinator and its nodes never stop talking")

    async def _flush(self) -> list[Send]:
        """Make durable what there is; the messages that may leave then."""
        outbox: list[Send] = []
        self.effects.append(self.core.handle([], self.clock.now))
        while self.effects:
            effects = self.effects.pop(0)
            self.failure = self.failure or (effects.end.error if effects.end else None)
            if effects.records:
                await self.journal.submit(effects.records)
            outbox += effects.sends
            self.effects += [
                self.core.batch_read(read, self.journal.batch(read.step), self.clock.now) for read in effects.reads
            ]
        self.on_durable()
        return outbox

    def tick(self) -> None:
        """What is overdue ends."""
        self.effects.append(self.core.tick(self.clock.now))

    def _deliver(self, identity: bytes, message: m.Message, re: int, arrays: Any) -> None:
        for node in self.nodes:
            if node.identity == identity and node.alive:
                node.receive(message, re, arrays or {})

    def crash(self, *, durable: bool, num_sent: int) -> None:
        """The coordinator dies and is started again. ``durable``: after the write, with ``num_sent`` messages sent."""
        if durable:
            for outgoing in self.loop.run_until_complete(self._flush())[:num_sent]:
                self._deliver(*outgoing)
        self.journal.close()
        self.inbox.clear()
        self.hold = 0
        self.start()

    # ---- nodes ----

    def live(self, role: type[Any]) -> list[Any]:
        """Live processes of a role."""
        return [node for node in self.nodes if node.alive and isinstance(node, role)]

    def add(self, node: Process) -> None:
        """A process starts; an older one of that name is gone."""
        for other in self.nodes:
            if other.name == node.name:
                other.alive = False
        self.nodes.append(node)
        node.hello()
        self.pump()

    # ---- what nodes were told ----

    def on_durable(self) -> None:
        """The journal has everything up to now."""

    def on_sample_acked(self, request: m.SampleResult, serial: int) -> None:
        """A rollout node may forget this completion."""

    def on_score_acked(self, request: m.ScoreResult) -> None:
        """A reward node may forget this verdict."""

    def on_batch(self, batch: m.Batch, arrays: dict[str, Any]) -> None:
        """The learner trains this."""

    def on_commit_acked(self, step: int) -> None:
        """The learner goes on from this step."""

    def on_end_of_data(self, step: int) -> None:
        """The learner leaves."""
