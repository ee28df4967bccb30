"""Learner <-> coordinator: batches and steps."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from protocol.messages.base import Message
from protocol.versions import Segment, VersionTag


class BatchRequest(Message):
    """Give me the batch of ``step``. Answered when there is one; the same step gets the same batch for ever."""

    kind: ClassVar[str] = "batch_request"

    step: int


class BatchSample(BaseModel):
    """One sample of a batch; its tokens are slices of the batch's arrays, in order."""

    model_config = ConfigDict(frozen=True)

    group_id: int
    sample_index: int
    reward: float
    segments: list[Segment]
    num_prompt_tokens: int
    num_completion_tokens: int
    truncated: bool = False  # it ended at the length limit


class Batch(Message):
    """The fixed batch of one step, groups contiguous. Arrays are concatenations over ``samples``:

    ``prompt_ids`` int32 [sum P], ``completion_ids`` int32 [sum C], ``logprobs`` float32 [sum C]; ``routed_experts`` as in ``SampleResult``, where
    the samples have them.
    """

    kind: ClassVar[str] = "batch"
    arrays: ClassVar[tuple[str, ...]] = ("prompt_ids", "completion_ids", "logprobs")
    optional_arrays: ClassVar[tuple[str, ...]] = ("routed_experts",)

    step: int
    samples: list[BatchSample]
    replay: bool = False  # the step was committed before: train it again
    publish: bool = True  # its version is for the engines; of a replay, only the last one is


class EndOfData(Message):
    """There is no batch for the step and never will be: the run reached its steps or the data its last epoch."""

    kind: ClassVar[str] = "end_of_data"

    reason: str


class WeightUpdateNeeded(Message):
    """Instead of a batch: some engines hold no valid weights. Publish the current version to them, then ask again."""

    kind: ClassVar[str] = "weight_update_needed"

    tag: VersionTag


class StepCommitted(Message):
    """The optimizer step is done and its version published. ``metrics`` are finite numbers by their metric name."""

    kind: ClassVar[str] = "step_committed"

    step: int
    metrics: dict[str, float]
    checkpoint_step: int = -1  # newest step that a restart of the learner can resume from
    replay_from: int = -1  # oldest step of a checkpoint that is kept: samples of steps up to it are not asked for again


class LearnerDone(Message):
    """The learner has nothing left to do; ``export_dir`` holds the Hugging Face checkpoint."""

    kind: ClassVar[str] = "learner_done"

    export_dir: str
