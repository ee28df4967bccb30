"""Attention of packed segments, some of which go on from a shared prefix: two parts, merged by their log-sum-exp.

    1. every segment attends causally to itself;
    2. the segments behind a shared prefix attend to all of it, without a mask.

A softmax over the union of two key sets is the average of the softmaxes over each, weighted by their normalizers (Milakov and
Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135, section 3.1). The backward of each part is the usual one of
flash attention with the output and the log-sum-exp of the whole: it needs no more than ``P = exp(S - lse)`` and ``sum(dO * O)``.

Kernels: on CPU torch's flash attention, segment by segment; on CUDA with 16-bit types torch's flash attention for variable lengths,
one call for each part; elsewhere plain matrix products.

Legend: T = packed positions, h = heads of this rank, g = key-value heads of this rank, r = h / g, d = head size, m, n = queries
and keys of one call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.learner.megatron.rotary import rotate

# (queries from, to, keys from, to) of one call.
Block = tuple[int, int, int, int]
Parts = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class PrefixRows:
    """Positions of all segments behind shared prefixes, and of all shared prefixes; where each group's part of these begins (int32)."""

    suffixes: Tensor
    prefixes: Tensor
    cu_suffixes: Tensor
    cu_prefixes: Tensor
    longest_suffixes: int
    longest_prefix: int

    @classmethod
    def of(cls, shared: tuple[tuple[int, int, int], ...], device: torch.device) -> PrefixRows:
        """On ``device``, from a micro-batch's plan."""

        def rows(spans: list[tuple[int, int]]) -> tuple[Tensor, Tensor, int]:
            lengths = [end - start for start, end in spans]
            starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
            index = torch.cat([torch.arange(start, end) for start, end in spans])
            return index.to(device), starts.to(device), max(lengths)

        suffixes, cu_suffixes, longest_suffixes = rows([(middle, end) for _, middle, end in shared])
        prefixes, cu_prefixes, longest_prefix = rows([(start, middle) for start, middle, _ in shared])
        return cls(suffixes, prefixes, cu_suffixes, cu_prefixes, longest_suffixes, longest_prefix)


@dataclass(frozen=True)
class Segments:
    """Where the segments of a micro-batch are: as plain ints, and on the device for kernels that read them there.

    ``lengths``: of all segments, in order; they fill the micro-batch. ``shared``: see ``MicroBatch``. ``cu_seqlens``: int32, as there.
    """

    lengths: tuple[int, ...]
    shared: tuple[tuple[int, int, int], ...]
    cu_seqlens: Tensor
    rows: PrefixRows | None

    @classmethod
    def of(cls, cu_seqlens: Tensor, lengths: tuple[int, ...], shared: tuple[tuple[int, int, int], ...]) -> Segments:
        """From a micro-batch's plan; what else it needs goes to the device of ``cu_seqlens``."""
        on_gpu = cu_seqlens.is_cuda and bool(shared)
        return cls(lengths, shared, cu_seqlens, PrefixRows.of(shared, cu_seqlens.device) if on_gpu else None)

    @property
    def own_blocks(self) -> list[Block]:
        """Each segment with itself."""
        ends = list(itertools.accumulate(self.lengths))
        return [(end - n, end, end - n, end) for end, n in zip(ends, self.lengths, strict=True)]

    @property
    def prefix_blocks(self) -> list[Block]:
        """The segments of each group with their prefix."""
        return [(middle, end, start, middle) for start, middle, end in self.shared]


class SegmentAttention(torch.autograd.Function):
    """``apply(query_Thd, key_Tgd, value_Tgd, cos, sin, segments, scale)`` -> [T, h, d]. Rotates queries and keys first."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, segments: Segments, scale: float
    ) -> Tensor:
        query, key = rotate(query, (cos, sin)), rotate(key, (cos, sin))
        kernel = _kernel(query)
        out, lse = kernel.forward(query, key, value, segments, scale)
        ctx.save_for_backward(query, key, value, out, lse, cos, sin)
        ctx.segments, ctx.scale, ctx.kernel = segments, scale, kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, out, lse, cos, sin = ctx.saved_tensors
        dq, dk, dv = ctx.kernel.backward(grad.contiguous(), query, key, value, out, lse, ctx.segments, ctx.scale)
        # The transpose of a rotation is the rotation back.
        return rotate(dq, (cos, -sin)), rotate(dk, (cos, -sin)), dv, None, None, None, None


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two key sets: outputs [m, h, d], log-sum-exps [h, m]."""
    whole = torch.logaddexp(lse, other_lse)
    weight, other_weight = ((part - whole).exp().T[..., None] for part in (lse, other_lse))
    return (out * weight + other * other_weight).to(out.dtype), whole


