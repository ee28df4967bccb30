"""What is maximized per token, as a loss. Pure; one formula and one citation each.

Legend: T = tokens of one packed micro-batch; A = advantage; r = ratio of the trained policy to its anchor, which is the behaviour
policy, or with ``decoupled`` the policy at the start of the step. All take r's logarithm and are 0 off the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.learner.importance import Sequences


def clipped(
    log_ratio_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``: once r has gone further than the clip, it gains nothing.

    PPO: Schulman et al. 2017, arXiv:1707.06347, equation 7. Two widths ("clip higher"): DAPO, Yu et al. 2025,
    arXiv:2503.14476, section 3.1.

    A good token at r = 1.5 is cut at 1.28; a bad one is not:

    >>> clipped(torch.tensor([1.5, 1.5]).log(), torch.tensor([2.0, -2.0]), clip_low=0.2, clip_high=0.28)[0].tolist()
    [-2.559999942779541, 3.0]

    Returns:
        The loss; and bool[T] each, where the lower and where the upper clip has cut the gradient.
    """
    ratio_T = log_ratio_T.exp()
    gain_T = ratio_T * advantages_T
    clipped_gain_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_T
    cut_T = clipped_gain_T < gain_T
    return -torch.minimum(gain_T, clipped_gain_T), cut_T & (ratio_T < 1.0), cut_T & (ratio_T > 1.0)


def gspo(
    log_ratio_T: Tensor, advantages_T: Tensor, sequences: Sequences, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``clipped`` with one ratio a sequence, ``s = exp(mean over its tokens of log r)``, at each of its tokens.

    GSPO: Zheng et al. 2025, arXiv:2507.18071, equations 5 and 7; with aggregation by sequence it is exactly that. The clip is
    of another size there (3e-4, 4e-4 in section 5.1), since s strays less than r. Its per-token variant has the same value
    and gradient as long as all tokens of a sequence share one advantage, as they do here, so there is none.

    Ratios 2 and 1/2 cancel, so nothing is cut:

    >>> pair = Sequences.of(torch.ones(2, dtype=torch.bool), torch.tensor([0, 0]), 1, torch.float32)
    >>> gspo(torch.tensor([2.0, 0.5]).log(), torch.ones(2), pair, clip_low=0.2, clip_high=0.28)[0].tolist()
    [-1.0, -1.0]

    Returns:
        As ``clipped``.
    """
    return clipped(sequences.mean_T(log_ratio_T), advantages_T, clip_low=clip_low, clip_high=clip_high)


def cispo(
    log_ratio_T: Tensor, logprobs_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``-detach(clip(r, 1 - clip_low, 1 + clip_high)) A logp``: the weight is clipped, and no token loses its gradient.

    CISPO: MiniMax 2025, MiniMax-M1, arXiv:2506.13585, equations 4 and 5, where only the upper side is clipped: clip_low = 1.

    >>> logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    >>> loss, low, high = cispo(
    ...     torch.tensor([4.0, 0.5]).log(), logprobs, torch.tensor([1.0, 1.0]), clip_low=1.0, clip_high=2.0)
    >>> loss.tolist(), torch.autograd.grad(loss.sum(), logprobs)[0].tolist(), high.tolist()
    ([3.0, 0.5], [-3.0, -0.5], [True, False])

    Returns:
        The loss; and bool[T] each, where the lower and where the upper clip has changed the weight.
    """
    ratio_T = log_ratio_T.detach().exp()
    weight_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight_T * advantages_T * logprobs_T, ratio_T < 1.0 - clip_low, ratio_T > 1.0 + clip_high
