"""What a rollout node needs of an inference engine. ``VllmEngine`` and ``FakeEngine`` are the two that there are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import ForebayError
from protocol.codec import Array
from protocol.messages import Sampling, WeightUpdateMember, WeightUpdatePlan
from protocol.versions import Segment, VersionTag


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished completion: ``prompt_ids`` int32 [P], ``completion_ids`` int32 [C], ``logprobs`` float32 [C].

    ``logprobs`` are of the sampled tokens under softmax(logits / temperature) over the whole vocabulary, by the weights of the
    token's segment. ``routed_experts``: with ``run.routing_replay`` the experts of each token but the last, uint8 or uint16
    [P + C - 1, layers, k], as they were when its log-prob, or for the prompt its keys and values, were computed.
    """

    sample_index: int
    prompt_ids: Array
    completion_ids: Array
    logprobs: Array
    text: str
    finish_reason: str
    segments: list[Segment]
    routed_experts: Array | None = None


class PromptTooLong(Exception):
    """The prompt doesn't fit: no engine of this run can do the group, so it is refused once and for all."""


class EngineDied(ForebayError):
    """The engine's processes are gone, and nothing will ever be generated here again: the node ends, so that it is started anew."""


class Engine(Protocol):
    """An engine with the weights of ``holds``. All methods run on the node's event loop and never block it."""

    num_workers: int  # processes that receive weights
    holds: VersionTag

    async def start(self) -> None:
        """Load the model; weights are version 0, those of ``run.model``."""

    def generated_tokens(self) -> int:
        """Completion tokens sampled since the start, by the engine's own count."""

    def generate(
        self, prompt: str, sample_indices: Sequence[int], sampling: Sampling, seed: int
    ) -> AsyncIterator[Completion]:
        """Completions of one prompt, each when it is finished. Closing the iterator aborts the rest.

        An engine that can, and is told to, makes sample ``i`` of ``seed`` and ``i`` alone, so that it is the same one when it is made again.

        Raises:
            PromptTooLong: before anything is generated.
            EngineDied: at any time.
        """

    async def form_groups(self, plan: WeightUpdatePlan, member: WeightUpdateMember) -> None:
        """Form the process groups of ``plan``, or keep them if its ``group_key`` is that of the last one."""

    async def update_weights(self, plan: WeightUpdatePlan) -> float:
        """Receive and use the weights of ``plan``; returns the seconds that generation stood still.

        Raises:
            Exception: any failure; the old weights serve on.
        """

    async def leave_groups(self) -> None:
        """Close the process groups, which interrupts a peer that sits in a broadcast with this engine."""

    async def close(self) -> None:
        """Stop the engine and its processes."""
