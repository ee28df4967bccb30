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
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from common.errors import ForebayError, GivenUp, InvariantError, ProtocolError
from common.lifecycle import StopSignal
from common.loop_watch import LoopWatch
from common.recorder import RECORDER, write_atomically
from protocol import messages as m
from protocol.codec import Array, Received
from protocol.config import RunConfig
from protocol.router import CoordinatorSocket, Outgoing
from protocol.tasks import Task
from services.coordinator.answers import GivenAnswers
from services.coordinator.config import CoordinatorConfig
from services.coordinator.counts import TokenCounts
from services.coordinator.cursor import TaskCursor
from services.coordinator.journal import Journal
from services.coordinator.leases import LeaseDesk
from services.coordinator.membership import Members, Node
from services.coordinator.nodes import NodeDesk
from services.coordinator.opening import open_parts
from services.coordinator.pool import Pool
from services.coordinator.reports import Reports
from services.coordinator.status import build_status
from services.coordinator.steps import StepDesk
from services.coordinator.updates import WeightUpdates
from services.coordinator.waits import FirstSeen, observe, standstill, step_overdue

log = structlog.get_logger()

TICK_S = 0.2
STALL_S = 1.0  # a tick that is so late means that this process stood still
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
        self.export_dir = ""
        self.state = "running"
        self.end_reason = ""
        self.started_at = time.monotonic()
        self.progress_at = self.started_at
        self._status_kept_at = self.started_at
        self.first_seen = FirstSeen()
        self.loop_watch = LoopWatch()
        self.reports = Reports(Path(run.run_dir), reply=self._reply)
        self._outbox: list[Outgoing] = []
        self._answers = GivenAnswers()
        self._sends: asyncio.Queue[tuple[Awaitable[None] | None, list[Outgoing]]] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._failure: ForebayError | None = None
        boot = int(journal.meta.get("boots", "0")) + 1
        self.pool.keep_meta("boots", str(boot))
        self.counts = TokenCounts(self.pool, journal.meta)
        reply, on_progress = self._reply, self._note_progress
        self.leases = LeaseDesk(
            run, config, tasks, pool=self.pool, members=self.members, counts=self.counts,
            reply=reply, on_progress=on_progress, known_nodes=json.loads(journal.meta.get("nodes", "[]")),
        )  # fmt: skip
        self.updates = WeightUpdates(
            self.members, timeout_s=run.weight_update_timeout_s, again_s=config.node_timeout_s, boot=boot,
            reply=reply, on_progress=on_progress,
        )  # fmt: skip
        self.steps = StepDesk(
            config, pool=self.pool, members=self.members, updates=self.updates, journal=journal,
            reply=reply, on_progress=on_progress, on_replay_read=self._on_replay_read,
        )  # fmt: skip
        self.nodes = NodeDesk(
            run, config, pool=self.pool, members=self.members, counts=self.counts, answers=self._answers, journal=journal,
            leases=self.leases, steps=self.steps, updates=self.updates, reports=self.reports, reply=reply, on_progress=on_progress,
        )  # fmt: skip
        self._for_anybody: dict[type[m.Message], Callable[[bytes, int, Any], None]] = {
            m.Hello: self._on_hello,
            m.StatusRequest: self._on_status_request,
            m.StopRequest: self._on_stop_request,
            m.CollectReports: self._on_collect_reports,
        }
        self._handlers: dict[type[m.Message], Callable[[Node, Any, Received], None]] = {
            m.Heartbeat: self._on_heartbeat,
            m.Goodbye: self.nodes.on_goodbye,
            m.Report: self.reports.on_report,
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
            m.WeightsLoaded: self.updates.on_done,
            m.WeightUpdateFailed: self.updates.on_failed,
            m.TransferDone: self.updates.on_sent,
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
        self.progress_at += stall_s
        self.steps.forgive(stall_s)

    def _keep_status(self) -> None:
        """For a post-mortem: what the run was like when it failed, or shortly before this process was killed."""
        self._status_kept_at = time.monotonic()
        self.reports.keep(Path(self.run.run_dir) / "status.json", json.dumps(build_status(self)).encode())

    def _flush(self) -> None:
        """Give out what can be given out, then queue records and messages, in order."""
        if self.state == "running":
            self._give_out()
        if self.pool.poison.hopeless and self.state == "running":
            advice = "The journal keeps what there is; mend the cause and resume the run."
            self._fail(GivenUp(f"{self.pool.poison.hopeless} {advice}"))
        records = self.pool.drain_records()
        outbox, self._outbox = self._outbox, []
        if records or outbox:
            self._sends.put_nowait((self.journal.submit(records) if records else None, outbox))

    def _give_out(self) -> None:
        self.leases.add(self.pool.admit())
        self.leases.dispatch()
        self.steps.answer(self.nodes.tag)

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
        if (for_anybody := self._for_anybody.get(type(message))) is not None:
            return for_anybody(identity, re, message)
        node = self.members.by_identity(identity)
        if node is None:
            if isinstance(message, m.Heartbeat):
                self._reply(identity, m.HeartbeatAck(known=False), re)
            return None  # anything else is sent again after the hello that the heartbeat's answer asks for
        if (answer := self._answers.given(identity, re)) is not None:  # it was lost, or the request came twice
            self.leases.repeated(node, received)
            return self._outbox.append((identity, answer, re, None))
        handler = self._handlers.get(type(message))
        if handler is None:
            return self._reply(identity, m.Refused(reason=f"A coordinator takes no {message.kind}."), re)
        try:
            handler(node, message, received)
        except (InvariantError, ProtocolError) as error:
            self._fail(error)
        return None

    def _on_hello(self, identity: bytes, re: int, hello: m.Hello) -> None:
        if self.state == "running":
            return self.nodes.on_hello(identity, re, hello)
        self._reply(identity, m.Refused(reason=f"The run has ended: {self.end_reason}."), re)

    def _on_status_request(self, identity: bytes, re: int, message: m.StatusRequest) -> None:
        self._reply(identity, m.StatusReply(status_json=json.dumps(build_status(self))), re)

    def _on_stop_request(self, identity: bytes, re: int, message: m.StopRequest) -> None:
        self._end("stopped", message.reason)
        self._reply(identity, m.Ack(), re)

    def _on_collect_reports(self, identity: bytes, re: int, message: m.CollectReports) -> None:
        self._collecting = asyncio.create_task(self._collect_reports(identity, re))

    async def _collect_reports(self, identity: bytes, re: int) -> None:
        silent = await self.reports.collect(list(self.members.nodes.values()))
        self._keep_status()
        await self.reports.finish()
        self._reply(identity, m.Ack(accepted=not silent, reason=silent and f"no report from {silent}"), re)

    def _on_heartbeat(self, node: Node, beat: m.Heartbeat, received: Received) -> None:
        self.nodes.on_heartbeat(node, beat, received)
        if self.state != "running":  # it was told before, and that was lost
            self._reply(node.identity, m.Shutdown(reason=self.end_reason))

    def _expire(self, now: float) -> None:
        self.nodes.expire(now)
        self.leases.expire(now)
        self.updates.expire(now)
        if self.journal.full_since is not None:  # has a limit of its own
            self._note_progress()
        observe(self, now)
        if self.steps.handed_out:  # the learner is at a step, which has a limit of its own
            self.progress_at = now
        if self.state == "running" and (error := step_overdue(self, now) or standstill(self, now)):
            self._fail(error)

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
        self.progress_at = time.monotonic()

    def _reply(
        self, identity: bytes, message: m.Message, re: int = 0, arrays: Mapping[str, Array] | None = None
    ) -> None:
        if re and arrays is None:
            self._answers.keep(identity, re, message)
        self._outbox.append((identity, message, re, arrays))


def open_coordinator(run: RunConfig, config: CoordinatorConfig) -> Coordinator:
    """A coordinator that can serve.

    Raises:
        ConfigError: tasks, address or journal can't be used; nothing is left open.
    """
    tasks, socket, journal = open_parts(run, config)
    return Coordinator(run, config, tasks, socket=socket, journal=journal)


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
