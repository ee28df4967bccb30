"""Coordinator -> rollout or reward and back: the leases to generate and to judge, and what becomes of them."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from protocol.messages.base import Message
from protocol.verdicts import JudgeResult
from protocol.versions import Segment


class Sampling(BaseModel):
    """How completions are sampled. Only what the learner can reproduce: softmax of logits / temperature, nothing cut off."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: int = Field(gt=0)
    temperature: float = Field(default=1.0, gt=0)


class GenerateLease(Message):
    """Sample the completions ``sample_indices`` of one group. Each is sent as soon as it is finished."""

    kind: ClassVar[str] = "generate_lease"

    lease_id: str
    group_id: int
    task_id: str
    prompt: str
    sample_indices: list[int]
    sampling: Sampling
    seed: int  # of the group, the same in each of its leases; for engines that sample each completion from a generator of its own
    timeout_s: float


class SampleResult(Message):
    """One finished completion. Arrays: ``prompt_ids`` int32 [P], ``completion_ids`` int32 [C], ``logprobs`` float32 [C];
    with ``run.routing_replay`` also ``routed_experts`` uint8 or uint16 [P + C - 1, layers, k]: the experts of each token that was computed.

    ``segments`` covers the C tokens in order. ``text`` is for the judge only and is never tokenized again.
    """

    kind: ClassVar[str] = "sample_result"
    arrays: ClassVar[tuple[str, ...]] = ("prompt_ids", "completion_ids", "logprobs")
    optional_arrays: ClassVar[tuple[str, ...]] = ("routed_experts",)

    lease_id: str
    group_id: int
    sample_index: int
    text: str
    finish_reason: str
    segments: list[Segment]


class LeaseFailed(Message):
    """The lease could not be done. ``permanent``: nobody can do it (a prompt too long for the model), don't try again."""

    kind: ClassVar[str] = "lease_failed"

    lease_id: str
    error: str
    permanent: bool = False
    num_tokens: int = 0  # generated for it and thrown away


class CancelLease(Message):
    """Coordinator -> node: stop working on the lease; answer with ``LeaseCancelled``, or with the verdict if it is being made."""

    kind: ClassVar[str] = "cancel_lease"

    lease_id: str
    reason: str


class LeaseCancelled(Message):
    """The node gave the lease back unfinished on purpose (a drain, a ``CancelLease``). Not a failure: no attempt is counted."""

    kind: ClassVar[str] = "lease_cancelled"

    lease_id: str
    reason: str
    num_tokens: int = 0


class ScoreLease(Message):
    """Judge one completion against one suite, which is named by its content: who lacks it sends a ``SuiteRequest``."""

    kind: ClassVar[str] = "score_lease"

    lease_id: str
    group_id: int
    sample_index: int
    completion: str
    suite_hash: str
    timeout_s: float


class SuiteRequest(Message):
    """Reward: send me the suite of that name. Answered with ``Suite``, or ``Refused`` if no lease of this life named it."""

    kind: ClassVar[str] = "suite_request"

    suite_hash: str


class Suite(Message):
    """One test suite. Array: ``json_utf8`` uint8 [N], the suite's ``to_json``; its ``hash_of`` is ``suite_hash``."""

    kind: ClassVar[str] = "suite"
    arrays: ClassVar[tuple[str, ...]] = ("json_utf8",)

    suite_hash: str


class ScoreResult(Message):
    """The judge's word on one completion. An ``infra_error`` is retried elsewhere by the coordinator."""

    kind: ClassVar[str] = "score_result"

    lease_id: str
    group_id: int
    sample_index: int
    result: JudgeResult
