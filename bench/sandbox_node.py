"""A reward node in a process of its own and, here, as much of a coordinator as it needs: for ``sandbox.py``."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from bench.corpora import ROOT
from bench.sandbox_parts import ECHO
from protocol import messages as m
from protocol.codec import Received
from protocol.router import CoordinatorSocket
from protocol.suites import TestSuite
from protocol.verdicts import JudgeResult
from protocol.versions import VersionTag
from tests.faults.processes import free_port

_NUMBERS = itertools.count()  # of leases


class Coordinator:
    """As much of a coordinator as a reward node needs: it gives leases, and awaits their results."""

    def __init__(self, router: CoordinatorSocket) -> None:
        self._router = router
        self._suites: dict[str, TestSuite] = {}
        self._open: dict[str, asyncio.Future[JudgeResult]] = {}
        self._node = b""
        self.joined: asyncio.Future[m.Hello] = asyncio.get_running_loop().create_future()

    async def judge(self, completion: str, suite: TestSuite) -> JudgeResult:
        """One lease, to its result."""
        lease_id = f"lease-{next(_NUMBERS)}"
        self._suites[suite.content_hash] = suite
        future = self._open[lease_id] = asyncio.get_running_loop().create_future()
        lease = m.ScoreLease(
            lease_id=lease_id,
            group_id=0,
            sample_index=0,
            completion=completion,
            suite_hash=suite.content_hash,
            timeout_s=60,
        )
        self._router.send(self._node, lease)
        return await future

    async def shut_down(self) -> None:
        """Tell the node to leave."""
        self._router.send(self._node, m.Shutdown(reason="measured"))

    async def serve(self) -> None:
        """Answer the node, for ever."""
        while True:
            for sender, received in await self._router.recv():
                self._answer(sender, received)

    def _answer(self, sender: bytes, received: Received) -> None:
        match received.message:
            case m.Hello() as hello:
                self._node = sender
                welcome = m.Welcome(
                    run_uid="bench", tag=VersionTag(version=0), heartbeat_interval_s=2, node_timeout_s=30
                )
                self._router.send(sender, welcome, re=received.seq)
                if not self.joined.done():
                    self.joined.set_result(hello)
            case m.Heartbeat():
                self._router.send(sender, m.HeartbeatAck(), re=received.seq)
            case m.SuiteRequest() as request:
                data = {"json_utf8": np.frombuffer(self._suites[request.suite_hash].to_json(), dtype=np.uint8)}
                answer = m.Suite(suite_hash=request.suite_hash)
                self._router.send(sender, answer, re=received.seq, arrays=data)
            case m.ScoreResult() as result:
                self._router.send(sender, m.Ack(), re=received.seq)
                self._open.pop(result.lease_id).set_result(result.result)


@contextlib.asynccontextmanager
async def reward_node() -> AsyncIterator[tuple[Coordinator, m.Hello]]:
    """A coordinator's socket, and ``python -m services.reward`` that has joined it."""
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        address = f"tcp://127.0.0.1:{free_port()}"
        tasks = Path(folder) / "tasks.jsonl"
        task = {"task_id": "t", "prompt": "p", "tests": ECHO.model_dump(mode="json")}
        tasks.write_text(json.dumps(task) + "\n", encoding="utf-8")
        config = {
            "run": {"id": "bench", "dir": folder, "model": folder, "address": address, "log_level": "warning"},
            "coordinator": {"tasks": str(tasks), "max_steps": 1},
            "reward": {"cache_size": 0},
        }
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        router = CoordinatorSocket(address, "bench")
        coordinator = Coordinator(router)
        serving = asyncio.create_task(coordinator.serve())
        command = [sys.executable, "-m", "services.reward", "--config", str(path), "--node-id", "bench"]
        node = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)  # noqa: ASYNC220 (once, before any measuring)
        try:
            async with asyncio.timeout(60):
                hello = await coordinator.joined
            yield coordinator, hello
            await coordinator.shut_down()
            await asyncio.to_thread(node.wait, 20)
        finally:
            node.kill()
            node.wait()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            router.close()
