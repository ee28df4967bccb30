"""A packed micro-batch on the model's device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from services.learner.megatron.attention import PackedSequences
from services.learner.megatron.context import ContextCut
from services.learner.megatron.rotary import Rotary
from services.learner.megatron.segments import Segments
from services.learner.megatron.vocab import LossRows
from services.learner.packing import MicroBatch, pack
from services.learner.routed_experts import move_routes


@dataclass(frozen=True)
class DeviceBatch:
    """A packed micro-batch as tensors on the model's device; see ``MicroBatch`` for the fields."""

    tokens: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    packed: PackedSequences
    slots: Tensor
    num_sequences: int
    start_logprobs: Tensor | None
    reference_logprobs: Tensor | None

    @classmethod
    def of(
        cls,
        batch: MicroBatch,
        rotary: Rotary,
        dtype: torch.dtype,
        *,
        vocab_size: int,
        temperature: float,
        entropy_gradient: bool,
        context: tuple[int, int] = (0, 1),
        sequence: tuple[int, int] = (0, 1),
    ) -> DeviceBatch:
        """Copies the arrays to the device of ``rotary``. ``dtype``: of the activations. The rest: see ``LossRows``.

        ``context``: this rank of so many that share the positions of an aligned ``batch``; the arrays of rows are whole all the same.
        ``sequence``: the same of the ranks that share the positions outside of attention.
        """
        device = rotary.inv_freq.device

        def move(array: NDArray[Any]) -> Tensor:
            tensor = torch.from_numpy(array)
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

        labels, cut = move(batch.labels), None
        if context[1] > 1:
            cut = ContextCut.of(batch, *context, device)
        mine = slice(None) if cut is None else cut.positions
        position_ids = move(batch.position_ids[mine])
        segments = Segments.of(move(batch.cu_seqlens), tuple(np.diff(batch.cu_seqlens).tolist()), batch.shared)
        loss_positions, loss_labels = move(batch.loss_positions), labels
        if cut is not None:
            loss_positions, loss_labels = cut.row_positions, labels[cut.rows] if len(cut.rows) else labels[:1]
        rows = LossRows(loss_positions, loss_labels, vocab_size, temperature, entropy_gradient, cut)
        routed_experts = (
            None
            if batch.routed_experts is None
            else move(np.array_split(batch.routed_experts[mine], sequence[1])[sequence[0]])
        )
        return cls(
            tokens=move(batch.tokens[mine])[None],
            position_ids=position_ids[None],
            labels=labels,
            loss_mask=move(batch.loss_mask),
            behaviour_logprobs=move(batch.behaviour_logprobs),
            advantages=move(batch.advantages),
            packed=PackedSequences.of(segments, rotary.cos_sin(position_ids, dtype), rows, routed_experts),
            slots=torch.zeros(len(batch.labels), dtype=torch.int64, device=device)
            if batch.slots is None
            else move(batch.slots),
            num_sequences=max(1, len(batch.sample_indices)),
            start_logprobs=None if batch.start_logprobs is None else move(batch.start_logprobs),
            reference_logprobs=None if batch.reference_logprobs is None else move(batch.reference_logprobs),
        )


def even_out(batches: Sequence[MicroBatch], multiple: int, *, alignment: int, device: torch.device) -> list[MicroBatch]:
    """The micro-batches in equal length, their count filled up to a ``multiple`` with such that have no samples.

    The length is that of the longest on any rank: collective over the world. For the interleaved schedule, which wants a multiple
    of the stages, and whose exchange of varying lengths mixes up the two directions between two stages; and for gathers between
    data-parallel ranks. Balanced micro-batches are nearly of one length, so it costs little.
    """
    most = torch.tensor(max(len(batch.tokens) for batch in batches), device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    longest = int(most)
    fillers = [pack([], [], alignment=alignment)] * (-len(batches) % multiple)
    return [pad_to(batch, longest) for batch in [*batches, *fillers]]


def pad_to(batch: MicroBatch, length: int) -> MicroBatch:
    """``batch`` with zeros up to ``length`` positions; they are one more segment."""
    padding = length - len(batch.tokens)
    if not padding:
        return batch
    return dataclasses.replace(
        batch,
        tokens=np.append(batch.tokens, np.zeros(padding, np.int64)),
        position_ids=np.append(batch.position_ids, np.arange(padding)),
        cu_seqlens=np.append(batch.cu_seqlens, length).astype(np.int32),
        routed_experts=move_routes(batch.routed_experts, np.arange(len(batch.tokens)), length),
    )
