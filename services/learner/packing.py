"""Samples of a step -> packed micro-batches of every data-parallel rank. Pure, numpy only.

Nothing is padded but the end of a micro-batch, up to ``alignment``. Legend: T = tokens of a micro-batch with that padding,
P = prompt tokens, C = completion tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError


@dataclass(frozen=True, eq=False)
class TrainSample:
    """One completion to train on.

    ``prompt_ids``: int32[P], P >= 1. ``completion_ids``: int32[C]. ``logprobs``: float32[C], the engine's log-prob of each
    completion token. ``advantage``: of the whole completion. ``name``: for messages. ``start_logprobs``, ``reference_logprobs``:
    float32[C], log-probs by the weights at the start of the step and by the start model, where the objective needs them.

    Raises:
        ValueError: an empty prompt, or arrays whose lengths differ.
    """

    prompt_ids: NDArray[np.int32]
    completion_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    advantage: float
    name: str = ""
    start_logprobs: NDArray[np.float32] | None = None
    reference_logprobs: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        if not len(self.prompt_ids):
            raise ValueError(
                "A sample needs at least one prompt token: nothing predicts the first completion token else."
            )
        if len(self.completion_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.completion_ids)} completion tokens but {len(self.logprobs)} log-probs.")

    @property
    def length(self) -> int:
        """Prompt and completion tokens together."""
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One packed micro-batch. Position t holds a token and what is asked of the prediction made *at* it.

    ``tokens``, ``position_ids``, ``labels``: int64[T]; position ids restart at 0 in every sequence; ``labels[t]`` is the next
    token of the same sequence. ``loss_mask``: bool[T], true where the label is a completion token. ``behaviour_logprobs``,
    ``advantages``: float32[T], 0 off the mask. ``cu_seqlens``: int32[num_sequences + 1], starts of the sequences and T; the
    padding, if any, is a last sequence of its own. ``sample_indices``: which samples, in order, without the padding.
    ``slots``, ``start_logprobs``, ``reference_logprobs``: see ``add_columns``.
    """

    tokens: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    behaviour_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    cu_seqlens: NDArray[np.int32]
    sample_indices: tuple[int, ...]
    slots: NDArray[np.int64] | None = None
    start_logprobs: NDArray[np.float32] | None = None
    reference_logprobs: NDArray[np.float32] | None = None


def sequence_cost(length: int, *, hidden_size: int) -> float:
    """Estimated cost of a sequence, in tokens: ``n + n^2 / (12 h)``.

    A layer costs about ``24 n h^2`` flops in its matrices and ``2 n^2 h`` in causal attention (Megatron, Narayanan et al.
    2021, arXiv:2104.04473, appendix, with half of the attention matrix).
    """
    return length + length * length / (12.0 * hidden_size)


