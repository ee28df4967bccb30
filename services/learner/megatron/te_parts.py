"""Layers by Transformer Engine. Imported only where it is installed; tested by ``tests/gpu`` alone."""

from __future__ import annotations

from typing import Any

from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TEDotProductAttention,
    TENorm,
    TERowParallelLinear,
)
from torch import Tensor

from services.learner.megatron.attention import PackedSequences
from services.learner.megatron.rotary import rotate
from services.learner.megatron.spec import Parts


class TEPackedAttention(TEDotProductAttention):  # type: ignore[misc]
    """Transformer Engine's attention over packed sequences (``thd``), with our rotary embedding before it.

    Under context parallelism it passes keys and values around the ring of ranks; see ``context``.
    """

    def forward(
        self,
        query_Thd: Tensor,
        key_Tgd: Tensor,
        value_Tgd: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences,
        **options: Any,
    ) -> Tensor:
        """Returns [T, h * d]."""
        assert packed_seq_params.cos_sin is not None
        query_Thd, key_Tgd = (rotate(x, packed_seq_params.cos_sin) for x in (query_Thd, key_Tgd))
        return super().forward(
            query_Thd, key_Tgd, value_Tgd, attention_mask, packed_seq_params=packed_seq_params, **options
        )


TE_PARTS = Parts(TEColumnParallelLinear, TERowParallelLinear, TENorm, TEPackedAttention)
