"""A reward node's loop: score leases in, verdicts out. Stateless.

consumes:    ScoreLease, CancelLease, Shutdown
produces:    ScoreResult for each lease, always: a judge's own failure is the verdict ``infra_error``
waits for:   pushes of the coordinator; the judge, in threads
unblocked by: the coordinator's leases
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from common.errors import PeerError
from common.lifecycle import StopSignal
from common.waits import WaitTable
from protocol import messages as m
from protocol.channel import NodeChannel
from protocol.config import RunConfig
from protocol.verdicts import JudgeResult, Verdict
from services.reward.config import RewardConfig
from services.reward.judge import Judge

log = structlog.get_logger()


class RewardNode:
    """Serves one judge to one coordinator until told to leave."""

    def __init__(self, judge: Judge, channel: NodeChannel, waits: WaitTable, *, num_workers: int) -> None:
        self.judge, self.channel, self.waits = judge, channel, waits
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="judge")
        self._leases: dict[str, asyncio.Task[None]] = {}
        self._num_judged = 0
        channel.capacity = 2 * num_workers  # one at work and one waiting for each worker
        channel.beat_fields = self._beat_fields

    def _beat_fields(self) -> dict[str, Any]:
        return {"lease_ids": list(self._leases), "counters": {"judged": float(self._num_judged)}}

    async def serve(self, stop: StopSignal) -> None:
        """Until the coordinator says ``Shutdown``, or ``stop``: then no new leases are taken and the open ones finished."""
        try:
            if await stop.interrupts(self.channel.guard(self._serve_pushes())) and self._leases:
                self.channel.capacity = 0
                await self.channel.beat_now()
                await asyncio.wait(list(self._leases.values()), timeout=5.0)
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _serve_pushes(self) -> None:
        while True:
            with self.waits.named("leases", on="coordinator"):
                message = (await self.channel.pushes.get()).message
            match message:
                case m.ScoreLease():
                    task = asyncio.create_task(self._work(message))
                    self._leases[message.lease_id] = task
                    task.add_done_callback(lambda _, lease_id=message.lease_id: self._leases.pop(lease_id, None))
                case m.Shutdown():
                    log.info("shutdown", reason=message.reason)
                    return
                case m.HeartbeatAck() | m.CancelLease():
                    pass  # a judgement is short and bounded: finishing it costs less than breaking it off
                case _:
                    log.warning("unexpected_message", kind=message.kind)

    async def _work(self, lease: m.ScoreLease) -> None:
        try:
            loop = asyncio.get_running_loop()
            result = await loop.run_in_executor(self._threads, self.judge.judge, lease.completion, lease.suite)
        except Exception as error:  # a broken judge must never look like a wrong answer
            log.exception("judge_failed", group=lease.group_id)
            result = JudgeResult(verdict=Verdict.INFRA_ERROR, message=f"{type(error).__name__}: {error}")
        self._num_judged += 1
        with contextlib.suppress(PeerError):  # ``channel.failed`` carries it, and ends the node
            await self.channel.request(
                m.ScoreResult(
                    lease_id=lease.lease_id, group_id=lease.group_id, sample_index=lease.sample_index, result=result
                )
            )


async def main(run: RunConfig, config: RewardConfig, *, node_id: str = "") -> int:
    """Body of a reward process: its exit code."""
    stop = StopSignal()
    waits = WaitTable()
    judge = Judge(config)
    judge.start()
    try:
        node_id = node_id or f"reward-{socket.gethostname()}-{os.getpid()}"
        channel = NodeChannel(run.address, run.id, role="reward", node_id=node_id, waits=waits, keys=run.read_keys())
        node = RewardNode(judge, channel, waits, num_workers=config.num_workers)
        try:
            if await stop.interrupts(channel.start(join_timeout_s=run.join_timeout_s)):
                return stop.exit_code
            log.info("joined", node=node_id)
            await node.serve(stop)
        finally:
            await channel.close("drained")
    finally:
        judge.close()
    return stop.exit_code
