"""A rollout node's loop: leases in, finished completions out, new weights whenever the learner has some.

    consumes:    GenerateLease, WeightUpdatePlan, CancelLease, Shutdown
    produces:    SampleResult for each finished completion, WeightUpdateReady, WeightsLoaded
    waits for:   pushes of the coordinator; the engine
    unblocked by: the coordinator's leases and weight updates; a node that holds no valid weights gets no leases

One task for each lease, so a lease that fails takes nothing with it; one task at a time for weight updates.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from common.errors import ConfigError, ForebayError, PeerError, WaitTimeout
from common.lifecycle import StopSignal
from common.recorder import RECORDER
from common.waits import Idle, WaitTable
from protocol import messages as m
from protocol.channel import NodeChannel
from protocol.codec import Array, Received
from protocol.config import RunConfig
from services.rollout.config import RolloutConfig
from services.rollout.engine import Completion, Engine, EngineDied, PromptTooLong

log = structlog.get_logger()

_End = m.LeaseFailed | m.LeaseCancelled | None  # of a lease; None: with all its samples


class RolloutNode:
    """Serves one engine to one coordinator until told to leave."""

    def __init__(
        self, run: RunConfig, config: RolloutConfig, engine: Engine, channel: NodeChannel, waits: WaitTable
    ) -> None:
        self.run, self.config, self.engine, self.channel, self.waits = run, config, engine, channel, waits
        self._leases: dict[str, asyncio.Task[None]] = {}
        self._generations: dict[str, asyncio.Task[_End]] = {}  # of the same leases
        self._open: dict[str, m.OpenLease] = {}  # the same, for a coordinator that has restarted
        self._settled_tokens = (
            0  # that the coordinator is known to have in its ledger: delivered, or thrown away while this node was idle
        )
        self._idle_tokens: int | None = None  # generated at the last heartbeat, if no lease was open
        self._update_id = 0  # of the last plan
        self._weight_update: asyncio.Task[None] | None = None
        self._idle = Idle(
            waits, "leases", on="coordinator", timeout_s=run.idle_timeout_s, limit_key="run.idle_timeout_s"
        )
        self._paused_s = 0.0  # generation stood still for weight updates, failed ones too
        channel.capacity = config.max_concurrent_groups
        channel.hello_fields = lambda: {
            "holds": engine.holds,
            "num_workers": engine.num_workers,
            "settled_tokens": self._settled_tokens,
            "open_leases": list(self._open.values()),
        }
        channel.beat_fields = self._beat_fields

    def _beat_fields(self) -> dict[str, Any]:
        self._idle_tokens = None if self._leases else self.engine.generated_tokens()
        return {
            "lease_ids": list(self._leases),
            "holds": self.engine.holds,
            "counters": {
                "generated_tokens": float(self.engine.generated_tokens()),
                "idle_s": self._idle.total_s,
                "paused_s": self._paused_s,
            },
        }

    async def serve(self, stop: StopSignal) -> None:
        """Until the coordinator says ``Shutdown``, or ``stop``: then unfinished leases are given back."""
        try:
            self._idle.set(True)
            await stop.interrupts(self.channel.guard(self._serve_pushes()))
        finally:
            self._idle.set(False)
            if self._weight_update is not None:
                self._weight_update.cancel()  # not awaited: it may sit in a broadcast, and the engine is about to close
            await self._drain()

    async def _serve_pushes(self) -> None:
        while True:
            message = (await self.channel.pushes.get()).message
            match message:
                case m.GenerateLease():
                    self._begin(message)
                case m.CancelLease():
                    self._cancel(message.lease_id)
                case m.HeartbeatAck():
                    if self._idle_tokens is not None and not self._leases:
                        self._settled_tokens = self._idle_tokens
                    for lease_id in message.lost_lease_ids:
                        self._cancel(lease_id)
                case m.WeightUpdatePlan():
                    if message.update_id > self._update_id:  # else it came twice, or a later one overtook it
                        await self._cancel_weight_update()
                        self._update_id = message.update_id
                        self._weight_update = asyncio.create_task(self._take_weights(message))
                case m.WeightUpdateAborted():
                    if (
                        message.update_id >= self._update_id
                    ):  # it may have overtaken its plan, which then begins nothing
                        self._update_id = message.update_id
                        await self._cancel_weight_update()
                        await self._leave_groups(message)
                case m.Shutdown():
                    log.info("shutdown", reason=message.reason)
                    return
                case _:
                    log.warning("unexpected_message", kind=message.kind)

    async def _tell(self, message: m.Message, what: str, *, arrays: Mapping[str, Array] | None = None) -> Received:
        """Send, and wait until the coordinator has it for good."""
        timeout_s = self.run.ack_timeout_s
        with self.waits.named(what, on="coordinator", timeout_s=timeout_s, limit_key="run.ack_timeout_s"):
            return await self.channel.request(message, arrays=arrays)

    # ---- generation ----

    def _begin(self, lease: m.GenerateLease) -> None:
        if lease.lease_id in self._leases:  # the message came twice
            return
        sends: list[asyncio.Task[None]] = []
        generation = asyncio.create_task(self._generate(lease, sends), name=f"lease {lease.lease_id}")
        task = asyncio.create_task(self._work(lease, generation, sends))
        self._generations[lease.lease_id], self._leases[lease.lease_id] = generation, task
        self._open[lease.lease_id] = m.OpenLease(lease_id=lease.lease_id, group_id=lease.group_id)
        self._idle.set(False)
        task.add_done_callback(lambda _: self._end(lease.lease_id))

    def _end(self, lease_id: str) -> None:
        self._leases.pop(lease_id, None)
        self._generations.pop(lease_id, None)
        self._open.pop(lease_id, None)
        if not self._leases and self.channel.capacity:  # without capacity it leaves, and waits for nothing
            self._idle.set(True)

    async def _work(
        self, lease: m.GenerateLease, generation: asyncio.Task[_End], sends: Sequence[asyncio.Task[None]]
    ) -> None:
        """One lease. Its end is told to the coordinator when that has all samples which were finished: until then the lease is open, for a
        node without one counts as one that has nothing more to send (``services/coordinator/counts.py``)."""
        await asyncio.wait([generation])
        end = _given_back(lease) if generation.cancelled() else generation.result()
        with contextlib.suppress(PeerError, WaitTimeout):  # ``channel.failed`` carries it, and ends the node
            try:
                await asyncio.gather(*sends)
            except (PeerError, WaitTimeout):
                raise
            except Exception as error:  # a sample that can't be sent
                end = _failed(lease, error)
            if end is not None:
                how = "is given back" if isinstance(end, m.LeaseCancelled) else "failed"
                await self._tell(end, f"acknowledgement that group {lease.group_id} {how}")

    async def _generate(self, lease: m.GenerateLease, sends: list[asyncio.Task[None]]) -> _End:
        """Stream the group's completions out, each by a task in ``sends``. What there is to tell of the end."""
        limit = asyncio.timeout(lease.timeout_s)
        try:
            async with limit:
                async for completion in self.engine.generate(
                    lease.prompt, lease.sample_indices, lease.sampling, lease.seed
                ):
                    sends.append(asyncio.create_task(self._send(lease, completion)))
            return None
        except PromptTooLong as error:
            return m.LeaseFailed(lease_id=lease.lease_id, error=str(error), permanent=True)
        except asyncio.CancelledError:
            return _given_back(lease)
        except EngineDied as error:  # it would fail every lease, of healthy tasks: others take them
            self._fail(error)
            return None
        except Exception as error:  # ends this lease only, and the coordinator counts the attempt
            if not limit.expired():
                return _failed(lease, error)
            why = f"not generated within coordinator.generate_timeout_s = {lease.timeout_s:g} s"
            log.warning("lease_failed", group=lease.group_id, error=why)
            return m.LeaseFailed(lease_id=lease.lease_id, error=why)

    def _fail(self, error: EngineDied) -> None:
        """The node goes."""
        if not self.channel.failed.done():
            log.error("engine_died", error=str(error))
            self.channel.failed.set_exception(error)
            self.channel.failed.exception()  # seen: ``guard`` raises it

    async def _send(self, lease: m.GenerateLease, completion: Completion) -> None:
        result = m.SampleResult(
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            sample_index=completion.sample_index,
            text=completion.text,
            finish_reason=completion.finish_reason,
            segments=completion.segments,
        )
        arrays = {
            "prompt_ids": completion.prompt_ids,
            "completion_ids": completion.completion_ids,
            "logprobs": completion.logprobs,
        }
        if completion.routed_experts is not None:
            arrays["routed_experts"] = completion.routed_experts
        await self._tell(
            result, f"acknowledgement of sample {completion.sample_index} of group {lease.group_id}", arrays=arrays
        )
        self._settled_tokens += int(completion.completion_ids.size)

    def _cancel(self, lease_id: str) -> None:
        if generation := self._generations.get(lease_id):
            generation.cancel()

    async def _drain(self) -> None:
        """Give back what isn't finished, within 5 s: after that the coordinator finds out by itself."""
        self.channel.capacity = 0
        tasks = list(self._leases.values())
        if tasks and not self.channel.failed.done():
            await self.channel.beat_now()  # no more leases, please
        for lease_id in list(self._leases):
            self._cancel(lease_id)
        if tasks and not self.channel.failed.done():
            await asyncio.wait(tasks, timeout=5.0)

    # ---- weights ----

    async def _take_weights(self, plan: m.WeightUpdatePlan) -> None:
        member = next((member for member in plan.members if member.node_id == self.channel.node_id), None)
        if member is None:
            return
        started = time.monotonic()
        # The coordinator ends the update at its own limit; these are over only if that could not reach us.
        limit: Any = {"timeout_s": 1.5 * plan.timeout_s, "limit_key": "run.weight_update_timeout_s"}
        try:
            with self.waits.named(f"a weight group for {plan.tag}", on="learner", **limit):
                await self.engine.form_groups(plan, member)
            with self.waits.named(f"go for {plan.tag}", on="coordinator", **limit):
                answer = (await self.channel.request(m.WeightUpdateReady(update_id=plan.update_id))).message
            if isinstance(
                answer, m.WeightUpdateAborted
            ):  # its push was lost; or the coordinator has restarted, or given up on this node
                await self._leave_groups(answer)
                return
            with self.waits.named(f"weights {plan.tag}", on="learner", **limit):
                pause_s = await self._update(plan)
            done = m.WeightsLoaded(update_id=plan.update_id, receive_s=time.monotonic() - started, pause_s=pause_s)
            await self._tell(done, f"acknowledgement of weights {plan.tag}")
            log.info("weights_updated", version=str(plan.tag), pause_s=round(pause_s, 3))
        except (PeerError, WaitTimeout):
            pass  # ``channel.failed`` carries it
        except EngineDied as error:
            self._fail(error)
        except Exception as error:  # any failure of an update is told, and the node serves on with its old weights
            log.exception("weight_update_failed", version=str(plan.tag))
            failed = m.WeightUpdateFailed(update_id=plan.update_id, error=f"{type(error).__name__}: {error}")
            await self._tell(failed, f"acknowledgement that weights {plan.tag} failed")

    async def _update(self, plan: m.WeightUpdatePlan) -> float:
        """Seconds that generation stood still; a failed update's count in the sum, too."""
        started = time.monotonic()
        try:
            return await self.engine.update_weights(plan)
        finally:
            self._paused_s += time.monotonic() - started

    async def _leave_groups(self, aborted: m.WeightUpdateAborted) -> None:
        log.warning("weight_update_aborted", reason=aborted.reason)
        await self.engine.leave_groups()

    async def _cancel_weight_update(self) -> None:
        if self._weight_update is not None and not self._weight_update.done():
            self._weight_update.cancel()
            await asyncio.gather(self._weight_update, return_exceptions=True)


