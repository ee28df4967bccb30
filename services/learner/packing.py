"""Samples of a step -> packed micro-batches of every data-parallel rank. Pure, numpy only.

    samples --same prompt?--> pieces --first-fit-decreasing, dealt by cost--> micro-batches --dealt by cost--> ranks

Nothing is padded but the end of a micro-batch, up to ``alignment``. A sample takes P - 1 + C positions: its last completion
token predicts nothing. Legend: T = positions of a micro-batch with the padding, L = its completion tokens, P = prompt tokens,
C = completion tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError
from services.learner.routed_experts import Routes, place_routes

# What the second part of a shared piece's attention costs beyond its flops (calls, the merge), in tokens for each suffix: see
# bench/results/learner.md.
SHARING_OVERHEAD = 4.0
# Into how many pieces a group is cut, tried one after the other.
GROUP_CUTS = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True, eq=False)
class TrainSample:
    """One completion to train on.

    ``prompt_ids``: int32[P], P >= 1. ``completion_ids``: int32[C]. ``logprobs``: float32[C], the engine's log-prob of each
    completion token. ``advantage``: of the whole completion. ``name``: for messages. ``start_logprobs``, ``reference_logprobs``:
    float32[C], log-probs by the weights at the start of the step and by the start model, where the objective needs them.
    ``routed_experts``: [P + C - 1, layers, k], the engine's experts, where they are to be replayed; see ``routed_experts``.

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
    routed_experts: Routes | None = None

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

    @property
    def prefix(self) -> int:
        """Positions before the one that predicts the first completion token; none where there is no completion to predict."""
        return len(self.prompt_ids) - 1 if len(self.completion_ids) else 0


