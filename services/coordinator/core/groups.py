"""Groups and samples: the coordinator's view of one prompt's completions, from admission to training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from protocol.codec import Array
from protocol.messages import SampleResult
from protocol.verdicts import JudgeResult
from protocol.versions import Segment

_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
ROUTED_EXPERTS_DTYPES = ("uint8", "uint16")


class GroupStatus(StrEnum):
    """OPEN -> READY -> BATCHED -> TRAINED; OPEN -> FAILED or FILTERED, which give their place back."""

    OPEN = "open"  # being generated or judged
    READY = "ready"  # fully judged, waiting for a step
    BATCHED = "batched"  # fixed to a step that isn't committed
    TRAINED = "trained"
    FILTERED = "filtered"  # all rewards equal, refilled
    FAILED = "failed"


def sample_problem(message: SampleResult, arrays: Mapping[str, Array], *, with_routed_experts: bool) -> str:
    """Why a sample can't be trained on (a node of ours never sends such a one), or ''. ``with_routed_experts``: as ``run.routing_replay``."""
    prompt, completion, logprobs = arrays["prompt_ids"], arrays["completion_ids"], arrays["logprobs"]
    if not (
        prompt.dtype == completion.dtype == _INT32
        and logprobs.dtype == _FLOAT32
        and prompt.ndim == completion.ndim == logprobs.ndim == 1
    ):
        shapes = {name: (array.dtype.name, array.ndim) for name, array in arrays.items()}
        return f"arrays are {shapes}, not vectors of int32, int32 and float32"
    counted = sum([segment.num_tokens for segment in message.segments])
    if not message.segments or not completion.size == logprobs.size == counted:
        return f"{completion.size} tokens with {logprobs.size} log-probs and version segments for {counted}"
    routed_experts = arrays.get("routed_experts")
    if (routed_experts is not None) != with_routed_experts:
        return f"{'without' if with_routed_experts else 'with'} routed_experts, but run.routing_replay = {str(with_routed_experts).lower()}"
    num_rows = prompt.size + completion.size - 1
    if routed_experts is not None and (
        routed_experts.dtype.name not in ROUTED_EXPERTS_DTYPES
        or routed_experts.ndim != 3
        or len(routed_experts) != num_rows
    ):
        return f"routed_experts of {routed_experts.dtype.name}{list(routed_experts.shape)}, not uint8 or uint16 with {num_rows} rows"
    return ""


@dataclass(slots=True)
class Sample:
    """One acknowledged completion. ``arrays`` as in ``messages.SampleResult``."""

    sample_index: int
    text: str
    finish_reason: str
    segments: list[Segment]
    arrays: dict[str, Array]
    result: JudgeResult | None = None
    score_attempts: int = 0
    deaths: int = 0  # reward nodes that died while they had it
    avoid_nodes: set[str] = field(default_factory=set)  # reward nodes that failed on it
    lost: bool = False  # scoring failed for good: the group goes on without it
    num_tokens: int = field(init=False)  # completion tokens: what generation cost

    def __post_init__(self) -> None:
        self.num_tokens = int(self.arrays["completion_ids"].size)


@dataclass(slots=True)
class Group:
    """``group_id`` is the order of admission; ``draw`` is the task's place in the cursor."""

    group_id: int
    draw: int
    task_index: int
    admitted_version: int
    status: GroupStatus = GroupStatus.OPEN
    step: int | None = None
    overtaken: int = 0
    generate_attempts: int = 0
    deaths: int = 0  # rollout nodes that died while they had it
    avoid_nodes: set[str] = field(default_factory=set)  # rollout nodes that failed on it
    samples: dict[int, Sample] = field(default_factory=dict)
    error: str = ""  # why the last of its lost samples could not be judged

    def is_unjudged(self, sample_index: int) -> bool:
        """Whether a verdict of that sample is still of use."""
        sample = self.samples.get(sample_index)
        return sample is not None and sample.result is None and not sample.lost

    def missing(self, group_size: int) -> list[int]:
        """Sample indices without a completion yet."""
        if len(self.samples) == group_size:
            return []
        return [index for index in range(group_size) if index not in self.samples]

    def judged(self) -> list[Sample]:
        """Samples with a reward, by index."""
        return [s for _, s in sorted(self.samples.items()) if s.result is not None and not s.lost]

    def rewards(self) -> list[float]:
        """Rewards of the judged samples, by index."""
        return [s.result.reward or 0.0 for s in self.judged() if s.result is not None]

    @property
    def num_tokens(self) -> int:
        """Completion tokens of all its samples, lost ones too."""
        return sum(sample.num_tokens for sample in self.samples.values())
