"""Reports of every live process, for a post-mortem: asked for when the run fails or somebody wants them, written into ``RUN/reports``.

A node answers whatever it is doing, as long as its loop turns. One that died without a word leaves what it last said in a heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import structlog

from common.recorder import MAX_REPORT_BYTES, RECORDER, write_atomically
from protocol import messages as m
from protocol.codec import Received
from protocol.router import CoordinatorSocket
from services.coordinator.core.membership import Node

log = structlog.get_logger()

PATIENCE_S = 2.5  # for the answers of all nodes


class Reports:
    """See the module. Files are small and few; they are written in threads all the same, for the run's disk may be slow."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "reports"
        self._missing: set[str] = set()
        self._writes: set[asyncio.Task[Any]] = set()

    def on_report(self, node: Node, received: Received) -> None:
        """An answer. Too big a one is dropped: nobody of ours sends it."""
        self._missing.discard(node.node_id)
        data = received.arrays["json_utf8"].tobytes()
        if len(data) <= MAX_REPORT_BYTES:
            self._write(self._path(node), data)

    def node_died(self, node: Node, reason: str, lease_ids: list[str]) -> None:
        """It left without a goodbye: keep what it last said, unless it has left a report of its own."""
        if self._path(node).exists():
            return
        last = {
            "role": node.role,
            "node_id": node.node_id,
            "host": node.host,
            "pid": node.pid,
            "at": time.time(),
            "error": None,
            "gone": reason,
            "holds": str(node.holds),
            "counters": node.counters,
            "loop_lag_ms": node.loop_lag_ms,
            "waits": [wait.model_dump() for wait in node.waits],
            "leases": lease_ids,
        }
        self._write(self._path(node), json.dumps(last, indent=1).encode())

    async def collect(self, nodes: Iterable[Node]) -> str:
        """Write this process's report, and take in those that ``nodes`` were asked for; returns who did not answer within ``PATIENCE_S``. The loop must go on turning."""
        self._missing |= {node.node_id for node in nodes}
        self._write(self._folder / f"coordinator-{os.getpid()}.json", RECORDER.report_bytes())
        deadline = time.monotonic() + PATIENCE_S
        while self._missing and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await self.finish()
        return ", ".join(sorted(self._missing))

    async def collect_over(self, socket: CoordinatorSocket, nodes: Iterable[Node]) -> None:
        """The same when the coordinator's own loop is what broke: nobody else reads ``socket`` any more."""
        by_identity = {node.identity: node for node in nodes}
        for identity in by_identity:
            socket.send(identity, m.ReportRequest())
        waiting = set(by_identity)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while waiting:
                    for identity, received in await socket.recv():
                        if identity in waiting and isinstance(received.message, m.Report):
                            waiting.discard(identity)
                            self.on_report(by_identity[identity], received)
        await self.finish()

    async def finish(self) -> None:
        """Until everything that came is on disk."""
        await asyncio.gather(*self._writes, return_exceptions=True)

    def keep(self, path: Path, data: bytes) -> None:
        """Write another file of the run's folder in the same way."""
        self._write(path, data)

    def _path(self, node: Node) -> Path:
        return self._folder / f"{Path(node.node_id).name}-{node.pid}.json"

    def _write(self, path: Path, data: bytes) -> None:
        try:
            task = asyncio.get_running_loop().create_task(asyncio.to_thread(write_atomically, path, data))
        except RuntimeError:  # no loop: the handlers are plain functions, and tests call them so
            return
        self._writes.add(task)
        task.add_done_callback(self._written)

    def _written(self, task: asyncio.Task[Any]) -> None:
        self._writes.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.warning("report_not_written", error=str(error))