@dataclass(frozen=True)
class Piece:
    """Samples that are computed together: one alone, or several with the same prompt, whose prefix is then computed once.

    ``indices``: which samples. ``prefix``: positions of the shared prefix; 0 where a sample is alone.
    """

    indices: tuple[int, ...]
    prefix: int = 0


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One packed micro-batch. Position t of T holds a token; row l of L asks for the log-prob of one completion token.

    ``tokens``, ``position_ids``: int64[T]. A sample alone is one *segment*; several with the same prompt are a segment for the prefix
    (all of the prompt but its last token) and one segment each that begins with the prompt's last token. Position ids count from
    the start of the prompt in all of them. ``cu_seqlens``: int32[num_segments + 1], starts of the segments and T; attention is causal
    within each; padding, if any, is a last segment of its own. ``shared``: (start of a prefix, its end, end of the last segment
    that goes on from it): these segments lie right behind it and attend to all of it, too.

    ``loss_positions``: int64[L], rising, the position that predicts each completion token. ``labels``: int64[L], that token.
    ``loss_mask``: bool[L], whether it counts. ``behaviour_logprobs``, ``advantages``: float32[L]. The rows are the samples of
    ``sample_indices`` in order, each with its completion in order. A micro-batch without any has one row that doesn't count.
    ``slots``, ``start_logprobs``, ``reference_logprobs``: see ``add_columns``. ``routed_experts``: int16[T, layers, k], see ``routed_experts``.
    """

    tokens: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    shared: tuple[tuple[int, int, int], ...]
    loss_positions: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    behaviour_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    sample_indices: tuple[int, ...]
    slots: NDArray[np.int64] | None = None
    start_logprobs: NDArray[np.float32] | None = None
    reference_logprobs: NDArray[np.float32] | None = None
    routed_experts: NDArray[np.int16] | None = None


def sequence_cost(length: int, *, hidden_size: int) -> float:
    """Estimated cost of a sequence, in tokens: ``n + n^2 / (12 h)``.

    A layer costs about ``24 n h^2`` flops in its matrices and ``2 n^2 h`` in causal attention (Megatron, Narayanan et al.
    2021, arXiv:2104.04473, appendix, with half of the attention matrix).
    """
    return length + length * length / (12.0 * hidden_size)


def piece_cost(prefix: int, suffixes: Sequence[int], *, hidden_size: int) -> float:
    """Estimated cost of one prefix and the suffixes that go on from it, in tokens.

    A suffix of s tokens behind p costs what a sequence of p + s does, less one of p: ``s + (s^2 + 2 p s) / (12 h)``. With no
    prefix this is the sum of ``sequence_cost``. Sharing adds ``SHARING_OVERHEAD`` for each suffix.
    """
    whole = sum(sequence_cost(prefix + suffix, hidden_size=hidden_size) for suffix in suffixes)
    if not prefix:
        return whole
    return (
        whole - (len(suffixes) - 1) * sequence_cost(prefix, hidden_size=hidden_size) + SHARING_OVERHEAD * len(suffixes)
    )


def sharing_pays(prefix: int, num_suffixes: int, *, hidden_size: int) -> bool:
    """Whether the prefixes that are saved cost more than the second part of the attention does."""
    return (num_suffixes - 1) * sequence_cost(prefix, hidden_size=hidden_size) > SHARING_OVERHEAD * num_suffixes


def plan_microbatches(
    samples: Sequence[TrainSample],
    *,
    max_tokens: int,
    num_ranks: int,
    hidden_size: int,
    alignment: int = 1,
    share_prefixes: bool = False,
) -> list[list[list[Piece]]]:
    """``plan[rank][micro-batch]`` = its pieces. Every rank has the same number of micro-batches.

    First-fit-decreasing finds the smallest number of micro-batches it can; the pieces are then dealt again over that number
    (rounded up to a multiple of ``num_ranks``), dearest first, each to the cheapest micro-batch with room, which balances them.
    A micro-batch is empty where there are fewer pieces than micro-batches.

    With ``share_prefixes``, samples with the same prompt tokens are put together where that pays. Whole groups save most, and cut
    ones balance better, so several numbers of cuts are tried, also single samples; the plan whose slowest rank is cheapest is
    taken. The plan is a function of its arguments only.

    Raises:
        ConfigError: a sample is longer than ``max_tokens``; or ``max_tokens`` is below ``alignment``.
    """
    room = max_tokens - max_tokens % alignment
    _refuse_too_long([sample.length for sample in samples], max_tokens, room)
    best = _plan(samples, [Piece((i,)) for i in range(len(samples))], room, num_ranks, hidden_size)
    groups = _same_prompts(samples) if share_prefixes else []
    largest = max(map(len, groups), default=0)
    for num_cuts in GROUP_CUTS:
        if num_cuts > largest // 2:  # pieces of one sample share nothing
            break
        plan = _plan(samples, _pieces(samples, groups, num_cuts, room, hidden_size), room, num_ranks, hidden_size)
        best = min(best, plan, key=lambda plan: (plan.slowest, plan.total))
        if plan.total / num_ranks >= best.slowest * 0.98:  # more cuts cost more in all, and little is left to balance
            break
    return best.ranks


@dataclass(frozen=True)
class _Plan:
    """``slowest``, ``total``: estimated cost of the dearest rank and of all, in tokens."""

    ranks: list[list[list[Piece]]]
    slowest: float
    total: float


def _refuse_too_long(lengths: Sequence[int], max_tokens: int, room: int) -> None:
    too_long = [length for length in lengths if length > room]
    if too_long:
        raise ConfigError(
            f"{len(too_long)} of {len(lengths)} samples are longer than a micro-batch may be: the longest has"
            f" {max(too_long)} tokens, learner.max_tokens_per_microbatch is {max_tokens} (usable: {room})."
            " Raise it, or shorten rollout prompts and completions."
        )


def _same_prompts(samples: Sequence[TrainSample]) -> list[list[int]]:
    """Indices of the samples, those with the same prompt tokens (sent to the same experts, if that is told) together, in the order in
    which they first come."""
    groups: dict[bytes | int, list[int]] = {}
    for i, sample in enumerate(samples):
        # A sample without a completion has no positions, and nothing to share.
        experts = b"" if sample.routed_experts is None else sample.routed_experts[: sample.prefix].tobytes()
        key = sample.prompt_ids.tobytes() + experts if len(sample.completion_ids) else i
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _pieces(
    samples: Sequence[TrainSample], groups: Sequence[Sequence[int]], num_cuts: int, room: int, hidden_size: int
) -> list[Piece]:
    """The groups, each in ``num_cuts`` pieces of about equal size, or as many more as the budget asks for."""
    pieces = []
    for group in groups:
        prefix = samples[group[0]].prefix
        order = sorted(group, key=lambda i: (-len(samples[i].completion_ids), i))
        sizes = [len(samples[i].completion_ids) for i in order]
        bins = _first_fit(sizes, room - prefix)
        bins = _deal(sizes, sizes, max(len(bins), min(num_cuts, len(group))), room - prefix) or bins
        for members in bins:
            indices = tuple(sorted(order[j] for j in members))
            if sharing_pays(prefix, len(indices), hidden_size=hidden_size):
                pieces.append(Piece(indices, prefix))
            else:
                pieces.extend(Piece((i,)) for i in indices)
    return pieces


def _plan(
    samples: Sequence[TrainSample], pieces: Sequence[Piece], room: int, num_ranks: int, hidden_size: int
) -> _Plan:
    sizes, costs = [], []
    for piece in pieces:
        own = [len(samples[i].completion_ids) + (0 if piece.prefix else samples[i].prefix) for i in piece.indices]
        sizes.append(piece.prefix + sum(own))
        costs.append(piece_cost(piece.prefix, own, hidden_size=hidden_size))
    order = sorted(range(len(pieces)), key=lambda j: (-sizes[j], j))
    sizes, costs = [sizes[j] for j in order], [costs[j] for j in order]
    bins = _first_fit(sizes, room)
    num_bins = -(-max(len(bins), 1) // num_ranks) * num_ranks
    bins = _deal(sizes, costs, num_bins, room) or bins + [[] for _ in range(num_bins - len(bins))]
    load = [sum(costs[j] for j in members) for members in bins]
    ranks = _assign(load, num_ranks)
    return _Plan(
        ranks=[[[pieces[order[j]] for j in bins[b]] for b in rank] for rank in ranks],
        slowest=max(sum(load[b] for b in rank) for rank in ranks),
        total=sum(load),
    )


def _first_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """First-fit in the given order. Johnson 1973: with decreasing sizes at most 11/9 of the optimum + 1 bins."""
    bins: list[list[int]] = []
    left = np.zeros(len(sizes), np.int64)
    for j, size in enumerate(sizes):
        fits = left[: len(bins)] >= size
        b = int(fits.argmax()) if fits.any() else len(bins)
        if b == len(bins):
            bins.append([])
            left[b] = room
        bins[b].append(j)
        left[b] -= size
    return bins


def _deal(sizes: Sequence[int], costs: Sequence[float], num_bins: int, room: int) -> list[list[int]] | None:
    """Each item, in order, to the cheapest bin with room for it (Graham 1969, LPT); none if one finds no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    left, load = np.full(num_bins, room), np.zeros(num_bins)
    for j, (size, cost) in enumerate(zip(sizes, costs, strict=True)):
        b = int(np.where(left >= size, load, np.inf).argmin())
        if left[b] < size:
            return None
        bins[b].append(j)
        left[b] -= size
        load[b] += cost
    return bins


