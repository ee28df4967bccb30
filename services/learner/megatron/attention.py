"""Attention over packed sequences, which are not padded to a common length.

Legend: T = packed tokens, h = heads of this rank, g = key-value heads of this rank, d = head size.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from services.learner.megatron.mcore import MegatronModule, PackedSeqParams, TransformerConfig
from services.learner.megatron.rotary import rotate


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's parameters of a packed micro-batch, and what our attention needs beside them.

    ``lengths``: of the sequences, as plain ints (no device sync to read them). ``cos_sin``: of the positions, by ``rotary``.
    """

    lengths: tuple[int, ...] = ()
    cos_sin: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, cu_seqlens: Tensor, lengths: tuple[int, ...], cos_sin: tuple[Tensor, Tensor]) -> PackedSequences:
        """From ``cu_seqlens`` int32[num_sequences + 1] on the model's device."""
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            lengths=lengths,
            cos_sin=cos_sin,
        )


class PackedAttention(MegatronModule):
    """Causal attention within each packed sequence: one SDPA call per run of sequences of equal length.

    That is block-diagonal attention in O(sum n_i^2). Measured on CPU at 4,080 tokens in 51 sequences, forward and
    backward take 44 ms sequence by sequence and 975 ms with one dense block-diagonal mask.
    """

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
        """Returns [T, h * d]. The mask is ignored: the packing says which sequence each token is of."""
        assert packed_seq_params.cos_sin is not None
        query_Thd, key_Tgd = (rotate(x, packed_seq_params.cos_sin) for x in (query_Thd, key_Tgd))
        out, start = [], 0
        for length, run in itertools.groupby(packed_seq_params.lengths):
            count = sum(1 for _ in run)
            end = start + count * length
            q, k, v = (
                x[start:end].unflatten(0, (count, length)).transpose(1, 2) for x in (query_Thd, key_Tgd, value_Tgd)
            )
            grouped = q.shape[1] != k.shape[1]
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
            out.append(attended.transpose(1, 2).reshape(count * length, -1))
            start = end
        return torch.cat(out)
