"""A packed micro-batch on the model's device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.learner.megatron.attention import PackedSequences
from services.learner.packing import MicroBatch


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
    def of(cls, batch: MicroBatch, device: torch.device) -> DeviceBatch:
        """Copies the arrays to ``device``."""

        def move(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device)

        return cls(
            tokens=move(batch.tokens)[None],
            position_ids=move(batch.position_ids)[None],
            labels=move(batch.labels),
            loss_mask=move(batch.loss_mask),
            behaviour_logprobs=move(batch.behaviour_logprobs),
            advantages=move(batch.advantages),
            packed=PackedSequences.of(move(batch.cu_seqlens), tuple(np.diff(batch.cu_seqlens).tolist())),
            slots=torch.zeros(len(batch.labels), dtype=torch.int64, device=device)
            if batch.slots is None
            else move(batch.slots),
            num_sequences=max(1, len(batch.sample_indices)),
            start_logprobs=None if batch.start_logprobs is None else move(batch.start_logprobs),
            reference_logprobs=None if batch.reference_logprobs is None else move(batch.reference_logprobs),
        )
