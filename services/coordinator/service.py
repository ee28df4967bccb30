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
import gc
import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from common.errors import ConfigError, ForebayError, GivenUp, InvariantError, ProtocolError, WaitTimeout
from common.lifecycle import StopSignal
from common.loop_watch import LoopWatch
from common.recorder import RECORDER, write_atomically
from protocol import messages as m
from protocol.codec import Array, Received
from protocol.config import RunConfig
from protocol.router import CoordinatorSocket, Outgoing, is_loopback
from protocol.tasks import Task, fingerprint, load_tasks
from protocol.versions import VersionTag
from services.coordinator.config import CoordinatorConfig
from services.coordinator.cursor import TaskCursor
from services.coordinator.journal import Journal
from services.coordinator.leases import LeaseDesk
from services.coordinator.membership import Members, Node
from services.coordinator.pool import Pool, Record
from services.coordinator.reports import Reports
from services.coordinator.status import build_status
from services.coordinator.steps import StepDesk
from services.coordinator.updates import WeightUpdates
from services.coordinator.waits import FirstSeen, observe, step_overdue, waits_text

log = structlog.get_logger()

TICK_S = 0.2
STALL_S = 1.0  # a tick that is so late means that this process stood still
KEPT_ANSWERS = 8192  # of each node: far more than it can have open
KEPT_PROCESSES = 64  # whose answers are kept although they are gone: they may be cut off
KEPT_WRITTEN_OFF = 1000  # processes: who was taken for dead long ago does not come back
KEEP_STATUS_S = 5.0  # how old the last status may be that a kill -9 leaves in the run's folder


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
        self.pool = Pool(config, cursor, journal.state)
        self.members = Members()
        self.incarnation = int(journal.meta.get("incarnation", "-1"))  # of the learner; 0 is its first life
        self.export_dir = ""
        self.state = "running"
        self.end_reason = ""
        self.started_at = time.monotonic()
        self._progress_at = self.started_at
        self._status_kept_at = self.started_at
        self.first_seen = FirstSeen()
        self.loop_watch = LoopWatch()
        self.reports = Reports(Path(run.run_dir), reply=self._reply)
        self._outbox: list[Outgoing] = []
        # Of each process: what its last requests were answered, and at which of its joinings. Kept when it is taken for dead.
        self._answers: OrderedDict[bytes, OrderedDict[int, tuple[m.Message, float]]] = OrderedDict()
        # Identity -> tokens in flight of processes that were taken for dead, of which some may only be cut off.
        self._written_off: dict[str, int] = json.loads(journal.meta.get("written_off", "{}"))
        self._sends: asyncio.Queue[tuple[Awaitable[None] | None, list[Outgoing]]] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._failure: ForebayError | None = None
        boot = int(journal.meta.get("boots", "0")) + 1
        self.pool.records.append(Record("meta", ("boots", str(boot))))
        self.leases = LeaseDesk(
            run,
            config,
            tasks,
            pool=self.pool,
            members=self.members,
            reply=self._reply,
            on_progress=self._note_progress,
            known_nodes=json.loads(journal.meta.get("nodes", "[]")),
        )
        self.updates = WeightUpdates(
            self.members,
            timeout_s=run.sync_timeout_s,
            boot=boot,
            reply=self._reply,
            on_progress=self._note_progress,
        )
        self.steps = StepDesk(
            config,
            pool=self.pool,
            members=self.members,
            updates=self.updates,
            journal=journal,
            reply=self._reply,
            on_progress=self._note_progress,
            on_replay_read=self._on_replay_read,
        )
        self._handlers: dict[type[m.Message], Callable[[Node, Any, Received], None]] = {
            m.Heartbeat: self._on_heartbeat,
            m.Goodbye: self._on_goodbye,
            m.Report: self.reports.on_report,
            m.SampleResult: self.leases.on_sample,
            m.ScoreResult: self.leases.on_score,
            m.SuiteRequest: self.leases.on_suite_request,
            m.LeaseFailed: self.leases.on_lease_failed,
            m.LeaseCancelled: self.leases.on_lease_cancelled,
            m.BatchRequest: self.steps.on_batch_request,
            m.StepCommitted: self.steps.on_commit,
            m.LearnerDone: self._on_learner_done,
            m.SyncRequest: self.updates.on_request,
            m.SyncReady: self.updates.on_ready,
            m.SyncDone: self.updates.on_done,
            m.SyncFailed: self.updates.on_failed,
            m.SyncSent: self.updates.on_sent,
        }

    # ---- the loop ----

    async def serve(self, stop: StopSignal) -> None:
        """Run until the learner is done, or ``stop``. Raises the ForebayError that ended the run, if one did."""
        tasks = [
            asyncio.create_task(body, name=name)
            for name, body in (("recv", self._receive()), ("send", self._send()), ("tick", self._tick()))
        ]
        stopped = asyncio.create_task(stop.event.wait())
        ended = asyncio.create_task(self._ended.wait())
        self.loop_watch.start()
        log.info("serving", address=self.run.address, version=self.pool.version, tasks=len(self.tasks))
        try:
            await asyncio.wait([*tasks, stopped, ended], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            if self.state == "running":
                self._end("stopped", "the coordinator was told to stop")
            await self._let_nodes_leave(tasks)
        except Exception:
            await self._collect_last_reports(tasks)
            raise
        finally:
            self.loop_watch.stop()
            self.steps.close()
            for task in [*tasks, stopped, ended]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._write_summary()
            self.journal.close()
            self.socket.close()
        if self._failure is not None:
            raise self._failure

    async def _collect_last_reports(self, tasks: list[asyncio.Task[None]]) -> None:
        """The loop itself is broken: ask the nodes past it, so that their stacks of this moment are kept."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.reports.collect_over(self.socket, list(self.members.nodes.values()))

    def _write_summary(self) -> None:
        """The last status, for whoever reads the run's folder afterwards; the journal remains the truth."""
        try:
            write_atomically(Path(self.run.run_dir) / "summary.json", json.dumps(build_status(self), indent=1).encode())
        except OSError as error:  # of a full disk, say: then the journal alone has it
            log.error("no_summary", error=str(error))

    async def _receive(self) -> None:
        while True:
            for identity, received in await self.socket.recv():
                self._handle(identity, received)
            self._flush()
            await asyncio.sleep(0)  # messages may go on arriving without a pause; so that the others get their turn

    async def _send(self) -> None:
        while True:
            durable, outbox = await self._sends.get()
            if durable is not None:
                await durable
            self.socket.send_all(outbox)
            self._sends.task_done()

    async def _tick(self) -> None:
        ticked_at = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if (stall_s := now - ticked_at - TICK_S) > STALL_S:
                self._forgive(stall_s)
            ticked_at = now
            self._expire(now)
            if self.state == "running" and now - self._status_kept_at > KEEP_STATUS_S:
                self._keep_status()
            self._flush()

    def _forgive(self, stall_s: float) -> None:
        """This process stood still (stopped, suspended, starved): what the others have said meanwhile still waits to be read."""
        log.warning("stood_still", stall_s=round(stall_s, 1))
        self.members.forgive(stall_s)
        self.updates.forgive(stall_s)
        self._progress_at += stall_s
        self.steps.forgive(stall_s)

    def _keep_status(self) -> None:
        """For a post-mortem: what the run was like when it failed, or shortly before this process was killed."""
        self._status_kept_at = time.monotonic()
        self.reports.keep(Path(self.run.run_dir) / "status.json", json.dumps(build_status(self)).encode())

    def _flush(self) -> None:
        """Give out what can be given out, then queue records and messages, in order."""
        if self.state == "running":
            self._give_out()
        if self.pool.hopeless and self.state == "running":
            self._fail(
                GivenUp(f"{self.pool.hopeless} The journal keeps what there is; mend the cause and resume the run.")
            )
        records = self.pool.drain_records()
        outbox, self._outbox = self._outbox, []
        if records or outbox:
            self._sends.put_nowait((self.journal.submit(records) if records else None, outbox))

    def _give_out(self) -> None:
        self.leases.add(self.pool.admit())
        self.leases.dispatch()
        self.steps.answer(max(0, self.incarnation))

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
        await self.reports.finish()

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
        if isinstance(message, m.CollectReports):
            self._collecting = asyncio.create_task(self._collect_reports(identity, re))
            return None
        node = self.members.by_identity(identity)
        if node is None:
            if isinstance(message, m.Heartbeat):
                self._reply(identity, m.HeartbeatAck(known=False), re)
            return None  # anything else is sent again after the hello that the heartbeat's answer asks for
        given = self._answers.get(identity, {}).get(re)
        if given is not None:  # the answer was lost, or the request came twice
            return self._answer_again(node, received, *given)
        handler = self._handlers.get(type(message))
        if handler is None:
            return self._reply(identity, m.Refused(reason=f"A coordinator takes no {message.kind}."), re)
        try:
            handler(node, message, received)
        except (InvariantError, ProtocolError) as error:
            self._fail(error)
        return None

    async def _collect_reports(self, identity: bytes, re: int) -> None:
        silent = await self.reports.collect(list(self.members.nodes.values()))
        self._keep_status()
        await self.reports.finish()
        self._reply(identity, m.Ack(accepted=not silent, reason=silent and f"no report from {silent}"), re)

    def _answer_again(self, node: Node, received: Received, answer: m.Message, joined_at: float) -> None:
        if isinstance(received.message, m.SampleResult) and joined_at != node.joined_at:
            # Its tokens were counted before it was cut off, and it did not hear of that: they are in flight no more.
            node.delivered_tokens += int(received.arrays["completion_ids"].size)
        self._outbox.append((node.identity, answer, received.seq, None))

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
            self._drop_node(node_id, "replaced by a new process", died=True)
        node = self.members.join(hello, identity, time.monotonic())
        self._answers.setdefault(identity, OrderedDict())
        self._answers.move_to_end(identity)
        for old in [other for other in self._answers if not self.members.by_identity(other)][:-KEPT_PROCESSES]:
            del self._answers[old]
        if back := self._written_off.pop(
            identity.decode(errors="replace"), 0
        ):  # it was cut off, not dead: what it had will come
            self.pool.count_lost(-back)
            self._record_written_off()
        self.leases.claim(node, hello.open_leases)
        self._record_nodes()
        if hello.role == "learner":
            self.updates.new_learner()
            if not (again and self.incarnation >= 0):
                self.incarnation += 1
                self.pool.records.append(Record("meta", ("incarnation", str(self.incarnation))))
        self._note_progress()
        log.info("node_joined", node=node.node_id, role=node.role, host=node.host, holds=str(node.holds))

    def _record_nodes(self) -> None:
        """Who is in the run, for the next life of this coordinator."""
        working = [node.node_id for node in self.members.nodes.values() if node.role != "learner"]
        self.pool.records.append(Record("meta", ("nodes", json.dumps(working))))

    def _record_written_off(self) -> None:
        recent = dict([*self._written_off.items()][-KEPT_WRITTEN_OFF:])
        self.pool.records.append(Record("meta", ("written_off", json.dumps(recent))))

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
        is_new = hello.run_uid == ""  # else it goes on from where it is, not from a checkpoint
        if hello.role == "learner" and is_new and max(0, hello.checkpoint_step) + 1 < self.pool.first_kept_step:
            return (
                f"The learner's newest checkpoint is of step {max(0, hello.checkpoint_step)}, and the journal has batches from step "
                f"{self.pool.first_kept_step} on: newer checkpoints existed and are gone. Restore them to {self.run.run_dir}/checkpoints."
            )
        return ""

    def _on_heartbeat(self, node: Node, beat: m.Heartbeat, received: Received) -> None:
        lost = self.members.beat(node, beat, time.monotonic())
        if not beat.lease_ids and not node.lease_ids:  # idle: what it generated and hasn't sent will never come
            self.pool.count_thrown_away(node.tokens_in_flight)
            node.delivered_tokens += node.tokens_in_flight
        self._reply(node.identity, m.HeartbeatAck(lost_lease_ids=lost), received.seq)
        if self.state != "running":  # it was told before, and that was lost
            self._reply(node.identity, m.Shutdown(reason=self.end_reason))

    def _on_goodbye(self, node: Node, message: m.Goodbye, received: Received) -> None:
        self._drop_node(node.node_id, message.reason or "left", died=False)

    def _drop_node(self, node_id: str, reason: str, *, died: bool) -> None:
        node, leases = self.members.leave(node_id)
        if node is None:
            return
        log.info("node_left", node=node_id, role=node.role, reason=reason, open_leases=len(leases))
        if died:
            self.reports.node_died(node, reason)
        if lost := node.tokens_in_flight:
            self.pool.count_lost(lost)
            self._written_off[node.identity.decode(errors="replace")] = lost
            self._record_written_off()
        self._record_nodes()
        self.leases.interrupted(leases, died=reason if died else "")
        self.steps.node_left(node)
        self.updates.node_left(node, reason)

    def _expire(self, now: float) -> None:
        for node in self.members.silent(now, self.config.node_timeout_s):
            reason = f"no heartbeat for {now - node.seen_at:.1f} s (coordinator.node_timeout_s)"
            self._drop_node(node.node_id, f"{node.node_id}: {reason}", died=True)
        self.leases.expire(now)
        self.updates.expire(now)
        if self.journal.full_since is not None:  # has a limit of its own
            self._note_progress()
        observe(self, now)
        if self.state == "running" and (error := step_overdue(self, now)):
            self._fail(error)
        if self.steps.handed_out:  # the learner is at a step, which has a limit of its own
            self._progress_at = now
        if self.state == "running" and now - self._progress_at > self.config.no_progress_timeout_s:
            self._fail(WaitTimeout(self._no_progress_text(now)))

    def _no_progress_text(self, now: float) -> str:
        roles = ", ".join(f"{len(self.members.of_role(role))} {role}" for role in ("rollout", "reward", "learner"))
        return (
            f"Nothing has happened for {now - self._progress_at:.0f} s (coordinator.no_progress_timeout_s). Live nodes: {roles}. "
            f"Waits: {waits_text(self)}. Start the missing role and resume the run; the journal has everything."
        )

    # ---- the end ----

    def _on_replay_read(self, error: ForebayError | None) -> None:
        if error is not None:
            self._fail(error)
        self._flush()

    def _on_learner_done(self, node: Node, message: m.LearnerDone, received: Received) -> None:
        self.export_dir = message.export_dir
        self._reply(node.identity, m.Ack(), received.seq)
        done, wanted = self.pool.version, self.config.max_steps
        self._end(
            "finished", f"all {done} steps are done" if done >= wanted else f"the tasks are used up after {done} steps"
        )

    def _end(self, state: str, reason: str) -> None:
        if self.state != "running":
            return
        if state == "failed":  # their stacks of this moment, before the Shutdown below changes them
            self.reports.ask(self.members.nodes.values())
            self._keep_status()
        self.state, self.end_reason = state, reason
        log.info("run_ends", state=state, reason=reason)
        for node in self.members.nodes.values():
            self._reply(node.identity, m.Shutdown(reason=reason))
        self._ended.set()

    def _fail(self, error: ForebayError) -> None:
        log.error("run_failed", error=str(error))
        self._failure = self._failure or error
        self._end("failed", str(error))

    # ---- shared with the parts ----

    def _note_progress(self) -> None:
        self._progress_at = time.monotonic()

    def _reply(
        self, identity: bytes, message: m.Message, re: int = 0, arrays: Mapping[str, Array] | None = None
    ) -> None:
        if re and arrays is None and (answers := self._answers.get(identity)) is not None:
            node = self.members.by_identity(identity)
            answers[re] = message, node.joined_at if node else 0.0
            if len(answers) > KEPT_ANSWERS:
                answers.popitem(last=False)
        self._outbox.append((identity, message, re, arrays))


def open_coordinator(run: RunConfig, config: CoordinatorConfig) -> Coordinator:
    """Check everything that can be wrong, then open the journal and the socket.

    Raises:
        ConfigError: tasks, address or journal can't be used; nothing is left open.
    """
    bind = config.bind or run.address
    keys = run.read_keys()
    if keys is None and not is_loopback(bind) and not config.insecure:
        raise ConfigError(
            f"coordinator.bind {bind} can be reached from other machines, and nothing is encrypted or authenticated. Make keys "
            "(forebay keys FILE) and name them in run.key_file on every machine, listen on a loopback address, or say "
            "coordinator.insecure = true if the network is yours alone."
        )
    tasks = load_tasks(config.tasks)
    socket = CoordinatorSocket(bind, run.id, keys=keys)
    fixed = {
        "run.seed": run.seed,
        "run.routing_replay": run.routing_replay,
        **{
            f"coordinator.{key}": getattr(config, key)
            for key in ("group_size", "groups_per_step", "shuffle", "max_epochs")
        },
        "coordinator.tasks (their content)": fingerprint(tasks),
    }
    journal = None
    try:
        path = Path(run.run_dir) / "journal.sqlite"
        journal = Journal(path, run_id=run.id, fixed=fixed, disk_timeout_s=config.disk_timeout_s)
        return Coordinator(run, config, tasks, socket=socket, journal=journal)
    except ConfigError:
        if journal is not None:
            journal.close()
        socket.close()
        raise


async def main(run: RunConfig, config: CoordinatorConfig, *, resolved: str = "") -> int:
    """Body of the coordinator process: its exit code. ``resolved`` is the whole config, for the run's folder if it lacks one."""
    stop = StopSignal()
    coordinator = open_coordinator(run, config)
    kept = Path(run.run_dir) / "config.json"
    if resolved and not kept.exists():
        write_atomically(kept, resolved.encode())
    RECORDER.describe("coordinator", run_dir=run.run_dir)
    RECORDER.facts = lambda: {"status": build_status(coordinator)}
    # Messages are many small objects that live for a moment and form no cycles; looking for those was a seventh of all time.
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    await coordinator.serve(stop)
    return stop.exit_code