def _given_back(lease: m.GenerateLease) -> m.LeaseCancelled:
    return m.LeaseCancelled(lease_id=lease.lease_id, reason="cancelled")


def _failed(lease: m.GenerateLease, error: Exception) -> m.LeaseFailed:
    log.error("lease_failed", group=lease.group_id, exc_info=error)
    return m.LeaseFailed(lease_id=lease.lease_id, error=f"{type(error).__name__}: {error}")


def make_engine(run: RunConfig, config: RolloutConfig) -> Engine:
    """The engine that the config names; imports vLLM, which takes seconds, only for vLLM.

    Raises:
        ConfigError: no checkpoint at ``run.model``.
    """
    if config.engine == "fake":
        from services.rollout.fake_engine import FakeEngine

        return FakeEngine(
            config.fake, max_prompt_tokens=run.max_prompt_tokens, returns_routed_experts=run.routing_replay
        )
    if not (run.model / "config.json").is_file():
        raise ConfigError(f"No Hugging Face checkpoint at {run.model.resolve()} (run.model): config.json is missing.")
    from services.rollout.vllm_engine import VllmEngine

    return VllmEngine(run, config)


async def main(run: RunConfig, config: RolloutConfig, *, node_id: str = "") -> int:
    """Body of a rollout process: its exit code. The engine loads before the node joins, so a node that is in can work."""
    stop = StopSignal()
    waits = WaitTable()
    engine = make_engine(run, config)
    try:
        await engine.start()
        if stop.event.is_set():
            return stop.exit_code
        node_id = node_id or f"rollout-{socket.gethostname()}-{os.getpid()}"
        channel = NodeChannel(run.address, run.id, role="rollout", node_id=node_id, waits=waits, keys=run.read_keys())
        node = RolloutNode(run, config, engine, channel, waits)
        RECORDER.describe("rollout", run_dir=run.run_dir, node_id=node_id, waits=waits)
        reason = "drained"
        try:
            if await stop.interrupts(channel.start(join_timeout_s=run.join_timeout_s)):
                return stop.exit_code
            log.info("joined", node=node_id)
            await node.serve(stop)
        except ForebayError as error:
            reason = f"failed: {error}"
            raise
        finally:
            await channel.close(reason)
    finally:
        await engine.close()
    return stop.exit_code
