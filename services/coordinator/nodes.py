"""Who comes and who goes: hellos, heartbeats, goodbyes, deaths, and what each means for leases, steps, updates and the ledger.

Part of the coordinator, and like it without I/O. What survives a restart is in the journal's meta: the names of the nodes that work,
the learner's incarnation, and what is in the ledger of each process (``counts.py``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import structlog

from protocol import messages as m
from protocol.codec import Received
from protocol.config import RunConfig
from protocol.versions import VersionTag
from services.coordinator.answers import GivenAnswers
from services.coordinator.config import CoordinatorConfig
from services.coordinator.counts import TokenCounts
from services.coordinator.journal import Journal
from services.coordinator.leases import LeaseDesk
from services.coordinator.membership import Members, Node, Reply
from services.coordinator.pool import Pool
from services.coordinator.reports import Reports
from services.coordinator.steps import StepDesk
from services.coordinator.updates import WeightUpdates

log = structlog.get_logger()


class NodeDesk:
    """See the module. It tells the other desks; they don't know it."""

    def __init__(
        self,
        run: RunConfig,
        config: CoordinatorConfig,
        *,
        pool: Pool,
        members: Members,
        counts: TokenCounts,
        answers: GivenAnswers,
        journal: Journal,
        leases: LeaseDesk,
        steps: StepDesk,
        updates: WeightUpdates,
        reports: Reports,
        reply: Reply,
        on_progress: Callable[[], None],
    ) -> None:
        self._run, self._config, self._pool, self._members = run, config, pool, members
        self._counts, self._answers, self._run_uid = counts, answers, journal.run_uid
        self._leases, self._steps, self._updates, self._reports = leases, steps, updates, reports
        self._reply, self._on_progress = reply, on_progress
        self._incarnation = int(journal.meta.get("incarnation", "-1"))  # of the learner; 0 is its first life

    @property
    def tag(self) -> VersionTag:
        """What the run is at: the committed version of the learner's present life."""
        return VersionTag(version=self._pool.version, incarnation=max(0, self._incarnation))

    def on_hello(self, identity: bytes, re: int, hello: m.Hello) -> None:
        """Let it in, or say why not. No answer: it asks again."""
        if self._may_follow_a_ghost(identity, hello):
            return
        if reason := self._refusal(identity, hello):
            log.warning("node_refused", node=hello.node_id, role=hello.role, reason=reason)
            self._reply(identity, m.Refused(reason=reason), re)
            return
        if self._members.by_identity(identity) is None:  # else it says so twice: our answer was late
            self._join(identity, re, hello)
        welcome = m.Welcome(
            run_uid=self._run_uid,
            tag=self.tag,
            heartbeat_interval_s=self._config.heartbeat_interval_s,
            node_timeout_s=self._config.node_timeout_s,
        )
        self._reply(identity, welcome, re)

    def _may_follow_a_ghost(self, identity: bytes, hello: m.Hello) -> bool:
        """Whether the process that took this one's place may be dead: its hello, which had waited on the way, is all that was heard of it. It
        beats at once if it lives; else it is dropped as silent, and this one is let in."""
        other = self._other_holder(identity, hello) if hello.run_uid == self._run_uid else None
        return other is not None and not other.has_beaten

    def _refusal(self, identity: bytes, hello: m.Hello) -> str:
        if hello.role not in ("rollout", "reward", "learner"):
            return f"Unknown role {hello.role!r}."
        if hello.run_uid not in ("", self._run_uid):
            return f"The run {self._run.id!r} at this address is another one than this node joined; restart the node."
        if hello.run_uid and (
            other := self._other_holder(identity, hello)
        ):  # else the two would replace each other for ever
            return (
                f"Process {other.pid} on {other.host} has joined as {other.node_id!r} meanwhile, and took this one's place. If both are to "
                "work, give each its own --node-id; a run has one learner."
            )
        if hello.role == "learner" and hello.checkpoint_step > self._pool.version:
            return (
                f"The learner's checkpoint is of step {hello.checkpoint_step}, but this run has committed {self._pool.version}: "
                "it is the checkpoint of another run. Correct run.dir or run.id."
            )
        is_new = hello.run_uid == ""  # else it goes on from where it is, not from a checkpoint
        if hello.role == "learner" and is_new and max(0, hello.checkpoint_step) + 1 < self._pool.first_kept_step:
            return (
                f"The learner's newest checkpoint is of step {max(0, hello.checkpoint_step)}, and the journal has batches from step "
                f"{self._pool.first_kept_step} on: newer checkpoints existed and are gone. Restore them to {self._run.run_dir}/checkpoints."
            )
        return ""

    def _other_holder(self, identity: bytes, hello: m.Hello) -> Node | None:
        """Another process that is in the run under the name of this one, or as its learner."""
        for node in self._members.nodes.values():
            if node.identity != identity and (node.node_id == hello.node_id or node.role == hello.role == "learner"):
                return node
        return None

    def _join(self, identity: bytes, re: int, hello: m.Hello) -> None:
        replaced = [hello.node_id]
        if hello.role == "learner":
            replaced += [node.node_id for node in self._members.of_role("learner")]
        for node_id in replaced:
            self.drop(node_id, "replaced by a new process", died=True)
        node = self._members.join(hello, identity, time.monotonic())
        node.told_seq = re
        self._answers.join(identity, is_here=lambda other: self._members.by_identity(other) is not None)
        self._counts.join(node, hello)
        self._leases.claim(node, hello.open_leases)
        self._record_nodes()
        if hello.role == "learner":
            self._learner_joined(node, again=hello.run_uid != "")
        self._on_progress()
        log.info("node_joined", node=node.node_id, role=node.role, host=node.host, holds=str(node.holds))

    def _learner_joined(self, node: Node, *, again: bool) -> None:
        """``again``: it was here before this coordinator, or lost us for a while."""
        self._updates.new_learner(again=again)
        if again:
            self._steps.learner_back(node)
        if not (again and self._incarnation >= 0):
            self._incarnation += 1
            self._pool.keep_meta("incarnation", str(self._incarnation))

    def on_heartbeat(self, node: Node, beat: m.Heartbeat, received: Received) -> None:
        """It is alive, and says what it holds; one that a later word of its has overtaken says nothing any more."""
        if received.seq < node.told_seq:
            return
        node.told_seq, node.has_beaten = received.seq, True
        lost = self._members.beat(node, beat, time.monotonic())
        if not beat.lease_ids and not node.lease_ids:
            self._counts.idle(node)
        self._reply(node.identity, m.HeartbeatAck(lost_lease_ids=lost), received.seq)

    def on_goodbye(self, node: Node, message: m.Goodbye, received: Received) -> None:
        """It leaves in order."""
        self.drop(node.node_id, message.reason or "left", died=False)

    def expire(self, now: float) -> None:
        """Take those for dead that have been silent for too long."""
        for node in self._members.silent(now, self._config.node_timeout_s):
            reason = f"no heartbeat for {now - node.seen_at:.1f} s (coordinator.node_timeout_s)"
            self.drop(node.node_id, f"{node.node_id}: {reason}", died=True)

    def drop(self, node_id: str, reason: str, *, died: bool) -> None:
        """A node is gone: all who had to do with it are told, and its work goes to others."""
        node, leases = self._members.leave(node_id)
        if node is None:
            return
        log.info("node_left", node=node_id, role=node.role, reason=reason, open_leases=len(leases))
        if died:
            self._reports.node_died(node, reason)
        self._counts.leave(node)
        self._record_nodes()
        self._leases.interrupted(leases, died=reason if died else "")
        self._steps.node_left(node)
        self._updates.node_left(node, reason)

    def _record_nodes(self) -> None:
        """Who is in the run, for the next life of this coordinator."""
        working = [node.node_id for node in self._members.nodes.values() if node.role != "learner"]
        self._pool.keep_meta("nodes", json.dumps(working))
