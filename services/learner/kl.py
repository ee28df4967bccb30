"""Estimators of KL(p || q) per token, for tokens sampled from p. Pure; each takes ``log p - log q`` of the sampled token.

Schulman 2020, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html. Values, not gradients: what their gradient
estimates once they stand in a loss is another matter (Tang and Munos 2025, arXiv:2506.09477), and says which of them the
config allows there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.learner.config import KlKind

# exp() of more than this is useless as an importance weight and soon not finite; any clip has long cut its gradient.
MAX_LOG_RATIO = 20.0


def k1(log_ratio_T: Tensor) -> Tensor:
    """``log p - log q``: unbiased, of high variance, negative for half of the tokens.

    >>> k1(torch.tensor([0.5, -0.5])).tolist()
    [0.5, -0.5]
    """
    return log_ratio_T


def k2(log_ratio_T: Tensor) -> Tensor:
    """``(log p - log q)^2 / 2``: biased, of low variance; its gradient is unbiased when tokens come from p.

    >>> k2(torch.tensor([2.0, -1.0])).tolist()
    [2.0, 0.5]
    """
    return log_ratio_T.square() / 2.0


def k3(log_ratio_T: Tensor) -> Tensor:
    """``q/p - 1 - log(q/p)``: unbiased and never negative.

    ``q/p = 2``: 2 - 1 - 0.693 = 0.307; ``q/p = 1/2``: 0.5 - 1 + 0.693 = 0.193.

    >>> (k3(torch.tensor([0.5, 2.0]).log()) * 1000).round().tolist()
    [307.0, 193.0]
    """
    inverse_T = (-log_ratio_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(inverse_T) - inverse_T


def kl_estimate(log_ratio_T: Tensor, kind: KlKind) -> Tensor:
    """The estimator that the config names."""
    return {"k1": k1, "k2": k2, "k3": k3}[kind](log_ratio_T)
