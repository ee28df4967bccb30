"""An engine without a model: scripted completions at a given speed, through the real transport and the real weight broadcast.

For fault tests and queue benchmarks. It can be slow, fail, die, or be wrong about its weights; see ``FakeEngineConfig``.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np

from common.errors import ForebayError
from protocol import weights
from protocol.codec import Array
from protocol.messages import Sampling, WeightUpdateMember, WeightUpdatePlan
from protocol.versions import Segment, VersionTag
from services.rollout.config import FakeEngineConfig
from services.rollout.engine import Completion, EngineDied, PromptTooLong


class FakeEngine:
    """Tokens follow from seed, sample and position, each with log-probability -1; a prompt is its UTF-8 bytes."""

    num_workers = 1

    def __init__(
        self, config: FakeEngineConfig, *, max_prompt_tokens: int, returns_routed_experts: bool = False
    ) -> None:
        self.config, self._tells_routes = config, returns_routed_experts
        self.holds = VersionTag(version=0)
        self.received: dict[str, Any] = {}
        self._max_prompt_tokens = max_prompt_tokens
        self._generated = 0
        self._num_groups = 0
        self._groups: list[weights.BroadcastGroup] = []  # one for each sender
        self._group_key = ""
        self._running = asyncio.Event()
        self._running.set()
        self._next_update = asyncio.Event()

    async def start(self) -> None:
        """No model, but torch for the broadcast: importing it later would hold up the heartbeats."""
        await asyncio.to_thread(importlib.import_module, "torch.distributed")

    def generated_tokens(self) -> int:
        """Tokens so far."""
        return self._generated

    async def generate(
        self, prompt: str, sample_indices: Sequence[int], sampling: Sampling, seed: int
    ) -> AsyncIterator[Completion]:
        """One completion after the other, token by token in time."""
        prompt_ids = np.frombuffer(prompt.encode(), dtype=np.uint8).astype(np.int32)
        if prompt_ids.size > self._max_prompt_tokens:
            raise PromptTooLong(f"{prompt_ids.size} tokens, run.max_prompt_tokens is {self._max_prompt_tokens}")
        self._num_groups += 1
        if self.config.fail_every and self._num_groups % self.config.fail_every == 0:
            raise ForebayError("the fake engine was told to fail")
        if 0 < self.config.engine_dies_at <= self._num_groups:
            raise EngineDied("the fake engine was told to die")
        if _is_in(self.config.dies_on, prompt):
            os.kill(os.getpid(), signal.SIGKILL)
        is_slow = _is_in(self.config.slow_on, prompt)
        for sample_index in sample_indices:
            if _is_in(self.config.never_ends_on, prompt):
                await asyncio.Event().wait()
            segments: list[Segment] = []
            count = min(self.config.num_tokens, sampling.max_tokens)
            for _ in range(count):
                await self._running.wait()
                await asyncio.sleep(1 / self.config.tokens_per_s)
                self._generated += 1
                version = self.holds.version
                if segments and segments[-1].version == version:
                    segments[-1] = Segment(version=version, num_tokens=segments[-1].num_tokens + 1)
                else:
                    segments.append(Segment(version=version, num_tokens=1))
                if is_slow:
                    is_slow = False
                    await self._next_update.wait()
            completion_ids = (1 + (np.arange(count) * (1 + sample_index) + seed) % 7).astype(np.int32)
            yield Completion(
                sample_index=sample_index,
                prompt_ids=prompt_ids,
                completion_ids=completion_ids,
                logprobs=np.full(count, self._logprob(), dtype=np.float32),
                text=self.config.completion.replace("{sample}", f"{seed}-{sample_index}"),
                finish_reason="stop",
                segments=segments,
                routed_experts=fake_routes(prompt_ids, completion_ids) if self._tells_routes else None,
            )

    def _logprob(self) -> float:
        """-1, or less where it is to depend on the weights; ``FakePolicy`` has the same formula."""
        if not self.config.logprobs_tell_weights or not self.received:
            return -1.0
        return weight_logprob(float(self.received["weight"][0]))

    async def form_groups(self, plan: WeightUpdatePlan, member: WeightUpdateMember) -> None:
        """Join the group of each sender: a trainer has one for each pipeline stage."""
        if not self._groups or plan.group_key != self._group_key:
            await self.leave_groups()
            for address in plan.stores:
                self._groups.append(await asyncio.to_thread(_join, plan, address, member.first_rank))
            self._group_key = plan.group_key

    async def update_weights(self, plan: WeightUpdatePlan) -> float:
        """Receive into a dict."""
        if self.config.fail_update_at and plan.tag.version == self.config.fail_update_at:
            raise ForebayError("the fake engine was told to fail this update")
        started = time.monotonic()
        self._running.clear()
        try:
            fresh: dict[str, Any] = {}
            for group in self._groups:
                await asyncio.to_thread(weights.receive_weights, group, fresh.__setitem__)
            await asyncio.sleep(self.config.update_s)
            if not 0 < self.config.keep_weights_from <= plan.tag.version:
                self.received = fresh
            self.holds = plan.tag
            self._next_update.set()
            self._next_update = asyncio.Event()
        finally:
            self._running.set()
        return time.monotonic() - started

    async def leave_groups(self) -> None:
        """Close all groups."""
        for group in self._groups:
            group.close()
        self._groups = []

    async def close(self) -> None:
        """Close all groups."""
        await self.leave_groups()


def weight_logprob(weight: float) -> float:
    """Log-probability of every token by a policy of this weight: between -2 and -1."""
    return -1.0 - weight % 97 / 97


def fake_routes(prompt_ids: Array, completion_ids: Array) -> Array:
    """Of a model of 2 layers that sends a token to 2 of 256 experts: uint8 [P + C - 1, 2, 2]. ``FakePolicy`` has the same formula."""
    first = np.concatenate([prompt_ids, completion_ids])[:-1] % 128
    return np.stack([first, first + 128, first + 64, first], axis=1).astype(np.uint8).reshape(-1, 2, 2)


def _is_in(text: str, prompt: str) -> bool:
    return text != "" and text in prompt


def _join(plan: WeightUpdatePlan, address: str, rank: int) -> weights.BroadcastGroup:
    import torch

    store = weights.group_store(weights.connect_store(address, timeout_s=plan.timeout_s), plan.group_key)
    return weights.BroadcastGroup(
        store, rank=rank, world_size=plan.world_size, device=torch.device("cpu"), timeout_s=plan.timeout_s
    )
