"""A batch message -> samples with advantages: shaping of rewards, advantages, what is left out. Pure.

    rewards - overlong penalty - KL to the reference --by group--> advantages --> without groups that have no signal,
                                                                                 without truncated ones (overlong_filter)

What is left out is out of the loss denominator too. A completion that is left out for its length still counts as a reward of its
group: it steers the others' advantages by that, and by nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import TrainingError
from protocol.messages import Batch
from services.learner.advantages import batch_advantages
from services.learner.config import ObjectiveConfig
from services.learner.packing import TrainSample

Logprobs = list[NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """``samples`` to train on, in the batch's order, and the metrics of how they came about."""

    samples: list[TrainSample]
    metrics: dict[str, float]


def make_train_batch(
    batch: Batch,
    arrays: dict[str, Any],
    objective: ObjectiveConfig,
    *,
    max_completion_tokens: int = 0,
    reference_logprobs: Callable[[Sequence[TrainSample]], Logprobs] | None = None,
) -> TrainBatch:
    """See the module. ``arrays`` as in ``messages.Batch``; a group's samples are contiguous.

    ``max_completion_tokens`` is needed with ``objective.overlong_buffer``, ``reference_logprobs`` with a KL in the reward.

    Raises:
        TrainingError: a reward that is not finite, as it came or with its KL; names the sample.
    """
    samples = _samples(batch, arrays)
    rewards = np.asarray([sample.reward for sample in batch.samples], dtype=np.float64)
    _require_finite(rewards, samples, batch.step, "the reward")
    metrics = {}
    if objective.overlong_buffer:
        lengths = np.asarray([sample.num_completion_tokens for sample in batch.samples])
        penalty = objective.overlong_penalty * overlong_penalty(
            lengths, max_tokens=max_completion_tokens, buffer=objective.overlong_buffer
        )
        rewards = rewards + penalty
        metrics["batch/overlong_penalty"] = float(penalty.mean())
    if objective.has_reference and objective.kl_in == "reward":
        assert reference_logprobs is not None
        kl = [
            float(kl_values(sample.logprobs - reference, objective.kl_kind).sum(dtype=np.float64))
            for sample, reference in zip(samples, reference_logprobs(samples), strict=True)
        ]
        _require_finite(np.asarray(kl), samples, batch.step, f"the KL to the start model ({objective.kl_kind})")
        rewards = rewards - objective.kl_coef * np.asarray(kl)
        metrics["batch/kl_reference"] = sum(kl) / max(1, sum(len(sample.completion_ids) for sample in samples))
    return _with_advantages(batch, samples, rewards, objective, metrics)


def _require_finite(values: NDArray[np.float64], samples: Sequence[TrainSample], step: int, what: str) -> None:
    """Before anything is left out: a group with a NaN would else pass for one without signal."""
    if (bad := np.flatnonzero(~np.isfinite(values))).size:
        raise TrainingError(f"Step {step}: {samples[bad[0]].name} has {what} {values[bad[0]]}. Nothing was updated.")


def to_train_samples(batch: Batch, arrays: dict[str, Any], objective: ObjectiveConfig) -> list[TrainSample]:
    """The samples of ``make_train_batch``, for objectives that need nothing else."""
    return make_train_batch(batch, arrays, objective).samples


def overlong_penalty(lengths: NDArray[np.integer], *, max_tokens: int, buffer: int) -> NDArray[np.float64]:
    """0 up to ``max_tokens - buffer`` tokens, from there falling linearly to -1 at ``max_tokens``.

    Soft overlong punishment: DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13.

    >>> overlong_penalty(np.array([50, 80, 90, 100]), max_tokens=100, buffer=20).tolist()
    [0.0, 0.0, -0.5, -1.0]
    """
    return np.clip((max_tokens - buffer - lengths) / buffer, -1.0, 0.0) + 0.0


def kl_values(log_ratio: NDArray[np.floating], kind: str) -> NDArray[np.floating]:
    """``kl.kl_estimate`` in numpy, of ``log p - log q`` for tokens sampled from p: k1 in the reward is RLHF's penalty.

    >>> [kl_values(np.array([np.log(2.0)]), kind).round(3).tolist() for kind in ("k1", "k2", "k3")]
    [[0.693], [0.24], [0.193]]
    """
    return {"k1": log_ratio, "k2": np.square(log_ratio) / 2.0, "k3": np.expm1(-log_ratio) + log_ratio}[kind]


def _samples(batch: Batch, arrays: dict[str, Any]) -> list[TrainSample]:
    prompts = _split(arrays["prompt_ids"], [sample.num_prompt_tokens for sample in batch.samples])
    completions = _split(arrays["completion_ids"], [sample.num_completion_tokens for sample in batch.samples])
    logprobs = _split(arrays["logprobs"], [sample.num_completion_tokens for sample in batch.samples])
    names = [f"sample {sample.sample_index} of group {sample.group_id}" for sample in batch.samples]
    routed_experts = [None] * len(names)
    if "routed_experts" in arrays:
        routed_experts = _split(
            arrays["routed_experts"], [s.num_prompt_tokens + s.num_completion_tokens - 1 for s in batch.samples]
        )
    return [
        TrainSample(p, c, lp, 0.0, name, routed_experts=r)
        for p, c, lp, name, r in zip(prompts, completions, logprobs, names, routed_experts, strict=True)
    ]


def _with_advantages(
    batch: Batch,
    samples: Sequence[TrainSample],
    rewards: NDArray[np.float64],
    objective: ObjectiveConfig,
    metrics: dict[str, float],
) -> TrainBatch:
    ids = np.asarray([sample.group_id for sample in batch.samples])
    groups = [np.flatnonzero(ids == group_id) for group_id in dict.fromkeys(ids.tolist())]
    # Zero gradient: in the denominator they would only shrink the others'.
    signal = [members for members in groups if np.ptp(rewards[members]) > 0]
    values = batch_advantages(
        [rewards[members] for members in signal], kind=objective.advantage, std_floor=objective.std_floor
    )
    advantages = {
        int(i): float(a)
        for members, part in zip(signal, values, strict=True)
        for i, a in zip(members, part, strict=True)
    }
    trained = [
        i
        for i in advantages
        if not (objective.overlong_filter and batch.samples[i].truncated) and len(samples[i].completion_ids)
    ]
    kept = np.asarray([advantages[i] for i in trained])
    metrics = metrics | {
        "batch/trained_samples": float(len(trained)),
        "batch/no_signal_groups": 1.0 - len(signal) / max(1, len(groups)),
        "batch/overlong_filtered": float(sum(s.truncated for s in batch.samples)) / max(1, len(samples))
        if objective.overlong_filter
        else 0.0,
    }
    if len(kept):
        metrics |= {
            "batch/advantage_mean": float(kept.mean()),
            "batch/advantage_std": float(kept.std()),
            "batch/advantage_max": float(np.abs(kept).max()),
        }
    return TrainBatch([_replace_advantage(samples[i], advantages[i]) for i in trained], metrics)


def _replace_advantage(sample: TrainSample, advantage: float) -> TrainSample:
    return dataclasses.replace(sample, advantage=advantage)


def _split(array: Any, lengths: Sequence[int]) -> list[Any]:
    return np.split(array, np.cumsum(lengths)[:-1])
