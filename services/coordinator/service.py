"""The coordinator's loop: messages in, events into the pool, leases and batches out.

    consumes:    hello, heartbeats, sample and score results, batch and sync requests, commits
    produces:    leases, acknowledgements, batches, sync plans
    waits for:   messages; a timer of 0.2 s for silent nodes, expired leases and rounds
    unblocked by: any of these

Handlers are plain functions on memory. What they want to send goes to an outbox, which leaves only after the journal has made
the records of the same event durable; so nobody ever acts on something that a crash could undo.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter, deque
from collections.abc import Awaitable, Mapping
from pathlib import Path

import structlog

from common.errors import ConfigError, ForebayError, InvariantError, ProtocolError, WaitTimeout
from common.lifecycle import StopSignal
from protocol import messages as m
from protocol.channel import CoordinatorSocket, is_loopback
from protocol.codec import Array, Received
from protocol.config import RunConfig
from protocol.tasks import Task, load_tasks
from protocol.verdicts import Verdict
from protocol.versions import VersionTag
from services.coordinator.batches import batch_metrics, make_batch
from services.coordinator.config import CoordinatorConfig
from services.coordinator.cursor import TaskCursor
from services.coordinator.groups import sample_problem
from services.coordinator.journal import Journal
from services.coordinator.membership import Lease, Members, Node, is_current
from services.coordinator.pool import Pool, Record
from services.coordinator.status import build_status
from services.coordinator.sync import StandingGroup, SyncRound, plan_round

log = structlog.get_logger()

TICK_S = 0.2
MAX_FAILED_UPDATES = 2  # of a node in one publication: the first may be another's death, as this one saw it
UPDATE_AGAIN_S = 5.0  # pause before a node that failed to take weights is tried again between two steps
_Out = tuple[bytes, m.Message, int, Mapping[str, Array] | None]


class Coordinator:
    """See the module. ``socket`` and ``journal`` are open; ``serve`` runs to the end and closes both."""

    def __init__(
        self,
        run: RunConfig,
        config: CoordinatorConfig,
        tasks: list[Task],
        *,
        socket: CoordinatorSocket,
        journal: Journal,
    ):
        self.run, self.config, self.tasks = run, config, tasks
        self.socket, self.journal = socket, journal
        cursor = TaskCursor(len(tasks), seed=run.seed, shuffle=config.shuffle, max_epochs=config.max_epochs)
        self.pool = Pool(config, cursor, journal.load())
        self.steps = journal.steps()
        self.members = Members()
        self.incarnation = int(journal.meta.get("incarnation", "-1"))  # of the learner; 0 is its first life
        self.verdicts: Counter[str] = Counter()
        self.sync_rounds: list[dict[str, float]] = []
        self.export_dir = ""
        self.state = "running"
        self.end_reason = ""
        self.started_at = time.monotonic()
        self._progress_at = self.started_at
        self._to_generate = dict.fromkeys(g.group_id for g in self.pool.groups.values() if g.missing(config.group_size))
        self._to_score = deque((group.group_id, sample.sample_index) for group, sample in self.pool.unjudged())
        self._round: SyncRound | None = None
        self._standing = StandingGroup()
        boot = int(journal.meta.get("boots", "0")) + 1
        self.pool.records.append(Record("meta", ("boots", str(boot))))
        self._sync_ids = itertools.count(boot * 1_000_000 + 1)  # never repeated: nodes outlive this process
        self._batch_wait: tuple[bytes, int, int] | None = None  # identity, seq, step
        self._outbox: list[_Out] = []
        self._sends: asyncio.Queue[tuple[Awaitable[None] | None, list[_Out]]] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._failure: ForebayError | None = None

    # ---- the loop ----

    async def serve(self, stop: StopSignal) -> None:
        """Run until the learner is done, or ``stop``. Raises the ForebayError that ended the run, if one did."""
        tasks = [
            asyncio.create_task(body, name=name)
            for name, body in (("recv", self._receive()), ("send", self._send()), ("tick", self._tick()))
        ]
        stopped = asyncio.create_task(stop.event.wait())
        ended = asyncio.create_task(self._ended.wait())
        log.info("serving", address=self.run.address, version=self.pool.version, tasks=len(self.tasks))
        try:
            await asyncio.wait([*tasks, stopped, ended], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            if self.state == "running":
                self._end("stopped", "the coordinator was told to stop")
            await self._let_nodes_leave(tasks)
        finally:
            for task in [*tasks, stopped, ended]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._write_summary()
            self.journal.close()
            self.socket.close()
        if self._failure is not None:
            raise self._failure

    def _write_summary(self) -> None:
        """The last status, for whoever reads the run's folder afterwards; the journal remains the truth."""
        partial = Path(self.run.run_dir) / "summary.json.partial"
        partial.write_text(json.dumps(build_status(self), indent=1))
        partial.rename(partial.with_suffix(""))

    async def _receive(self) -> None:
        while True:
            identity, received = await self.socket.recv()
            self._handle(identity, received)
            self._flush()

    async def _send(self) -> None:
        while True:
            durable, outbox = await self._sends.get()
            if durable is not None:
                await durable
            for identity, message, re, arrays in outbox:
                await self.socket.send(identity, message, re=re, arrays=arrays)
            self._sends.task_done()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._expire(time.monotonic())
            self._flush()

    def _flush(self) -> None:
        """Give out what can be given out, then queue records and messages, in order."""
        if self.state == "running":
            for group in self.pool.admit():
                self._to_generate[group.group_id] = None
            self._dispatch()
            self._answer_learner()
        records = self.pool.drain_records()
        outbox, self._outbox = self._outbox, []
        if records or outbox:
            self._sends.put_nowait((self.journal.submit(records) if records else None, outbox))

    async def _let_nodes_leave(self, tasks: list[asyncio.Task[None]]) -> None:
        self._flush()
        deadline = time.monotonic() + self.config.leave_timeout_s
        while self.members.nodes and time.monotonic() < deadline and not any(t.done() for t in tasks):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if self.members.nodes:
            log.warning("nodes_did_not_leave", nodes=sorted(self.members.nodes), timeout_s=self.config.leave_timeout_s)
        sent = asyncio.create_task(self._sends.join())  # whoever asked for the end gets an answer
        await asyncio.wait([sent, *tasks], return_when=asyncio.FIRST_COMPLETED)
        sent.cancel()

    # ---- messages ----

    def _handle(self, identity: bytes, received: Received) -> None:
        message, re = received.message, received.seq
        if isinstance(message, m.Hello):
            return self._on_hello(identity, re, message)
        if isinstance(message, m.StatusRequest):
            return self._reply(identity, m.StatusReply(status_json=json.dumps(build_status(self))), re)
        if isinstance(message, m.StopRequest):
            self._end("stopped", message.reason)
            return self._reply(identity, m.Ack(), re)
        node = self.members.by_identity(identity)
        if node is None:
            if isinstance(message, m.Heartbeat):
                self._reply(identity, m.HeartbeatAck(known=False), re)
            return None  # anything else is sent again after the hello that the heartbeat's answer asks for
        handler = self._HANDLERS.get(type(message))
        if handler is None:
            return self._reply(identity, m.Refused(reason=f"A coordinator takes no {message.kind}."), re)
        try:
            handler(self, node, message, received)
        except (InvariantError, ProtocolError) as error:
            self._fail(error)
        return None

    def _on_hello(self, identity: bytes, re: int, hello: m.Hello) -> None:
        reason = self._refusal(hello)
        if reason:
            log.warning("node_refused", node=hello.node_id, role=hello.role, reason=reason)
            return self._reply(identity, m.Refused(reason=reason), re)
        if self.members.by_identity(identity) is None:  # else it says so twice: our answer was late
            self._join(identity, hello)
        tag = VersionTag(version=self.pool.version, incarnation=max(0, self.incarnation))
        welcome = m.Welcome(
            run_uid=self.journal.run_uid,
            tag=tag,
            heartbeat_interval_s=self.config.heartbeat_interval_s,
            node_timeout_s=self.config.node_timeout_s,
        )
        self._reply(identity, welcome, re)

    def _join(self, identity: bytes, hello: m.Hello) -> None:
        again = hello.run_uid != ""  # it was here before this coordinator, or lost us for a while
        replaced = [hello.node_id]
        if hello.role == "learner":
            replaced += [node.node_id for node in self.members.of_role("learner")]
        for node_id in replaced:
            self._drop_node(node_id, "replaced by a new process")
        node = self.members.join(hello, identity, time.monotonic())
        if hello.role == "learner":
            self._standing.break_up()
            for rollout in self.members.of_role("rollout"):
                rollout.num_failed_updates = 0
            if not (again and self.incarnation >= 0):
                self.incarnation += 1
                self.pool.records.append(Record("meta", ("incarnation", str(self.incarnation))))
        self._progress_at = time.monotonic()
        log.info("node_joined", node=node.node_id, role=node.role, host=node.host, holds=str(node.holds))

    def _refusal(self, hello: m.Hello) -> str:
        if self.state != "running":
            return f"The run has ended: {self.end_reason}."
        if hello.role not in ("rollout", "reward", "learner"):
            return f"Unknown role {hello.role!r}."
        if hello.run_uid not in ("", self.journal.run_uid):
            return f"The run {self.run.id!r} at this address is another one than this node joined; restart the node."
        if hello.role == "learner" and hello.checkpoint_step > self.pool.version:
            return (
                f"The learner's checkpoint is of step {hello.checkpoint_step}, but this run has committed {self.pool.version}: "
                "it is the checkpoint of another run. Correct run.dir or run.id."
            )
        return ""

    def _on_heartbeat(self, node: Node, beat: m.Heartbeat, received: Received) -> None:
        lost = self.members.beat(node, beat, time.monotonic())
        if not beat.lease_ids and not node.lease_ids:  # idle: what it generated and hasn't sent will never come
            self.pool.count_thrown_away(node.tokens_in_flight)
            node.delivered_tokens += node.tokens_in_flight
        self._reply(node.identity, m.HeartbeatAck(lost_lease_ids=lost), received.seq)

    def _on_goodbye(self, node: Node, message: m.Goodbye, received: Received) -> None:
        self._drop_node(node.node_id, message.reason or "left")

    def _on_sample(self, node: Node, message: m.SampleResult, received: Received) -> None:
        if self.pool.has_sample(message.group_id, message.sample_index, received.arrays):
            self._end_if_complete(message)
            return self._reply(node.identity, m.Ack(), received.seq)
        num_tokens = int(received.arrays["completion_ids"].size)
        node.delivered_tokens += num_tokens
        if reason := sample_problem(message, received.arrays):
            self.pool.count_thrown_away(num_tokens)
            log.warning("sample_refused", node=node.node_id, group=message.group_id, reason=reason)
            if lease := self.members.end_lease(message.lease_id):
                self._give_back([lease], error=reason)
            return self._reply(node.identity, m.Ack(accepted=False, reason=reason), received.seq)
        accepted = self.pool.add_sample(
            message.group_id,
            message.sample_index,
            text=message.text,
            finish_reason=message.finish_reason,
            segments=message.segments,
            arrays={name: array.copy() for name, array in received.arrays.items()},  # don't pin the frame
        )
        if accepted:
            self._progress_at = time.monotonic()
            self._to_score.append((message.group_id, message.sample_index))
        self._end_if_complete(message)
        return self._reply(
            node.identity, m.Ack(accepted=accepted, reason="" if accepted else "duplicate"), received.seq
        )

    def _end_if_complete(self, message: m.SampleResult) -> None:
        """The lease, too, of a node whose samples came second."""
        group = self.pool.groups.get(message.group_id)
        if group is None or not group.missing(self.config.group_size):
            self.members.end_lease(message.lease_id)

    def _on_score(self, node: Node, message: m.ScoreResult, received: Received) -> None:
        lease = self.members.end_lease(message.lease_id)
        if lease is not None:
            self.verdicts[message.result.verdict] += 1
        if lease is not None or message.result.reward is not None:  # a late failure was counted when its lease ended
            self._score(message.group_id, message.sample_index, message.result, node.node_id)
        self._reply(node.identity, m.Ack(), received.seq)

    def _score(self, group_id: int, sample_index: int, result: m.JudgeResult, node_id: str) -> None:
        if self.pool.add_result(group_id, sample_index, result, node_id=node_id):
            self._to_score.append((group_id, sample_index))
        else:
            self._progress_at = time.monotonic()

    def _on_lease_failed(self, node: Node, message: m.LeaseFailed, received: Received) -> None:
        node.delivered_tokens += message.num_tokens
        self.pool.count_thrown_away(message.num_tokens)
        if lease := self.members.end_lease(message.lease_id):
            log.warning(
                "lease_failed",
                node=node.node_id,
                group=lease.group_id,
                error=message.error,
                permanent=message.permanent,
            )
            self._give_back([lease], error=message.error, permanent=message.permanent)
        self._reply(node.identity, m.Ack(), received.seq)

    def _on_lease_cancelled(self, node: Node, message: m.LeaseCancelled, received: Received) -> None:
        node.delivered_tokens += message.num_tokens
        self.pool.count_thrown_away(message.num_tokens)
        if lease := self.members.end_lease(message.lease_id):
            self._give_back([lease], error=message.reason, counted=False)
        self._reply(node.identity, m.Ack(), received.seq)

    # ---- leases ----

    def _dispatch(self) -> None:
        now = time.monotonic()
        rollouts = [n for n in self.members.of_role("rollout") if is_current(n, self.pool.version)]
        for group_id in list(self._to_generate):
            if not any(node.free > 0 for node in rollouts):
                break
            if self._lease_generate(rollouts, group_id, now):
                del self._to_generate[group_id]
        rewards = self.members.of_role("reward")
        held: list[tuple[int, int]] = []
        while self._to_score and any(node.free > 0 for node in rewards):
            group_id, sample_index = self._to_score.popleft()
            if not self._lease_score(rewards, group_id, sample_index, now):
                held.append((group_id, sample_index))
        self._to_score.extendleft(reversed(held))

    def _lease_generate(self, nodes: list[Node], group_id: int, now: float) -> bool:
        """False: the nodes that have not failed on the group are all busy. One that fails at once is always free."""
        group = self.pool.groups.get(group_id)
        missing = group.missing(self.config.group_size) if group else []
        if group is None or not missing:
            return True
        node = _freest(nodes, group.avoid_nodes)
        if node.free <= 0:
            return False
        task = self.tasks[group.task_index]
        lease = self.members.grant(node, group_id, None, now + self.config.generate_timeout_s)
        message = m.GenerateLease(
            lease_id=lease.lease_id,
            group_id=group_id,
            task_id=task.task_id,
            prompt=task.prompt,
            sample_indices=missing,
            sampling=m.Sampling(max_tokens=self.run.max_completion_tokens, temperature=self.run.temperature),
            seed=(self.run.seed * 1_000_003 + group_id * 1009) % 2**31,
            timeout_s=self.config.generate_timeout_s,
        )
        self._reply(node.identity, message)
        return True

    def _lease_score(self, nodes: list[Node], group_id: int, sample_index: int, now: float) -> bool:
        """False: the nodes that have not failed on the sample are all busy."""
        group = self.pool.groups.get(group_id)
        sample = group.samples.get(sample_index) if group else None
        if group is None or sample is None or sample.result is not None or sample.lost:
            return True
        node = _freest(nodes, sample.avoid_nodes)
        if node.free <= 0:
            return False
        lease = self.members.grant(node, group_id, sample_index, now + self.config.score_timeout_s)
        message = m.ScoreLease(
            lease_id=lease.lease_id,
            group_id=group_id,
            sample_index=sample_index,
            completion=sample.text,
            suite=self.tasks[group.task_index].tests,
            timeout_s=self.config.score_timeout_s,
        )
        self._reply(node.identity, message)
        return True

    def _give_back(
        self, leases: list[Lease], *, error: str = "", permanent: bool = False, counted: bool = True
    ) -> None:
        """Unfinished leases: queue their work again, unless it has failed too often."""
        for lease in leases:
            if lease.sample_index is None:
                if self.pool.generation_failed(
                    lease.group_id, error, permanent=permanent, counted=counted, node_id=lease.node_id
                ):
                    self._to_generate = {lease.group_id: None, **self._to_generate}  # it is older than what waits
            elif not counted:
                self._to_score.appendleft((lease.group_id, lease.sample_index))
            else:
                result = m.JudgeResult(verdict=Verdict.INFRA_ERROR, message=error)
                self._score(lease.group_id, lease.sample_index, result, lease.node_id)

    def _drop_node(self, node_id: str, reason: str) -> None:
        node, leases = self.members.leave(node_id)
        if node is None:
            return
        log.info("node_left", node=node_id, role=node.role, reason=reason, open_leases=len(leases))
        self.pool.count_lost(node.tokens_in_flight)
        self._give_back(leases, counted=False)
        if self._batch_wait and self._batch_wait[0] == node.identity:
            self._batch_wait = None
        if self._round is not None:
            if node.role == "learner":
                self._abort_round(f"the learner {node_id} went away")
            elif node_id in self._round.members:
                self._fail_member(self._round, node_id, f"went away: {reason}")

    def _expire(self, now: float) -> None:
        for node in self.members.silent(now, self.config.node_timeout_s):
            self._drop_node(node.node_id, f"no heartbeat for {now - node.seen_at:.1f} s (coordinator.node_timeout_s)")
        for lease in self.members.expired(now):
            self.members.end_lease(lease.lease_id)
            kind = "generate" if lease.sample_index is None else "score"
            error = f"not done within coordinator.{kind}_timeout_s on {lease.node_id}"
            log.warning("lease_expired", group=lease.group_id, sample=lease.sample_index, node=lease.node_id)
            if node := self.members.nodes.get(lease.node_id):
                self._reply(node.identity, m.CancelLease(lease_id=lease.lease_id, reason=error))
            self._give_back([lease], error=error)
        if self._round is not None and now > self._round.deadline:
            round_, late = self._round, self._round.missing()
            for node_id in late:
                self._fail_member(round_, node_id, "did not finish within run.sync_timeout_s", at_fault=True)
            if not late:
                self._abort_round("the learner did not finish within run.sync_timeout_s")
        if self.state == "running" and now - self._progress_at > self.config.no_progress_timeout_s:
            self._fail(WaitTimeout(self._no_progress_text(now)))

    def _no_progress_text(self, now: float) -> str:
        roles = ", ".join(f"{len(self.members.of_role(role))} {role}" for role in ("rollout", "reward", "learner"))
        waits = "; ".join(
            f"{node.node_id} waits {wait.age_s:.0f} s for {wait.what} from {wait.on}"
            for node in self.members.nodes.values()
            for wait in node.waits
        )
        return (
            f"Nothing has happened for {now - self._progress_at:.0f} s (coordinator.no_progress_timeout_s). Live nodes: {roles}. "
            f"Waits: {waits or 'none'}. Start the missing role and resume the run; the journal has everything."
        )

    # ---- batches and steps ----

    def _on_batch_request(self, node: Node, message: m.BatchRequest, received: Received) -> None:
        self._batch_wait = (node.identity, received.seq, message.step)

    def _answer_learner(self) -> None:
        if self._batch_wait is None:
            return
        identity, seq, step = self._batch_wait
        tag = VersionTag(version=self.pool.version, incarnation=max(0, self.incarnation))
        if step <= self.pool.version:
            batch, arrays = make_batch(step, self.journal.batch(step), replay=True)
            self._reply(identity, batch, seq, arrays)
        elif self.pool.finished:
            self._reply(identity, m.EndOfData(reason=f"{self.pool.version} steps are done"), seq)
        elif groups := self.pool.take_batch(step):
            batch, arrays = make_batch(step, groups, replay=False)
            self._reply(identity, batch, seq, arrays)
        elif self._round is None and self._want_resync():
            self._reply(identity, m.Resync(tag=tag), seq)
        else:
            return
        self._batch_wait = None

    def _want_resync(self) -> bool:
        """Some live engine has no valid weights and hasn't just failed to take them."""
        now = time.monotonic()
        return any(
            not is_current(node, self.pool.version) and now - node.failed_at > UPDATE_AGAIN_S
            for node in self.members.of_role("rollout")
        )

    def _on_commit(self, node: Node, message: m.StepCommitted, received: Received) -> None:
        fixed = [group for group in self.pool.groups.values() if group.step == message.step]
        metrics = (batch_metrics(fixed, self.pool.version) if fixed else {}) | message.metrics
        batch = self.pool.commit(message.step, metrics)
        node.checkpoint_step = max(node.checkpoint_step, message.checkpoint_step)
        if batch:
            self._progress_at = time.monotonic()
            self.steps.append((message.step, time.time(), metrics))
            log.info("step", step=message.step, **{key: round(value, 4) for key, value in metrics.items()})
        self._reply(node.identity, m.Ack(accepted=bool(batch)), received.seq)

    def _on_learner_done(self, node: Node, message: m.LearnerDone, received: Received) -> None:
        self.export_dir = message.export_dir
        self._reply(node.identity, m.Ack(), received.seq)
        self._end("finished", f"all {self.pool.version} steps are done")

    def _end(self, state: str, reason: str) -> None:
        if self.state != "running":
            return
        self.state, self.end_reason = state, reason
        log.info("run_ends", state=state, reason=reason)
        for node in self.members.nodes.values():
            self._reply(node.identity, m.Shutdown(reason=reason))
        self._ended.set()

    def _fail(self, error: ForebayError) -> None:
        log.error("run_failed", error=str(error))
        self._failure = self._failure or error
        self._end("failed", str(error))

    # ---- weight updates ----

    def _on_sync_request(self, node: Node, message: m.SyncRequest, received: Received) -> None:
        if self._round is not None:
            self._abort_round("the learner began another update")
        receivers = [
            n
            for n in self.members.of_role("rollout")
            if not (message.only_fenced and is_current(n, message.tag.version))
            and n.num_failed_updates < MAX_FAILED_UPDATES
        ]
        now = time.monotonic()
        self._round, plan = plan_round(
            next(self._sync_ids), message, receivers, self._standing, now=now, timeout_s=self.run.sync_timeout_s
        )
        self._reply(node.identity, plan, received.seq)
        for receiver in receivers:
            self._reply(receiver.identity, plan)

    def _on_sync_ready(self, node: Node, message: m.SyncReady, received: Received) -> None:
        if (round_ := self._round_of(message.sync_id, node, received)) is None:
            return
        if node.role == "learner":
            round_.learner_ready_seq = received.seq
            if round_.went:  # the answer was lost on its way
                self._reply(node.identity, m.SyncGo(sync_id=round_.sync_id), received.seq)
        else:
            round_.ready.add(node.node_id)
            self._reply(node.identity, m.Ack(), received.seq)
        self._advance_round()

    def _on_sync_done(self, node: Node, message: m.SyncDone, received: Received) -> None:
        if (round_ := self._round_of(message.sync_id, node, received)) is None:
            return
        round_.done[node.node_id] = message.pause_s
        node.holds, node.fenced_reason = round_.tag, ""
        self._reply(node.identity, m.Ack(), received.seq)
        self._advance_round()

    def _on_sync_failed(self, node: Node, message: m.SyncFailed, received: Received) -> None:
        if (round_ := self._round_of(message.sync_id, node, received)) is None:
            return
        self._reply(node.identity, m.Ack(), received.seq)
        if node.role == "learner":
            self._abort_round(f"the learner failed: {message.error}")
        else:
            self._fail_member(round_, node.node_id, message.error)

    def _on_sync_sent(self, node: Node, message: m.SyncSent, received: Received) -> None:
        if (round_ := self._round_of(message.sync_id, node, received)) is None:
            return
        round_.learner_sent_seq = received.seq
        round_.num_bytes, round_.send_s = message.num_bytes, message.send_s
        self._advance_round()

    def _round_of(self, sync_id: int, node: Node, received: Received) -> SyncRound | None:
        if self._round is not None and self._round.sync_id == sync_id:
            return self._round
        self._reply(node.identity, m.SyncAborted(sync_id=sync_id, reason="that weight update is over"), received.seq)
        return None

    def _fail_member(self, round_: SyncRound, node_id: str, error: str, *, at_fault: bool = False) -> None:
        log.warning("weight_update_failed", node=node_id, tag=str(round_.tag), error=error)
        round_.failed[node_id] = error
        if node := self.members.nodes.get(node_id):
            node.fenced_reason, node.failed_at = error, time.monotonic()
            node.num_failed_updates += MAX_FAILED_UPDATES if at_fault else 1
        self._advance_round()

    def _advance_round(self) -> None:
        """Send what the state of the round allows: go, abort, or the result."""
        round_ = self._round
        learner = next(iter(self.members.of_role("learner")), None)
        if round_ is None or learner is None:
            return
        if round_.failed and not round_.learner_sent_seq:
            self._abort_round("; ".join(f"{node}: {error}" for node, error in round_.failed.items()))
        elif not round_.went and round_.all_ready:
            round_.went = True
            self._reply(learner.identity, m.SyncGo(sync_id=round_.sync_id), round_.learner_ready_seq)
            for node_id in round_.members:
                self._reply(self.members.nodes[node_id].identity, m.SyncGo(sync_id=round_.sync_id))
        elif round_.settled and round_.learner_sent_seq:
            self._finish_round(round_, learner)

    def _finish_round(self, round_: SyncRound, learner: Node) -> None:
        self.sync_rounds.append(round_.record(time.monotonic()))
        acked = sorted(set(round_.done) - set(round_.failed))
        result = m.SyncResult(sync_id=round_.sync_id, acked=acked, failed=round_.failed)
        self._reply(learner.identity, result, round_.learner_sent_seq)
        self._round = None
        if round_.failed:
            self._standing.break_up()
        if acked:
            self._progress_at = time.monotonic()
        for node in self.members.of_role("rollout"):
            node.num_failed_updates = 0  # the next publication tries everybody again

    def _abort_round(self, reason: str) -> None:
        round_, self._round = self._round, None
        if round_ is None:
            return
        log.warning("sync_aborted", tag=str(round_.tag), reason=reason)
        self._standing.break_up()
        message = m.SyncAborted(sync_id=round_.sync_id, reason=reason)
        for node_id in round_.members:
            if node := self.members.nodes.get(node_id):
                self._reply(node.identity, message)
        for learner in self.members.of_role("learner"):
            waiting = round_.learner_sent_seq or (0 if round_.went else round_.learner_ready_seq)
            self._reply(learner.identity, message, waiting)

    # ---- sending ----

    def _reply(
        self, identity: bytes, message: m.Message, re: int = 0, arrays: Mapping[str, Array] | None = None
    ) -> None:
        self._outbox.append((identity, message, re, arrays))

    _HANDLERS = {
        m.Heartbeat: _on_heartbeat,
        m.Goodbye: _on_goodbye,
        m.SampleResult: _on_sample,
        m.ScoreResult: _on_score,
        m.LeaseFailed: _on_lease_failed,
        m.LeaseCancelled: _on_lease_cancelled,
        m.BatchRequest: _on_batch_request,
        m.StepCommitted: _on_commit,
        m.LearnerDone: _on_learner_done,
        m.SyncRequest: _on_sync_request,
        m.SyncReady: _on_sync_ready,
        m.SyncDone: _on_sync_done,
        m.SyncFailed: _on_sync_failed,
        m.SyncSent: _on_sync_sent,
    }