def plan_microbatches(
    lengths: Sequence[int], *, max_tokens: int, num_ranks: int, hidden_size: int, alignment: int = 1
) -> list[list[list[int]]]:
    """``plan[rank][micro-batch]`` = indices into ``lengths``. Every rank has the same number of micro-batches.

    First-fit-decreasing finds the smallest number of micro-batches it can; the sequences are then dealt again over that number
    (rounded up to a multiple of ``num_ranks``), longest first, each to the cheapest micro-batch with room, which balances them.
    A micro-batch is empty where there are fewer sequences than micro-batches. The plan is a function of its arguments only.

    Raises:
        ConfigError: a sequence is longer than ``max_tokens``; or ``max_tokens`` is below ``alignment``.
    """
    room = max_tokens - max_tokens % alignment
    too_long = [length for length in lengths if length > room]
    if too_long:
        raise ConfigError(
            f"{len(too_long)} of {len(lengths)} samples are longer than a micro-batch may be: the longest has"
            f" {max(too_long)} tokens, learner.max_tokens_per_microbatch is {max_tokens} (usable: {room})."
            " Raise it, or shorten rollout prompts and completions."
        )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins = _first_fit(order, lengths, room)
    num_bins = -(-max(len(bins), 1) // num_ranks) * num_ranks
    costs = [sequence_cost(length, hidden_size=hidden_size) for length in lengths]
    bins = _deal(order, lengths, costs, num_bins, room) or bins + [[] for _ in range(num_bins - len(bins))]
    return _assign(bins, [sum(costs[i] for i in indices) for indices in bins], num_ranks)


def _first_fit(order: Sequence[int], lengths: Sequence[int], room: int) -> list[list[int]]:
    """First-fit in the given order. Johnson 1973: with decreasing lengths at most 11/9 of the optimum + 1 bins."""
    bins: list[list[int]] = []
    left: list[int] = []
    for i in order:
        where = next((b for b, free in enumerate(left) if free >= lengths[i]), None)
        if where is None:
            bins.append([i])
            left.append(room - lengths[i])
        else:
            bins[where].append(i)
            left[where] -= lengths[i]
    return bins


def _deal(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], num_bins: int, room: int
) -> list[list[int]] | None:
    """Each sequence to the cheapest bin with room for it (Graham 1969, LPT); none if one finds no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    left, load = [room] * num_bins, [0.0] * num_bins
    for i in order:
        fitting = [b for b in range(num_bins) if left[b] >= lengths[i]]
        if not fitting:
            return None
        b = min(fitting, key=lambda b: (load[b], b))
        bins[b].append(i)
        left[b] -= lengths[i]
        load[b] += costs[i]
    return bins


def _assign(bins: list[list[int]], load: Sequence[float], num_ranks: int) -> list[list[list[int]]]:
    """Bins to ranks: the dearest first, each to the cheapest rank that still lacks one."""
    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    per_rank, rank_load = len(bins) // num_ranks, [0.0] * num_ranks
    for b in sorted(range(len(bins)), key=lambda b: (-load[b], b)):
        rank = min((r for r in range(num_ranks) if len(plan[r]) < per_rank), key=lambda r: (rank_load[r], r))
        plan[rank].append(bins[b])
        rank_load[rank] += load[b]
    return plan


def pack(samples: Sequence[TrainSample], indices: Sequence[int], *, alignment: int = 1) -> MicroBatch:
    """The samples at ``indices`` in that order, then padding up to a multiple of ``alignment`` (at least one position)."""
    chosen = [samples[i] for i in indices]
    used = sum(sample.length for sample in chosen)
    total = max(-(-used // alignment), 1) * alignment
    starts = np.cumsum([0] + [sample.length for sample in chosen])
    bounds = starts if total == used else np.append(starts, total)
    batch = MicroBatch(
        tokens=np.zeros(total, np.int64),
        position_ids=np.concatenate([np.arange(n) for n in np.diff(bounds)]).astype(np.int64),
        labels=np.zeros(total, np.int64),
        loss_mask=np.zeros(total, np.bool_),
        behaviour_logprobs=np.zeros(total, np.float32),
        advantages=np.zeros(total, np.float32),
        cu_seqlens=bounds.astype(np.int32),
        sample_indices=tuple(indices),
    )
    for sample, start in zip(chosen, starts, strict=False):
        end = start + sample.length
        predicting = completion_slice(sample, int(start))
        batch.tokens[start : start + len(sample.prompt_ids)] = sample.prompt_ids
        batch.tokens[start + len(sample.prompt_ids) : end] = sample.completion_ids
        batch.labels[start : end - 1] = batch.tokens[start + 1 : end]
        batch.loss_mask[predicting] = True
        batch.behaviour_logprobs[predicting] = sample.logprobs
        batch.advantages[predicting] = sample.advantage
    return batch


def completion_slice(sample: TrainSample, start: int) -> slice:
    """The positions that predict the sample's completion tokens, when its first prompt token is at ``start``."""
    first = start + len(sample.prompt_ids) - 1
    return slice(first, first + len(sample.completion_ids))


def add_columns(batch: MicroBatch, samples: Sequence[TrainSample]) -> MicroBatch:
    """``batch`` with what the loss needs beside the engine's log-probs, each [T] and 0 off the mask.

    ``slots``: int64, which of ``sample_indices`` a loss token is of. ``start_logprobs``, ``reference_logprobs``: float32, or none
    where the samples have none. Relies on this: the loss positions, in order, are the samples' completion tokens, in order.
    """
    chosen = [samples[i] for i in batch.sample_indices]
    slots = np.zeros(len(batch.loss_mask), np.int64)
    slots[batch.loss_mask] = np.repeat(np.arange(len(chosen)), [len(sample.completion_ids) for sample in chosen])
    return dataclasses.replace(
        batch,
        slots=slots,
        start_logprobs=_column(batch, [sample.start_logprobs for sample in chosen]),
        reference_logprobs=_column(batch, [sample.reference_logprobs for sample in chosen]),
    )


def _column(batch: MicroBatch, parts: Sequence[NDArray[np.float32] | None]) -> NDArray[np.float32] | None:
    given = [part for part in parts if part is not None]
    if not given:
        return None
    column = np.zeros(len(batch.loss_mask), np.float32)
    column[batch.loss_mask] = np.concatenate(given)
    return column
