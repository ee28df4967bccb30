"""The coordinator's process: sockets, clock, journal and files around the pure core.

    consumes:    hello, heartbeats, sample and score results, batch and weight-update requests, commits
    produces:    leases, acknowledgements, batches, weight-update plans
    waits for:   messages; a timer of 0.2 s for silent nodes, expired leases and weight updates
    unblocked by: any of these

``Core`` decides; this module carries out its effects. Messages leave only after the journal has made the records of the same call durable,
so nobody ever acts on something that a crash could undo.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
import uuid
from collections.abc import Awaitable
from pathlib import Path

import structlog

from common.errors import ForebayError
from common.lifecycle import StopSignal
from common.loop_watch import LoopWatch
from common.recorder import RECORDER, write_atomically
from protocol import messages as m
from protocol.codec import Received
from protocol.config import RunConfig
from protocol.router import CoordinatorSocket
from protocol.tasks import Task
from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.core import Core, SavedRun
from services.coordinator.core.effects import Effects, EndRun, ReadBatch, Send
from services.coordinator.core.steps import FIRST_STEPS, RECENT_STEPS
from services.coordinator.journal import Journal
from services.coordinator.opening import open_parts
from services.coordinator.reports import Reports
from services.coordinator.status import build_status

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
        now = time.monotonic()
        first, recent = journal.steps(first=FIRST_STEPS, last=RECENT_STEPS)
        self.core = Core(
            run, config, tasks, SavedRun(journal.run_uid, journal.meta, journal.state, first, recent),
            now=now, epoch_s=time.time() - now, lease_prefix=uuid.uuid4().hex[:8],
        )  # fmt: skip
        self.loop_watch = LoopWatch()
        self.reports = Reports(Path(run.run_dir))
        self.outgoing: asyncio.Queue[tuple[Awaitable[None] | None, list[Send]]] = asyncio.Queue()
        self.reads: set[asyncio.Task[None]] = set()
        self.failure: ForebayError | None = None
        self._status_kept_at = now
        self._ended = asyncio.Event()

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
        log.info("serving", address=self.run.address, version=self.core.pool.version, tasks=len(self.tasks))
        try:
            await asyncio.wait([*tasks, stopped, ended], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            if self.core.state == "running":
                self.core.stop("the coordinator was told to stop")
            await self._let_nodes_leave(tasks)
        except Exception:
            await self._collect_last_reports(tasks)
            raise
        finally:
            self.loop_watch.stop()
            for task in [*tasks, *self.reads, stopped, ended]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._write_summary()
            self.journal.close()
            self.socket.close()
        if self.failure is not None:
            raise self.failure

    async def _receive(self) -> None:
        while True:
            self.handle(await self.socket.recv())
            await asyncio.sleep(0)  # messages may go on arriving without a pause; so that the others get their turn

    async def _send(self) -> None:
        while True:
            durable, sends = await self.outgoing.get()
            if durable is not None:
                await durable
            self.socket.send_all(sends)
            self.outgoing.task_done()

    async def _tick(self) -> None:
        ticked_at = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            late_s = now - ticked_at - TICK_S
            ticked_at = now
            self.tick(now, stalled_s=late_s if late_s > STALL_S else 0.0)
            if self.core.state == "running" and now - self._status_kept_at > KEEP_STATUS_S:
                self._keep_status()

    async def _let_nodes_leave(self, tasks: list[asyncio.Task[None]]) -> None:
        self.tick(time.monotonic())
        deadline = time.monotonic() + self.config.leave_timeout_s
        while not self.core.all_left and time.monotonic() < deadline and not any(t.done() for t in tasks):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if not self.core.all_left:
            left = sorted([*self.core.members.nodes, *self.core.membership.silent])
            log.warning("nodes_did_not_leave", nodes=left, timeout_s=self.config.leave_timeout_s)
        sent = asyncio.create_task(self.outgoing.join())  # whoever asked for the end gets an answer
        await asyncio.wait([sent, *tasks], return_when=asyncio.FIRST_COMPLETED)
        sent.cancel()
        await self.reports.finish()

    # ---- the core and its effects ----

    def handle(self, messages: list[tuple[bytes, Received]]) -> None:
        """Messages of one wake-up. What is asked of this process, and not of the run, is answered here."""
        rest = []
        for identity, received in messages:
            match received.message:
                case m.StatusRequest():
                    reply = m.StatusReply(status_json=json.dumps(build_status(self)))
                    self.outgoing.put_nowait((None, [Send(identity, reply, received.seq)]))
                case m.CollectReports():
                    self._collecting = asyncio.create_task(self._collect_reports(identity, received.seq))
                case m.Report():
                    if node := self.core.members.by_identity.get(identity):
                        self.reports.on_report(node, received)
                case _:
                    rest.append((identity, received))
        self._perform(self.core.handle(rest, time.monotonic()))

    def tick(self, now: float, *, stalled_s: float = 0.0) -> None:
        """Time has passed."""
        self._perform(self.core.tick(now, stalled_s=stalled_s, disk_full=self.journal.full_since is not None))

    def _perform(self, effects: Effects) -> None:
        for line in effects.logs:
            getattr(log, line.level)(line.event, **line.fields)
        for death in effects.deaths:
            self.reports.node_died(death.node, death.reason, death.lease_ids)
        if effects.records or effects.sends:
            durable = self.journal.submit(effects.records) if effects.records else None
            self.outgoing.put_nowait((durable, effects.sends))
        for read in effects.reads:
            task = asyncio.create_task(self._read_batch(read))
            self.reads.add(task)
            task.add_done_callback(self.reads.discard)
        if effects.end is not None:
            self._on_end(effects.end)

    async def _read_batch(self, read: ReadBatch) -> None:
        try:
            groups = await asyncio.to_thread(self.journal.batch, read.step)
        except ForebayError as error:
            self._perform(self.core.batch_read(read, error, time.monotonic()))
        else:
            self._perform(self.core.batch_read(read, groups, time.monotonic()))

    def _on_end(self, end: EndRun) -> None:
        if end.error is not None:
            self.failure = end.error
            self._keep_status()
        self._ended.set()

    # ---- what others can see ----

    def _keep_status(self) -> None:
        """For a post-mortem: what the run was like when it failed, or shortly before this process was killed."""
        self._status_kept_at = time.monotonic()
        self.reports.keep(Path(self.run.run_dir) / "status.json", json.dumps(build_status(self)).encode())

    def _write_summary(self) -> None:
        """The last status, for whoever reads the run's folder afterwards; the journal remains the truth."""
        try:
            write_atomically(Path(self.run.run_dir) / "summary.json", json.dumps(build_status(self), indent=1).encode())
        except OSError as error:  # of a full disk, say: then the journal alone has it
            log.error("no_summary", error=str(error))

    async def _collect_reports(self, identity: bytes, re: int) -> None:
        nodes = list(self.core.members.nodes.values())
        self.outgoing.put_nowait((None, [Send(node.identity, m.ReportRequest()) for node in nodes]))
        silent = await self.reports.collect(nodes)
        self._keep_status()
        await self.reports.finish()
        ack = m.Ack(accepted=not silent, reason=silent and f"no report from {silent}")
        self.outgoing.put_nowait((None, [Send(identity, ack, re)]))

    async def _collect_last_reports(self, tasks: list[asyncio.Task[None]]) -> None:
        """The loop itself is broken: ask the nodes past it, so that their stacks of this moment are kept."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.reports.collect_over(self.socket, list(self.core.members.nodes.values()))


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
