"""The coordinator's decisions: ``Core.handle`` and ``Core.tick`` map messages and time to effects, and change nothing but memory.

    shell (service.py)                         core
      messages, time     -----------------> handle
      time, every 0.2 s  -----------------> tick
      groups of a step   -----------------> batch_read
                         <----------------- Effects: records to write, messages that leave after it, reads, log lines, the end

The same calls with the same arguments always give the same effects, so a run of simulated nodes replays exactly (``tests/simulation``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import ForebayError, GivenUp, InvariantError, ProtocolError
from protocol import messages as m
from protocol.codec import Received
from protocol.config import RunConfig
from protocol.tasks import Task
from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.admission import TaskCursor
from services.coordinator.core.effects import Effects, EndRun, ReadBatch, Send
from services.coordinator.core.groups import Group
from services.coordinator.core.leases import Leases
from services.coordinator.core.ledger import TokenCounts
from services.coordinator.core.membership import Members, Membership, Node
from services.coordinator.core.pool import Pool, PoolState
from services.coordinator.core.steps import CommittedStep, Steps
from services.coordinator.core.waits import FirstSeen, observe, standstill, step_overdue
from services.coordinator.core.weight_updates import WeightUpdates

Handler = Callable[[Node, Any, Received, float], None]


@dataclass
class SavedRun:
    """What the journal has of the run. ``first_steps`` and ``recent_steps`` are committed ones, oldest first."""

    run_uid: str
    meta: Mapping[str, str] = field(default_factory=dict)
    pool: PoolState = field(default_factory=PoolState)
    first_steps: Sequence[CommittedStep] = ()
    recent_steps: Sequence[CommittedStep] = ()


class Core:
    """See the module. ``now`` is a monotonic time in seconds, here and in every call; ``epoch_s`` turns it into seconds since the epoch.
    ``lease_prefix`` is unique to this life of the coordinator."""

    def __init__(
        self,
        run: RunConfig,
        config: CoordinatorConfig,
        tasks: list[Task],
        saved: SavedRun,
        *,
        now: float,
        epoch_s: float,
        lease_prefix: str,
    ) -> None:
        self.run, self.config, self.tasks = run, config, tasks
        self.state, self.end_reason, self.export_dir = "running", "", ""
        self.started_at = self.progress_at = now
        self.first_seen = FirstSeen()
        effects = self._effects = Effects()
        cursor = TaskCursor(len(tasks), seed=run.seed, shuffle=config.shuffle, max_epochs=config.max_epochs)
        self.pool = pool = Pool(config, cursor, saved.pool, effects)
        boot = int(saved.meta.get("boots", "0")) + 1
        pool.keep_meta("boots", str(boot))
        self.members = members = Members(lease_prefix)
        self.counts = TokenCounts(pool, saved.meta, effects)
        self.leases = Leases(
            run, config, tasks, pool=pool, members=members, counts=self.counts, effects=effects,
            known_nodes=json.loads(saved.meta.get("nodes", "[]")), now=now,
        )  # fmt: skip
        self.updates = WeightUpdates(
            members, timeout_s=run.weight_update_timeout_s, again_s=config.node_timeout_s, boot=boot, effects=effects,
            reindex=lambda node: members.index(node, pool.version),
        )  # fmt: skip
        self.steps = Steps(
            config, pool=pool, members=members, updates=self.updates, effects=effects,
            first=saved.first_steps, recent=saved.recent_steps, epoch_s=epoch_s,
        )  # fmt: skip
        self.membership = Membership(
            run, config, run_uid=saved.run_uid, meta=saved.meta, pool=pool, members=members, counts=self.counts,
            leases=self.leases, steps=self.steps, updates=self.updates, effects=effects,
        )  # fmt: skip
        self._handlers = self._handler_table()

    def _handler_table(self) -> dict[type[m.Message], Handler]:
        return {
            m.Heartbeat: self._on_heartbeat,
            m.Goodbye: self.membership.on_goodbye,
            m.SampleResult: self.leases.on_sample,
            m.ScoreResult: self.leases.on_score,
            m.SuiteRequest: self.leases.on_suite_request,
            m.LeaseFailed: self.leases.on_lease_failed,
            m.LeaseCancelled: self.leases.on_lease_cancelled,
            m.BatchRequest: self.steps.on_batch_request,
            m.StepCommitted: self.steps.on_commit,
            m.LearnerDone: self._on_learner_done,
            m.WeightUpdateRequest: self.updates.on_request,
            m.WeightUpdateReady: self.updates.on_ready,
            m.WeightsLoaded: self.updates.on_loaded,
            m.WeightUpdateFailed: self.updates.on_failed,
            m.TransferDone: self.updates.on_transfer_done,
        }

    # ---- calls of the shell ----

    def handle(self, messages: Iterable[tuple[bytes, Received]], now: float) -> Effects:
        """Messages with the identities they came from, in order; then work is given out."""
        for identity, received in messages:
            try:
                self._handle(identity, received, now)
            except (InvariantError, ProtocolError) as error:
                self.fail(error)
        return self._finish(now)

    def tick(self, now: float, *, stalled_s: float = 0.0, disk_full: bool = False) -> Effects:
        """Time has passed: end what is overdue.

        ``stalled_s``: the process stood still for so long (stopped, suspended, starved), and messages of that time wait to be read.
        ``disk_full``: the journal waits for space, which has a limit of its own.
        """
        if stalled_s:
            self._effects.warning("stood_still", stall_s=round(stalled_s, 1))
            self.progress_at += stalled_s
            for part in (self.members, self.updates, self.steps):
                part.extend_deadlines(stalled_s)
        self.membership.expire(now)
        self.leases.expire(now)
        self.updates.expire(now)
        observe(self, now)
        if disk_full or self.steps.handed_out:  # a step has a limit of its own, too
            self.progress_at = now
        if self.state == "running" and (error := step_overdue(self, now) or standstill(self, now)):
            self.fail(error)
        return self._finish(now)

    def batch_read(self, read: ReadBatch, groups: Sequence[Group] | ForebayError, now: float) -> Effects:
        """The answer to ``ReadBatch``: the step's groups, or why they can't be read."""
        try:
            if isinstance(groups, ForebayError):
                raise groups
            self.steps.replay(read, groups)
        except ForebayError as error:
            self.fail(error)
        return self._finish(now)

    def stop(self, reason: str) -> None:
        """End the run in order; the effects come with the next call."""
        self._end("stopped", reason)

    def fail(self, error: ForebayError) -> None:
        """End the run with an error; the effects come with the next call."""
        self._effects.error("run_failed", error=str(error))
        self._end("failed", str(error), error)

    @property
    def all_left(self) -> bool:
        """Whether no node is in the run any more, be it silent for a while."""
        return not self.members.nodes and not self.membership.silent

    # ---- inside ----

    def _finish(self, now: float) -> Effects:
        """Give out what can be given out, and hand over the effects."""
        if self.state == "running":
            self.leases.add(self.pool.admit())
            self.leases.dispatch(now)
            try:
                self.steps.answer(self.membership.tag, now)
            except InvariantError as error:
                self.fail(error)
            if reason := self.pool.quarantine.give_up_reason:
                advice = "The journal keeps what there is; mend the cause and resume the run."
                self.fail(GivenUp(f"{reason} {advice}"))
        self.membership.flush()
        self.pool.flush()
        if self._effects.progress:
            self.progress_at = now
        return self._effects.take()

    def _handle(self, identity: bytes, received: Received, now: float) -> None:
        message, seq = received.message, received.seq
        node = self.members.by_identity.get(identity)
        if isinstance(message, m.StopRequest):
            return self._on_stop(identity, seq, message)
        if isinstance(message, m.Hello):
            if self.state == "running":
                return self.membership.on_hello(identity, seq, message, now)
            refused = m.Refused(reason=f"The run has ended: {self.end_reason}.")
            self.membership.silent.pop(message.node_id, None)
            return self._effects.reply_once(identity, seq, refused)
        if node is None:
            if isinstance(message, m.Heartbeat):
                self._on_unknown_heartbeat(identity, seq)
            return None  # anything else is sent again after the hello that the heartbeat's answer asks for
        if (answer := node.answers.get(seq)) is not None:  # it was lost, or the request came twice
            self.leases.repeated(node, received)
            return self._effects.sends.append(Send(identity, answer, seq))
        handler = self._handlers.get(type(message))
        if handler is None:
            reason = f"A coordinator takes no {message.kind}."
            return self._effects.reply(node, seq, m.Refused(reason=reason))
        return handler(node, message, received, now)

    def _on_heartbeat(self, node: Node, beat: m.Heartbeat, received: Received, now: float) -> None:
        self.membership.on_heartbeat(node, beat, received, now)
        if self.state != "running":  # the first Shutdown may be lost
            self._effects.send(node.identity, m.Shutdown(reason=self.end_reason))

    def _on_unknown_heartbeat(self, identity: bytes, seq: int) -> None:
        """From a node that was silent for long, or that a coordinator before this one knew."""
        if self.state == "running":
            return self._effects.reply_once(identity, seq, m.HeartbeatAck(known=False))
        self._effects.send(identity, m.Shutdown(reason=self.end_reason))
        silent = self.membership.silent
        for node_id in [node_id for node_id, its_identity in silent.items() if its_identity == identity]:
            del silent[node_id]
        return None

    def _on_stop(self, identity: bytes, seq: int, message: m.StopRequest) -> None:
        self._end("stopped", message.reason)
        silent = ", ".join(sorted(self.membership.silent))
        reason = silent and f"silent nodes are awaited for {self.config.leave_timeout_s:g} s: {silent}"
        self._effects.reply_once(identity, seq, m.Ack(reason=reason))

    def _on_learner_done(self, node: Node, message: m.LearnerDone, received: Received, now: float) -> None:
        self.export_dir = message.export_dir
        self._effects.reply(node, received.seq, m.Ack())
        done, wanted = self.pool.version, self.config.max_steps
        self._end(
            "finished", f"all {done} steps are done" if done >= wanted else f"the tasks are used up after {done} steps"
        )

    def _end(self, state: str, reason: str, error: ForebayError | None = None) -> None:
        if self.state != "running":
            return
        self.state, self.end_reason = state, reason
        self._effects.end = EndRun(state, reason, error)
        self._effects.info("run_ends", state=state, reason=reason)
        nodes = list(self.members.nodes.values())
        if state == "failed":  # their stacks of this moment, before the Shutdown changes them
            for node in nodes:
                self._effects.send(node.identity, m.ReportRequest())
        for node in nodes:
            self._effects.send(node.identity, m.Shutdown(reason=reason))
