"""A reward node's loop: score leases in, verdicts out. Stateless.

consumes:    ScoreLease, CancelLease, Shutdown; a Suite for each one it lacks
produces:    ScoreResult for each lease, always: a judge's own failure is the verdict ``infra_error``
waits for:   pushes of the coordinator; suites; the judges, in processes of their own
unblocked by: the coordinator's leases and answers
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Any

import structlog

from common.errors import ForebayError, PeerError
from common.lifecycle import StopSignal
from common.waits import WaitTable
from protocol import messages as m
from protocol.channel import NodeChannel
from protocol.config import RunConfig
from protocol.suites import TestSuite
from protocol.verdicts import JudgeResult, Verdict
from services.reward.config import RewardConfig
from services.reward.pool import JudgePool
from services.reward.suite_store import SuiteStore

log = structlog.get_logger()

MAX_RESULT_BYTES = 16 << 10  # of a result's JSON: it goes into the journal, one for each completion


class RewardNode:
    """Serves a started ``pool`` to one coordinator until told to leave."""

    def __init__(self, pool: JudgePool, channel: NodeChannel, waits: WaitTable, config: RewardConfig) -> None:
        self.pool, self.channel, self.waits, self.config = pool, channel, waits, config
        self.suites = SuiteStore(self._fetch_suite)
        self._leases: dict[str, asyncio.Task[None]] = {}
        self._num_judged = 0
        self._num_infra_errors = 0
        channel.capacity = min(2 * config.num_workers, config.max_queue)  # one at work and one waiting for each worker
        channel.hello_fields = lambda: {"isolation": pool.isolation}
        channel.beat_fields = self._beat_fields

    def _beat_fields(self) -> dict[str, Any]:
        mine = {"judged": float(self._num_judged), "infra_errors": float(self._num_infra_errors)}
        return {"lease_ids": list(self._leases), "counters": self.pool.counters() | mine}

    async def serve(self, stop: StopSignal) -> None:
        """Until the coordinator says ``Shutdown``, or ``stop``: then no new leases are taken and the open ones finished, for
        ``reward.drain_timeout_s`` at most. What is open after that goes to another node with this one's goodbye."""
        try:
            if await stop.interrupts(self.channel.guard(self._serve_pushes())):
                await self._drain()
        finally:
            tasks = list(self._leases.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.suites.close()

    async def _drain(self) -> None:
        self.channel.capacity = 0
        await self.channel.beat_now()
        log.info("draining", open_leases=len(self._leases))
        if self._leases:
            finished = asyncio.gather(*self._leases.values(), return_exceptions=True)
            await asyncio.wait(  # without a coordinator there is nobody to finish them for
                [finished, self.channel.failed],
                timeout=self.config.drain_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        if self._leases:
            log.warning("leases_given_back", open_leases=len(self._leases), timeout_s=self.config.drain_timeout_s)

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
        result = await self._judge(lease)
        self._num_judged += 1
        self._num_infra_errors += result.verdict is Verdict.INFRA_ERROR
        with contextlib.suppress(PeerError):  # ``channel.failed`` carries it, and ends the node
            await self.channel.request(
                m.ScoreResult(
                    lease_id=lease.lease_id, group_id=lease.group_id, sample_index=lease.sample_index, result=result
                )
            )

    async def _judge(self, lease: m.ScoreLease) -> JudgeResult:
        try:
            suite = await self._suite(lease)
            future = self.pool.submit(lease.completion, suite)
            # Shielded: who gives up a lease cancels no worker.
            return fit_to_send(await asyncio.shield(asyncio.wrap_future(future)))
        except (ForebayError, ValueError) as error:  # its suite did not come, or is none
            reason = str(error)
        except Exception as error:  # a broken judge must never look like a wrong answer, nor end its neighbours
            log.exception("judge_failed", group=lease.group_id, sample=lease.sample_index)
            reason = f"{type(error).__name__}: {error}"
        log.warning("not_judged", group=lease.group_id, sample=lease.sample_index, reason=reason)
        return fit_to_send(JudgeResult(verdict=Verdict.INFRA_ERROR, message=reason, isolation=self.pool.isolation))

    async def _suite(self, lease: m.ScoreLease) -> TestSuite:
        return await self.waits.wait_for(
            self.suites.get(lease.suite_hash),
            f"suite {lease.suite_hash}",
            on="coordinator",
            timeout_s=lease.timeout_s,
            limit_key="coordinator.score_timeout_s",
        )

    async def _fetch_suite(self, suite_hash: str) -> bytes:
        received = await self.channel.request(m.SuiteRequest(suite_hash=suite_hash))
        return received.arrays["json_utf8"].tobytes()


def fit_to_send(result: JudgeResult) -> JudgeResult:
    """``result`` as it can travel: text that is UTF-8, and without its tests where these make it too big for the journal."""
    try:
        size = len(result.model_dump_json())
    except ValueError:  # text of a grader or a program that is none
        message = result.message.encode(errors="replace").decode()
        return result.model_copy(update={"tests": (), "message": message[:10_000]})
    if size <= MAX_RESULT_BYTES:
        return result
    return result.model_copy(update={"tests": (), "message": result.message[:10_000]})


async def main(run: RunConfig, config: RewardConfig, *, node_id: str = "") -> int:
    """Body of a reward process: its exit code."""
    stop = StopSignal()
    waits = WaitTable()
    pool = JudgePool(config)
    await asyncio.to_thread(pool.start)
    try:
        node_id = node_id or f"reward-{socket.gethostname()}-{os.getpid()}"
        channel = NodeChannel(run.address, run.id, role="reward", node_id=node_id, waits=waits, keys=run.read_keys())
        node = RewardNode(pool, channel, waits, config)
        try:
            if await stop.interrupts(channel.start(join_timeout_s=run.join_timeout_s)):
                return stop.exit_code
            log.info("joined", node=node_id, isolation=pool.isolation, workers=config.num_workers)
            await node.serve(stop)
        finally:
            await channel.close("drained")
    finally:
        await asyncio.to_thread(pool.close)
    return stop.exit_code
