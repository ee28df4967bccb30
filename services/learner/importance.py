"""Importance weights of sampled tokens: how far the policy that trains is from the one that sampled. Pure, and always without
gradient: a weight corrects *which* tokens were drawn, and is no part of what is maximized.

Legend: T = tokens of one packed micro-batch; S = its sequences; ``slots_T`` says which sequence a token is of.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.learner.config import ObjectiveConfig
from services.learner.kl import MAX_LOG_RATIO


@dataclass(frozen=True)
class Sequences:
    """Which loss tokens belong together. ``mask_T``: bool, true at loss tokens. ``slots_T``: int64, their sequence, 0 off the mask.

    ``lengths_S``: float, loss tokens of each sequence, in the dtype that sums over sequences get.
    """

    mask_T: Tensor
    slots_T: Tensor
    lengths_S: Tensor

    @classmethod
    def of(cls, mask_T: Tensor, slots_T: Tensor, num_sequences: int, dtype: torch.dtype) -> Sequences:
        """Counts the lengths."""
        zeros_S = torch.zeros(num_sequences, dtype=dtype, device=mask_T.device)
        return cls(mask_T, slots_T, zeros_S.index_add(0, slots_T, mask_T.to(dtype)))

    def sum_S(self, values_T: Tensor) -> Tensor:
        """Sums over the loss tokens of each sequence, differentiable. Off the mask ``values_T`` must be 0.

        >>> mask = torch.tensor([True, True, False, True])
        >>> Sequences.of(mask, torch.tensor([0, 0, 0, 1]), 2, torch.float32).sum_S(torch.tensor([1.0, 2.0, 0.0, 5.0])).tolist()
        [3.0, 5.0]
        """
        return torch.zeros_like(self.lengths_S).index_add(0, self.slots_T, values_T.to(self.lengths_S.dtype))

    def mean_T(self, values_T: Tensor) -> Tensor:
        """Each token gets the mean over its sequence; 0 off the mask. As ``sum_S`` otherwise."""
        mean_S = self.sum_S(values_T) / self.lengths_S.clamp(min=1.0)
        return self.spread_T(mean_S)

    def spread_T(self, values_S: Tensor) -> Tensor:
        """Each loss token gets the value of its sequence; 0 off the mask."""
        return torch.where(self.mask_T, values_S.index_select(0, self.slots_T), 0.0)


@torch.no_grad()
def importance_weights(log_ratio_T: Tensor, sequences: Sequences, config: ObjectiveConfig) -> Tensor:
    """The weight of each token: ``w = p / q`` of trained over behaviour policy, of the token or of its whole sequence, then

        full        w
        truncate    min(w, importance_max)                               TIS
        mask        w where importance_min <= w <= importance_max, else 0    MIS

    TIS: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training; Ionides 2008 for truncation as
    such. MIS and the sequence level: Liu et al. 2025, When Speed Kills Stability. At sequence level ``w`` is the product over
    the sequence's tokens: exact for whole sequences, and of a variance that grows with their length.

    Two sequences with ratios (2, 4) and (0.5,), truncated at 3:

    >>> ratios = torch.tensor([2.0, 4.0, 0.5])
    >>> two = Sequences.of(torch.ones(3, dtype=torch.bool), torch.tensor([0, 0, 1]), 2, torch.float32)
    >>> by_token = ObjectiveConfig(decoupled=True, importance="truncate", importance_max=3.0)
    >>> importance_weights(ratios.log(), two, by_token).round(decimals=4).tolist()
    [2.0, 3.0, 0.5]
    >>> by_sequence = ObjectiveConfig(decoupled=True, importance="mask", importance_level="sequence", importance_max=3.0)
    >>> importance_weights(ratios.log(), two, by_sequence).round(decimals=4).tolist()
    [0.0, 0.0, 0.5]

    Args:
        log_ratio_T: ``log p - log q``, 0 off the mask.

    Returns:
        Weights of the same shape, without gradient; anything finite off the mask.
    """
    if config.importance_level == "sequence":
        log_ratio_T = sequences.spread_T(sequences.sum_S(log_ratio_T))
    weights_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if config.importance == "truncate":
        return weights_T.clamp(max=config.importance_max)
    if config.importance == "mask":
        kept_T = (weights_T >= config.importance_min) & (weights_T <= config.importance_max)
        return torch.where(kept_T, weights_T, 0.0)
    return weights_T
