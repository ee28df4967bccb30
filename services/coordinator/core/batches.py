"""Groups -> the batch message and its metrics; and which batches can be handed out again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

import numpy as np

from common.errors import InvariantError
from protocol.codec import Array
from protocol.messages import Batch, BatchSample
from protocol.versions import staleness
from services.coordinator.core.groups import Group

_ARRAYS = ("prompt_ids", "completion_ids", "logprobs")


def make_batch(
    step: int, groups: Sequence[Group], *, replay: bool, publish: bool = True
) -> tuple[Batch, dict[str, Array]]:
    """The batch of ``step`` with its concatenated arrays; only judged samples take part."""
    chosen = [(group, sample) for group in groups for sample in group.judged()]
    samples = [
        BatchSample(
            group_id=group.group_id,
            sample_index=sample.sample_index,
            reward=sample.result.reward or 0.0,
            segments=sample.segments,
            num_prompt_tokens=int(sample.arrays["prompt_ids"].size),
            num_completion_tokens=sample.num_tokens,
            truncated=sample.finish_reason == "length",
        )
        for group, sample in chosen
        if sample.result is not None
    ]
    names = [*_ARRAYS, *(["routed_experts"] if chosen and "routed_experts" in chosen[0][1].arrays else [])]
    arrays = {name: np.concatenate([sample.arrays[name] for _, sample in chosen]) for name in names}
    return Batch(step=step, samples=samples, replay=replay, publish=publish), arrays


def batch_ages(groups: Sequence[Group], version: int, *, max_staleness: int) -> Counter[int]:
    """How many samples of a batch that is trained at ``version`` are how many versions old.

    Raises:
        InvariantError: one is older than ``max_staleness``; admission (``admission.py``) makes that impossible.
    """
    ages: Counter[int] = Counter()
    for group in groups:
        for sample in group.judged():
            age = staleness(sample.segments, version)
            if age > max_staleness:
                raise InvariantError(
                    f"Group {group.group_id} sample {sample.sample_index} would be trained {age} versions late; "
                    f"the cap is {max_staleness}. Segments: {sample.segments}."
                )
            ages[age] += 1
    return ages


def batch_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """What a step is made of: rewards, share of groups without signal, lengths (tokens), staleness (versions)."""
    judged = [group.judged() for group in groups]
    rewards = [[s.result.reward or 0.0 for s in group if s.result is not None] for group in judged]
    samples = [sample for group in judged for sample in group]
    ages = [staleness(sample.segments, version) for sample in samples]
    return {
        "reward/mean": fmean([reward for group in rewards for reward in group]),
        "reward/no_signal_groups": fmean([len(set(group)) == 1 for group in rewards]),
        "completion/tokens_mean": fmean([sample.num_tokens for sample in samples]),
        "completion/truncated": fmean([sample.finish_reason == "length" for sample in samples]),
        "completion/mixed_versions": fmean([len(sample.segments) > 1 for sample in samples]),
        "staleness/mean": fmean(ages),
        "staleness/max": float(max(ages)),
        "batch/samples": float(len(samples)),
    }


class Retention:
    """Which samples the journal still keeps: those of live groups, and those that a learner that resumes would ask for again.

    ``record(kind, *values)`` is for the journal; the other arguments are what it has brought back.
    """

    def __init__(
        self, record: Callable[..., None], kept_steps: deque[tuple[int, int]], forgotten_before: int, *, at_once: int
    ) -> None:
        self._record = record
        self._steps = kept_steps  # (step, its oldest group)
        self._forgotten_before = forgotten_before  # group id
        self._at_once = at_once  # groups

    def add(self, step: int, oldest_group: int) -> None:
        """The batch of ``step`` is fixed."""
        self._steps.append((step, oldest_group))

    def forget(self, last_step: int, *, live: Iterable[int], next_group_id: int) -> None:
        """Nobody will ask for the steps up to ``last_step`` again; ``live`` are the ids of groups that are not trained."""
        while self._steps and self._steps[0][0] <= last_step:
            self._steps.popleft()
        oldest = min([first for _, first in self._steps] + list(live), default=next_group_id)
        # A learner saves once in many steps. What it needs no more then goes a little with each commit, not all in one long transaction.
        oldest = min(oldest, self._forgotten_before + self._at_once)
        if oldest > self._forgotten_before:
            self._record("forget_samples", oldest)
            self._record("forget_results", oldest)
            self._record("meta", "forgotten_before", str(oldest))
            self._forgotten_before = oldest

    @property
    def first_step(self) -> int | None:
        """The oldest step whose batch can be handed out again; None: there is none."""
        return self._steps[0][0] if self._steps else None