def _assign(load: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Bins to ranks: the dearest first, each to the cheapest rank that still lacks one."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    per_rank, rank_load = len(load) // num_ranks, [0.0] * num_ranks
    for b in sorted(range(len(load)), key=lambda b: (-load[b], b)):
        rank = min((r for r in range(num_ranks) if len(ranks[r]) < per_rank), key=lambda r: (rank_load[r], r))
        ranks[rank].append(b)
        rank_load[rank] += load[b]
    return ranks


def pack(samples: Sequence[TrainSample], pieces: Sequence[Piece], *, alignment: int = 1) -> MicroBatch:
    """The pieces in that order, then padding up to a multiple of ``alignment`` (at least one position)."""
    segments, firsts, shared = [], [], []  # token ids and first position id of each segment
    loss_positions, indices, at = [], [], 0
    routed_experts: list[Routes | None] = []  # of each segment
    for piece in pieces:
        start = at
        if piece.prefix:
            segments.append(samples[piece.indices[0]].prompt_ids[: piece.prefix])
            firsts.append(0)
            routed_experts.append(_rows_from(samples[piece.indices[0]].routed_experts, 0, piece.prefix))
            at += piece.prefix
        for i in piece.indices:
            sample, skipped = samples[i], piece.prefix
            indices.append(i)
            if not len(sample.completion_ids):
                continue
            segments.append(np.concatenate([sample.prompt_ids[skipped:], sample.completion_ids[:-1]]))
            firsts.append(skipped)
            routed_experts.append(_rows_from(sample.routed_experts, skipped, None))
            at += len(segments[-1])
            loss_positions.append(np.arange(at - len(sample.completion_ids), at))
        if piece.prefix:
            shared.append((start, start + piece.prefix, at))
    total = max(-(-at // alignment), 1) * alignment
    if total > at:
        segments.append(np.zeros(total - at, np.int64))
        firsts.append(0)
        routed_experts.append(None)
    lengths = [len(segment) for segment in segments]
    rows = _rows([samples[i] for i in indices if len(samples[i].completion_ids)])
    return MicroBatch(
        tokens=np.concatenate(segments).astype(np.int64),
        position_ids=np.concatenate([np.arange(f, f + n) for f, n in zip(firsts, lengths, strict=True)]).astype(
            np.int64
        ),
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
        shared=tuple(shared),
        loss_positions=np.concatenate(loss_positions or [np.zeros(1)]).astype(np.int64),
        sample_indices=tuple(indices),
        routed_experts=place_routes(list(zip(lengths, routed_experts, strict=True))),
        **rows,
    )


def _rows_from(routed_experts: Routes | None, start: int, end: int | None) -> Routes | None:
    return None if routed_experts is None else routed_experts[start:end]


def _rows(samples: Sequence[TrainSample]) -> dict[str, NDArray[Any]]:
    """The arrays of L; one row that doesn't count where there is none."""
    if not samples:
        empty = np.zeros(1, np.float32)
        return {
            "labels": np.zeros(1, np.int64),
            "loss_mask": np.zeros(1, np.bool_),
            "behaviour_logprobs": empty,
            "advantages": empty,
        }
    counts = [len(sample.completion_ids) for sample in samples]
    return {
        "labels": np.concatenate([sample.completion_ids for sample in samples]).astype(np.int64),
        "loss_mask": np.ones(sum(counts), np.bool_),
        "behaviour_logprobs": np.concatenate([sample.logprobs for sample in samples]).astype(np.float32),
        "advantages": np.repeat([sample.advantage for sample in samples], counts).astype(np.float32),
    }


def add_columns(batch: MicroBatch, samples: Sequence[TrainSample]) -> MicroBatch:
    """``batch`` with what the loss needs beside the engine's log-probs, each [L] and 0 off the mask.

    ``slots``: int64, which of ``sample_indices`` a loss token is of. ``start_logprobs``, ``reference_logprobs``: float32, or none
    where the samples have none.
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
