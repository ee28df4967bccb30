"""A packed micro-batch on the model's device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.learner.megatron.attention import PackedSequences
from services.learner.megatron.rotary import Rotary
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
    num_loss_tokens: Tensor
    packed: PackedSequences

    @classmethod
    def of(cls, batch: MicroBatch, rotary: Rotary, dtype: torch.dtype) -> DeviceBatch:
        """Copies the arrays to the device of ``rotary``. ``dtype``: of the activations."""

        def move(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device)

        device = rotary.inv_freq.device
        position_ids = move(batch.position_ids)
        lengths = tuple(np.diff(batch.cu_seqlens).tolist())
        return cls(
            tokens=move(batch.tokens)[None],
            position_ids=position_ids[None],
            labels=move(batch.labels),
            loss_mask=move(batch.loss_mask),
            behaviour_logprobs=move(batch.behaviour_logprobs),
            advantages=move(batch.advantages),
            num_loss_tokens=torch.tensor(int(batch.loss_mask.sum()), dtype=torch.int, device=device),
            packed=PackedSequences.of(move(batch.cu_seqlens), lengths, rotary.cos_sin(position_ids, dtype)),
        )
