"""Attention over packed sequences, which are not padded to a common length; the arithmetic is in ``segments``.

Legend: T = packed tokens, h = heads of this rank, g = key-value heads of this rank, d = head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from services.learner.megatron.context import context_attention
from services.learner.megatron.mcore import MegatronModule, PackedSeqParams, TransformerConfig
from services.learner.megatron.rotary import rotate
from services.learner.megatron.segments import SegmentAttention, Segments
from services.learner.megatron.vocab import LossRows


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's parameters of a packed micro-batch, and what our layers need beside them.

    ``segments``: where attention is causal, and what is shared. ``cos_sin``: of the positions, by ``rotary``. ``rows``: the completion
    tokens whose log-probs the last pipeline stage returns. ``routed_experts``: int16[t, layers, k] of this rank's positions, see ``routing``.
    """

    segments: Segments | None = None
    cos_sin: tuple[Tensor, Tensor] | None = None
    rows: LossRows | None = None
    routed_experts: Tensor | None = None

    @classmethod
    def of(
        cls, segments: Segments, cos_sin: tuple[Tensor, Tensor], rows: LossRows, routed_experts: Tensor | None = None
    ) -> PackedSequences:
        """Transformer Engine's attention reads the inherited fields; ours does not."""
        longest = max(segments.lengths)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=segments.cu_seqlens,
            cu_seqlens_kv=segments.cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            segments=segments,
            cos_sin=cos_sin,
            rows=rows,
            routed_experts=routed_experts,
        )


class PackedAttention(MegatronModule):
    """Causal attention within each packed segment, and of segments behind a shared prefix to that prefix."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.scale = 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query_Thd: Tensor,
        key_Tgd: Tensor,
        value_Tgd: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> Tensor:
        """Returns [T, h * d]. The mask is ignored: the packing says what each token attends to."""
        assert packed_seq_params.segments is not None
        assert packed_seq_params.cos_sin is not None
        assert packed_seq_params.rows is not None
        if (cut := packed_seq_params.rows.cut) is not None:
            query_Thd, key_Tgd = (rotate(x, packed_seq_params.cos_sin) for x in (query_Thd, key_Tgd))
            return context_attention(query_Thd, key_Tgd, value_Tgd, cut, self.scale).flatten(1)
        cos, sin = packed_seq_params.cos_sin
        out = SegmentAttention.apply(query_Thd, key_Tgd, value_Tgd, cos, sin, packed_seq_params.segments, self.scale)
        return out.flatten(1)