class BlockKernel:
    """One call for each block: ``[g, r, m, d]`` queries and ``[g, 1, n, d]`` keys, which are not copied for their r heads."""

    def __init__(self, forward: Callable[..., tuple[Tensor, Tensor]], backward: Callable[..., Parts]) -> None:
        self._forward, self._backward = forward, backward

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """(output [T, h, d], log-sum-exp [h, T])."""
        out = torch.empty_like(query)
        lse = query.new_empty((query.shape[1], query.shape[0]), dtype=_wide(query.dtype))
        for block in segments.own_blocks:
            part, part_lse = self._one(query, key, value, block, scale, causal=True)
            out[block[0] : block[1]], lse[:, block[0] : block[1]] = part, part_lse
        for block in segments.prefix_blocks:
            rows = slice(block[0], block[1])
            part, part_lse = self._one(query, key, value, block, scale, causal=False)
            out[rows], lse[:, rows] = merge(out[rows], lse[:, rows], part, part_lse)
        return out, lse

    def _one(
        self, query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        q, k, v = self._views(query, key, value, block)
        out, lse = self._forward(q, k, v, causal, scale)
        return out.permute(2, 0, 1, 3).flatten(1, 2), lse.flatten(0, 1)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        scale: float,
    ) -> Parts:
        """Gradients of query, key and value. ``out`` and ``lse`` are those of both parts together."""
        dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        num_groups = key.shape[1]
        for causal, blocks in ((True, segments.own_blocks), (False, segments.prefix_blocks)):
            for block in blocks:
                q0, q1, k0, k1 = block
                q, k, v = self._views(query, key, value, block)
                g, o = (x[q0:q1].unflatten(1, (num_groups, -1)).permute(1, 2, 0, 3) for x in (grad, out))
                part_lse = lse[:, q0:q1].unflatten(0, (num_groups, -1))
                got = self._backward(g, q, k, v, o, part_lse, causal, scale)
                part_q = got[0].permute(2, 0, 1, 3).flatten(1, 2)
                part_k, part_v = (x.sum(1).transpose(0, 1) for x in got[1:])
                if causal:  # these blocks cover everything once
                    dq[q0:q1], dk[k0:k1], dv[k0:k1] = part_q, part_k, part_v
                else:
                    dq[q0:q1] += part_q
                    dk[k0:k1] += part_k
                    dv[k0:k1] += part_v
        return dq, dk, dv

    @staticmethod
    def _views(query: Tensor, key: Tensor, value: Tensor, block: Block) -> Parts:
        q0, q1, k0, k1 = block
        num_groups = key.shape[1]
        q = query[q0:q1].unflatten(1, (num_groups, -1)).permute(1, 2, 0, 3)
        k, v = (x[k0:k1].transpose(0, 1)[:, None].expand(-1, q.shape[1], -1, -1) for x in (key, value))
        return q, k, v


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Parts:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = kernel(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
    return dq, dk, dv


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v.to(scores.dtype)).to(q.dtype), lse


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Parts:
    """Dao et al. 2022, arXiv:2205.14135, appendix B.2, without the tiles."""
    scores = _scores(q, k, causal, scale)
    wide = scores.dtype
    probs = (scores - lse[..., None]).exp()
    grad, out = grad.to(wide), out.to(wide)
    dscores = probs * (grad @ v.mT.to(wide) - (grad * out).sum(-1, keepdim=True)) * scale
    dq, dk, dv = dscores @ k.to(wide), dscores.mT @ q.to(wide), probs.mT @ grad
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    wide = _wide(q.dtype)
    scores = q.to(wide) @ k.mT.to(wide) * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


class VarlenKernel:
    """torch's flash attention for variable lengths: one call for all segments, one for all segments behind prefixes."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """(output [T, h, d], log-sum-exp [h, T])."""
        longest, cu, rows = max(segments.lengths), segments.cu_seqlens, segments.rows
        out, lse = self._call(query, key, value, cu, cu, longest, longest, scale, causal=True)
        if rows is None:
            return out, lse
        part, part_lse = self._call(
            query[rows.suffixes],
            key[rows.prefixes],
            value[rows.prefixes],
            rows.cu_suffixes,
            rows.cu_prefixes,
            rows.longest_suffixes,
            rows.longest_prefix,
            scale,
            causal=False,
        )
        out[rows.suffixes], lse[:, rows.suffixes] = merge(out[rows.suffixes], lse[:, rows.suffixes], part, part_lse)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        scale: float,
    ) -> Parts:
        """Gradients of query, key and value. ``out`` and ``lse`` are those of both parts together."""
        longest, cu, rows = max(segments.lengths), segments.cu_seqlens, segments.rows
        dq, dk, dv = self._back(grad, query, key, value, out, lse, cu, cu, longest, longest, scale, causal=True)
        if rows is None:
            return dq, dk, dv
        part_q, part_k, part_v = self._back(
            grad[rows.suffixes],
            query[rows.suffixes],
            key[rows.prefixes],
            value[rows.prefixes],
            out[rows.suffixes],
            lse[:, rows.suffixes].contiguous(),
            rows.cu_suffixes,
            rows.cu_prefixes,
            rows.longest_suffixes,
            rows.longest_prefix,
            scale,
            causal=False,
        )
        # The positions are distinct: indexing reads, adds and writes each once.
        dq[rows.suffixes] += part_q
        dk[rows.prefixes] += part_k
        dv[rows.prefixes] += part_v
        return dq, dk, dv

    @staticmethod
    def _call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        scale: float,
        *,
        causal: bool,
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, return_debug_mask=False, scale=scale
        )
        return out, lse

    @staticmethod
    def _back(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        scale: float,
        *,
        causal: bool,
    ) -> Parts:
        # The random state is that of the dropout, which is 0.
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, 0.0, causal, state, unused, scale=scale
        )
        return dq, dk, dv


CPU_KERNEL = BlockKernel(_cpu_forward, _cpu_backward)
PLAIN_KERNEL = BlockKernel(_plain_forward, _plain_backward)
VARLEN_KERNEL = VarlenKernel()


def _kernel(query: Tensor) -> BlockKernel | VarlenKernel:
    if query.device.type == "cpu":
        return CPU_KERNEL
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256:
        return VARLEN_KERNEL
    return PLAIN_KERNEL
