"""The optimizer steps of one batch: which samples each one has, what is refused, and their learning rate. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from common.errors import TrainingError
from services.learner.architecture import Architecture
from services.learner.config import OptimizerConfig
from services.learner.packing import TrainSample
from services.learner.routed_experts import routed_experts_problem


def check_samples(samples: Sequence[TrainSample], arch: Architecture, *, step: int) -> None:
    """Numbers that would poison the weights are refused before anything is computed.

    Raises:
        TrainingError: a log-prob or advantage that is not finite, or a token or expert that the model doesn't have; names the samples.
    """
    bad = [
        f"{sample.name or f'sample {i}'} has {what}"
        for i, sample in enumerate(samples)
        if (what := _wrong(sample, arch))
    ]
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise TrainingError(f"Step {step}: {'; '.join(bad[:5])}{more}. Nothing was updated.")


def _wrong(sample: TrainSample, arch: Architecture) -> str:
    if not math.isfinite(sample.advantage):
        return f"the advantage {sample.advantage}"
    if not np.isfinite(sample.logprobs).all():
        where = int(np.flatnonzero(~np.isfinite(sample.logprobs))[0])
        return f"the log-prob {sample.logprobs[where]} at completion token {where}"
    ids = np.concatenate([sample.prompt_ids, sample.completion_ids])
    if ids.min() < 0 or ids.max() >= arch.vocab_size:
        return (
            f"a token outside of the vocabulary of {arch.vocab_size}: {int(ids.min() if ids.min() < 0 else ids.max())}"
        )
    return routed_experts_problem(
        sample.routed_experts,
        len(ids) - 1,
        num_layers=arch.num_layers,
        experts_per_token=arch.experts_per_token,
        num_experts=arch.num_experts,
    )


def check_gap(gap: float, alarm: float | None, *, step: int) -> None:
    """``gap`` and ``alarm`` (none: there is no limit): mean ``|trainer - engine|`` log-prob, nats per token.

    Raises:
        TrainingError: the gap is over the alarm.
    """
    # not <=: a gap that is nan is past any alarm.
    if alarm is not None and not gap <= alarm:
        raise TrainingError(
            f"Step {step}: engine and trainer differ by {gap:.4f} nats per token on average, the alarm is at {alarm}"
            " (learner.logprob_gap_alarm). Nothing was updated. Either the engine holds other weights than the trainer,"
            " or it samples with settings the trainer does not apply."
        )


def plan_updates(
    samples: Sequence[TrainSample], *, minibatches: int, epochs: int, seed: Sequence[int]
) -> list[list[int]]:
    """Indices of the samples of each optimizer step: ``minibatches`` steps an epoch, each sample once an epoch.

    Samples of one prompt that stand together stay together, unless there are fewer prompts than mini-batches. With one
    mini-batch the order is that of ``samples``, else it is drawn anew in each epoch, the same for the same ``seed`` everywhere.
    """
    if minibatches == 1:
        return [list(range(len(samples)))] * epochs
    runs = itertools.groupby(range(len(samples)), key=lambda i: samples[i].prompt_ids.tobytes())
    units = [list(run) for _, run in runs]
    if len(units) < minibatches:
        units = [[i] for i in range(len(samples))]
    updates = []
    for epoch in range(epochs):
        order = np.random.default_rng([*seed, epoch]).permutation(len(units))
        for part in np.array_split(order, min(minibatches, len(units))):
            updates.append(sorted(i for u in part for i in units[u]))
    return updates


def learning_rate(config: OptimizerConfig, optimizer_steps_done: int) -> float:
    """The rate of the next optimizer step: linear from ``lr / warmup_steps`` up to ``lr``, then by ``config.schedule``.

    Counts optimizer steps: not micro-batches, and not steps of the run that had no signal to train on. The cosine is half a
    wave from ``lr`` to ``lr_min`` (Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5, without restarts).

    >>> cosine = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="cosine", decay_steps=6, lr_min=0.5)
    >>> [round(learning_rate(cosine, n), 3) for n in range(9)]
    [0.5, 1.0, 1.0, 0.927, 0.75, 0.573, 0.5, 0.5, 0.5]
    """
    done = optimizer_steps_done
    if done < config.warmup_steps:
        return config.lr * (done + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    share = min(1.0, (done - config.warmup_steps) / (config.decay_steps - config.warmup_steps))
    height = 1.0 - share if config.schedule == "linear" else (1.0 + math.cos(math.pi * share)) / 2.0
    return config.lr_min + (config.lr - config.lr_min) * height
