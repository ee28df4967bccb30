"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) by explicit position.

The GPTModel is built with ``position_embedding_type="none"``, so Megatron rotates nothing. ``Rotary.cos_sin`` is computed once
per micro-batch from its ``position_ids``, travels in ``PackedSequences.cos_sin``, and the core attention, ours or Transformer
Engine's, calls ``rotate`` on queries and keys before anything else. Positions may be any integers: they restart at each packed
sequence, and the suffixes of a shared prefix go on from the prefix's length. Queries and keys reach the core attention with
all tokens of the micro-batch, also under sequence parallelism, and every pipeline stage and virtual chunk gets the same
``PackedSequences``, so nothing depends on the layout.

Frequencies, cosines and sines are computed in float32 by transformers' operations in their order: bit for bit its own, and
vLLM's (seen to 30,000 positions) but for rounding in ``llama3`` with unusual parameters.

Legend: T = packed tokens, h = heads of this rank, d = head size (all of it is rotated).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from services.learner.architecture import Architecture, Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Angle per position of each pair of dimensions, in radians: float32[head_dim / 2], on the CPU.

    >>> inverse_frequencies(Rope(kind="linear", theta=100.0, factor=2.0), 4).tolist()
    [0.5, 0.05000000074505806]
    """
    powers = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    periods = rope.theta**powers
    if rope.kind == "yarn":
        return _yarn(periods, rope)
    plain = 1.0 / periods
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    return plain / rope.factor if rope.kind == "linear" else plain


def _llama3(plain: Tensor, rope: Rope) -> Tensor:
    """Llama 3.1 (Grattafiori et al. 2024, arXiv:2407.21783, section 3.4.2; the formula is in its reference code).

    Waves that turn less than ``low_freq_factor`` times within the original context are slowed by ``factor``; those that
    turn more than ``high_freq_factor`` times are kept; between them the two are mixed linearly in the number of turns.
    """
    turns = rope.original_max_positions / (2 * math.pi / plain)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - kept) * plain / rope.factor + kept * plain


def _yarn(periods: Tensor, rope: Rope) -> Tensor:
    """YaRN, Peng et al. 2023, arXiv:2309.00071, section 3.2 (NTK by parts), with the ramp over the *index* of the pair.

    So do transformers and vLLM; the paper has it over the number of turns. ``rope.attention_factor`` is applied to
    cosine and sine.
    """
    dims = 2 * len(periods)

    def index_of(turns: float) -> float:
        return dims * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    width = high - low or 0.001
    kept = 1 - ((torch.arange(len(periods), dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of one model on one device."""

    inv_freq: Tensor  # float32[d / 2]
    attention_factor: float

    @classmethod
    def of(cls, arch: Architecture, device: torch.device) -> Rotary:
        """That of the model's config."""
        return cls(inverse_frequencies(arch.rope, arch.head_dim).to(device), arch.rope.attention_factor)

    @torch.no_grad()
    def cos_sin(self, position_ids_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cosine, sine) of the angles at these positions, both [T, 1, d / 2], for ``rotate``.

        Computed in float32 and rounded to ``dtype`` at the end, as transformers does.
        """
        angles = position_ids_T.float()[:, None] * self.inv_freq
        factor = self.attention_factor
        return (angles.cos() * factor).to(dtype)[:, None], (angles.sin() * factor).to(dtype)[:, None]


def rotate(x_Thd: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Turns dimension i and i + d/2 of each head by the token's angle i. Same shape; differentiable in ``x_Thd``.

    A head of two dimensions at an angle with cosine 0 and sine 1 goes from (1, 0) to (0, 1):

    >>> rotate(torch.tensor([[[1.0, 0.0]]]), (torch.zeros(1, 1, 1), torch.ones(1, 1, 1))).tolist()
    [[[0.0, 1.0]]]
    """
    cos, sin = cos_sin
    first, second = x_Thd.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
