"""The training objective: pure functions of log-probs. No Megatron, no state.

Legend: T = tokens of one packed micro-batch. Everything is per token; the division by the number of loss tokens of the
*global* batch happens once, after the sums of all micro-batches and ranks are added, so that the same batch gives the same
gradient under any split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# exp() of more than this is useless as an importance weight and soon not finite; the clip has long cut its gradient.
MAX_LOG_RATIO = 20.0

SUM_NAMES = ("num_loss_tokens", "loss", "num_clipped", "ratio", "gap", "kl", "entropy")
MAX_NAMES = ("ratio", "gap")


@dataclass(frozen=True)
class TokenSums:
    """What one micro-batch adds to the step's statistics; both vectors carry no gradient and are float64.

    ``sums``: one entry per name of ``SUM_NAMES``, to be added over micro-batches and data-parallel ranks.
    ``maxima``: one entry per name of ``MAX_NAMES``, to be reduced by max.
    """

    sums: Tensor
    maxima: Tensor


def clipped_objective(
    logprobs_T: Tensor,
    behaviour_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    entropy_T: Tensor | None = None,
) -> tuple[Tensor, TokenSums]:
    """``sum over loss tokens of -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``, with ``r = exp(logprob - behaviour)``.

    PPO: Schulman et al. 2017, arXiv:1707.06347, equation 7. Asymmetric clip and token-level sum: DAPO, Yu et al. 2025,
    arXiv:2503.14476, sections 3.1 and 3.3. The ratio is relative to the *behaviour* policy, the engine's own
    log-probs of the sampled tokens, so that samples of older versions are weighted correctly.

    Args:
        logprobs_T: the trained policy's log-probs of the tokens, float32, with gradient.
        behaviour_T: the engine's log-probs of the same tokens, float32.
        advantages_T: advantage of each token's sample.
        mask_T: bool, true at loss tokens. The other positions may hold anything finite or not.
        clip_low, clip_high: widths of the clip below and above a ratio of 1.
        entropy_T: the policy's entropy at each position in nats, only summed up for the statistics.

    Returns:
        The sum (not the mean), and the statistics. The gap and KL compare trainer and engine: ``gap`` is
        ``|logprob - behaviour|``, ``kl`` is ``kl_k3`` of behaviour to trainer.
    """
    # where(), not a product: 0 * nan of a padded position would be nan.
    raw_log_ratio_T = torch.where(mask_T, logprobs_T - behaviour_T, 0.0)
    log_ratio_T = raw_log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_T = log_ratio_T.exp()
    gain_T = ratio_T * advantages_T
    clipped_gain_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_T
    loss_sum = -torch.where(mask_T, torch.minimum(gain_T, clipped_gain_T), 0.0).sum()
    with torch.no_grad():
        sums = torch.stack(
            [
                mask_T.sum(dtype=torch.float64),
                loss_sum.double(),
                (mask_T & (clipped_gain_T < gain_T)).sum(dtype=torch.float64),
                torch.where(mask_T, ratio_T, 0.0).sum(dtype=torch.float64),
                raw_log_ratio_T.abs().sum(dtype=torch.float64),
                kl_k3(log_ratio_T).sum(dtype=torch.float64),
                torch.where(mask_T, 0.0 if entropy_T is None else entropy_T, 0.0).sum(dtype=torch.float64),
            ]
        )
        maxima = torch.stack([torch.where(mask_T, ratio_T, 0.0).amax(), raw_log_ratio_T.abs().amax()]).double()
    return loss_sum, TokenSums(sums, maxima)


def kl_k3(log_ratio_T: Tensor) -> Tensor:
    """``r - 1 - log r`` per token: for tokens sampled from q and ``r = p / q``, an unbiased, never negative KL(q || p).

    Schulman 2020, Approximating KL Divergence, http://joschu.net/blog/kl-approx.html.
    """
    return log_ratio_T.exp() - 1.0 - log_ratio_T
