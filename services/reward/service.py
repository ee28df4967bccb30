"""A reward node's loop: score leases in, verdicts out. Stateless.

consumes:    ScoreLease, CancelLease, Shutdown; a Suite for each one it lacks
produces:    ScoreResult for each lease, always: a judge's own failure is the verdict ``infra_error``; LeaseCancelled for one that was
             withdrawn before a judge took it up
waits for:   pushes of the coordinator; suites; the judges, in processes of their own
unblocked by: the coordinator's leases and answers
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from concurrent.futures import Future
from typing import Any

import structlog

from common.errors import ForebayError, PeerError, WaitTimeout
from common.lifecycle import StopSignal
from common.recorder import RECORDER
from common.waits import Idle, WaitTable
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

    def __init__(
        self, run: RunConfig, config: RewardConfig, pool: JudgePool, channel: NodeChannel, waits: WaitTable
    ) -> None:
        self.run, self.config, self.pool, self.channel, self.waits = run, config, pool, channel, waits
        self.suites = SuiteStore(self._fetch_suite)
        self._leases: dict[str, asyncio.Task[None]] = {}
        self._open: dict[str, m.OpenLease] = {}  # the same, for a coordinator that has restarted
        self._jobs: dict[str, Future[JudgeResult]] = {}  # of leases that the judges have
        self._num_judged = 0
        self._num_infra_errors = 0
        self._idle = Idle(
            waits, "leases", on="coordinator", timeout_s=run.idle_timeout_s, limit_key="run.idle_timeout_s"
        )
        channel.capacity = min(2 * config.num_workers, config.max_queue)  # one at work and one waiting for each worker
        channel.hello_fields = lambda: {"isolation": pool.isolation, "open_leases": list(self._open.values())}
        channel.beat_fields = self._beat_fields

    def _beat_fields(self) -> dict[str, Any]:
        mine = {
            "judged": float(self._num_judged),
            "infra_errors": float(self._num_infra_errors),
            "idle_s": self._idle.total_s,
        }
        return {"lease_ids": list(self._leases), "counters": self.pool.counters() | mine}

    async def serve(self, stop: StopSignal) -> None:
        """Until the coordinator says ``Shutdown``, or ``stop``: then no new leases are taken and the open ones finished, for
        ``reward.drain_timeout_s`` at most. What is open after that goes to another node with this one's goodbye."""
        try:
            self._idle.set(True)
            if await stop.interrupts(self.channel.guard(self._serve_pushes())):
                await self._drain()
        finally:
            self._idle.set(False)
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
            message = (await self.channel.pushes.get()).message
            match message:
                case m.ScoreLease():
                    self._begin(message)
                case m.Shutdown():
                    log.info("shutdown", reason=message.reason)
                    return
                case m.CancelLease():
                    self._withdraw(message.lease_id)
                case m.HeartbeatAck():
                    pass  # a lease that went to others may still be answered first, and then that answer counts
                case _:
                    log.warning("unexpected_message", kind=message.kind)

    def _begin(self, lease: m.ScoreLease) -> None:
        if lease.lease_id in self._leases:  # the message came twice
            return
        task = asyncio.create_task(self._work(lease), name=f"lease {lease.lease_id}")
        self._leases[lease.lease_id] = task
        self._open[lease.lease_id] = m.OpenLease(
            lease_id=lease.lease_id, group_id=lease.group_id, sample_index=lease.sample_index
        )
        self._idle.set(False)
        task.add_done_callback(lambda _: self._end(lease.lease_id))

    def _withdraw(self, lease_id: str) -> None:
        """Nobody wants the verdict any more. One that is being made is short and bounded: finishing it costs less than breaking it off."""
        if job := self._jobs.get(lease_id):
            job.cancel()

    def _end(self, lease_id: str) -> None:
        self._leases.pop(lease_id, None)
        self._open.pop(lease_id, None)
        self._jobs.pop(lease_id, None)
        if not self._leases and self.channel.capacity:  # without capacity it leaves, and waits for nothing
            self._idle.set(True)

    async def _work(self, lease: m.ScoreLease) -> None:
        what = f"acknowledgement of the verdict on sample {lease.sample_index} of group {lease.group_id}"
        timeout_s = self.run.ack_timeout_s
        message = await self._outcome(lease)
        with (
            contextlib.suppress(PeerError, WaitTimeout),  # ``channel.failed`` carries it, and ends the node
            self.waits.named(what, on="coordinator", timeout_s=timeout_s, limit_key="run.ack_timeout_s"),
        ):
            await self.channel.request(message)

    async def _outcome(self, lease: m.ScoreLease) -> m.Message:
        """A verdict; or, where the lease was withdrawn before a judge took it up, that it is given back."""
        try:
            result = await self._judge(lease)
        except asyncio.CancelledError:
            if not ((job := self._jobs.get(lease.lease_id)) and job.cancelled()):
                raise  # it is this task that is cancelled: the node ends
            return m.LeaseCancelled(lease_id=lease.lease_id, reason="withdrawn before it was judged")
        self._num_judged += 1
        self._num_infra_errors += result.verdict is Verdict.INFRA_ERROR
        return m.ScoreResult(
            lease_id=lease.lease_id, group_id=lease.group_id, sample_index=lease.sample_index, result=result
        )

    async def _judge(self, lease: m.ScoreLease) -> JudgeResult:
        try:
            suite = await self._suite(lease)
            future = self._jobs[lease.lease_id] = self.pool.submit(lease.completion, suite)
            return fit_to_send(
                await self.waits.wait_for(
                    asyncio.shield(asyncio.wrap_future(future)),  # who gives up a lease cancels no worker
                    f"a verdict on sample {lease.sample_index} of group {lease.group_id}",
                    on="its judges",
                    timeout_s=2 * lease.timeout_s,  # a late verdict still counts
                    limit_key="coordinator.score_timeout_s",
                )
            )
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
        node = RewardNode(run, config, pool, channel, waits)
        RECORDER.describe("reward", run_dir=run.run_dir, node_id=node_id, waits=waits)
        reason = "drained"
        try:
            if await stop.interrupts(channel.start(join_timeout_s=run.join_timeout_s)):
                return stop.exit_code
            log.info("joined", node=node_id, isolation=pool.isolation, workers=config.num_workers)
            await node.serve(stop)
        except ForebayError as error:
            reason = f"failed: {error}"
            raise
        finally:
            await channel.close(reason)
    finally:
        await asyncio.to_thread(pool.close)
    return stop.exit_code