def _freest(nodes: list[Node], avoid: set[str]) -> Node:
    """The node with the most room, of those that are not to be avoided if there are any."""
    return max([node for node in nodes if node.node_id not in avoid] or nodes, key=lambda node: node.free)


def open_coordinator(run: RunConfig, config: CoordinatorConfig) -> Coordinator:
    """Check everything that can be wrong, then open the journal and the socket.

    Raises:
        ConfigError: tasks, address or journal can't be used; nothing is left open.
    """
    bind = config.bind or run.address
    if not is_loopback(bind) and not config.insecure:
        raise ConfigError(
            f"coordinator.bind {bind} can be reached from other machines, and nothing is encrypted or authenticated. Listen on a "
            "loopback address, or say coordinator.insecure = true if the network is yours alone."
        )
    tasks = load_tasks(config.tasks)
    socket = CoordinatorSocket(bind, run.id)
    try:
        journal = Journal(Path(run.run_dir) / "journal.sqlite", run_id=run.id)
    except ConfigError:
        socket.close()
        raise
    return Coordinator(run, config, tasks, socket=socket, journal=journal)


async def main(run: RunConfig, config: CoordinatorConfig) -> int:
    """Body of the coordinator process: its exit code."""
    stop = StopSignal()
    coordinator = open_coordinator(run, config)
    await coordinator.serve(stop)
    return stop.exit_code
