"""What each micro-batch adds to a step's statistics, and the statistics made of all of it.

Everything here is a sum, or a maximum, over loss tokens, so that micro-batches and ranks can be put together in any order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from services.learner.config import ObjectiveConfig
from services.learner.kl import MAX_LOG_RATIO, k3

# The logarithms of ratios are counted in bins of this width up to this far from 0, for quantiles.
BIN_WIDTH, BIN_RANGE = 0.01, 2.0
NUM_BINS = 2 * round(BIN_RANGE / BIN_WIDTH) + 2

SUM_NAMES = (
    "num_loss_tokens",
    "denominator",
    "loss",
    "clipped_low",
    "clipped_high",
    "ratio",
    "ratio_squared",
    "gap",
    "kl_k1",
    "kl_k3",
    "kl_reference",
    "entropy",
    "weight",
    "masked",
    "truncated",
)
MAX_NAMES = ("ratio", "inverse_ratio", "gap")


@dataclass(frozen=True)
class TokenSums:
    """What one micro-batch adds; the vectors carry no gradient and are float64.

    ``sums``: one entry per name of ``SUM_NAMES``, then the histogram of log ratios; added over micro-batches and data-parallel ranks.
    ``maxima``: one entry per name of ``MAX_NAMES``, reduced by max; 0 or more.
    """

    sums: Tensor
    maxima: Tensor


@torch.no_grad()
def token_sums(
    *,
    loss: Tensor,
    denominator: Tensor,
    log_ratio_T: Tensor,
    start_log_ratio_T: Tensor,
    weights_T: Tensor,
    entropy_T: Tensor,
    kl_T: Tensor | None,
    low_T: Tensor,
    high_T: Tensor,
    mask_T: Tensor,
    config: ObjectiveConfig,
) -> TokenSums:
    """See ``policy_loss``. ``log_ratio_T`` is of the trained policy, ``start_log_ratio_T`` of that at the start of the step, to the
    behaviour policy; both are 0 off the mask."""
    bounded_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_T = torch.where(mask_T, bounded_T.exp(), 0.0)
    inverse_T = torch.where(mask_T, (-bounded_T).exp(), 0.0)
    weighs = config.importance != "none"
    masked_T = mask_T & (weights_T == 0.0) & weighs
    truncated_T = mask_T & (weights_T >= config.importance_max) & (config.importance == "truncate")
    by_name = {
        "num_loss_tokens": mask_T.sum(),
        "denominator": denominator,
        "loss": loss,
        "clipped_low": low_T.sum(),
        "clipped_high": high_T.sum(),
        "ratio": ratio_T.double().sum(),
        "ratio_squared": ratio_T.double().square().sum(),
        "gap": start_log_ratio_T.abs().double().sum(),
        "kl_k1": -start_log_ratio_T.double().sum(),
        "kl_k3": k3(-start_log_ratio_T).double().sum(),
        "kl_reference": loss.new_zeros(()) if kl_T is None else torch.where(mask_T, kl_T, 0.0).double().sum(),
        "entropy": entropy_T.double().sum(),
        "weight": torch.where(mask_T, weights_T, 0.0).double().sum(),
        "masked": masked_T.sum(),
        "truncated": truncated_T.sum(),
    }
    sums = torch.stack([by_name[name].double() for name in SUM_NAMES])
    maxima = torch.stack([ratio_T.amax(), inverse_T.amax(), start_log_ratio_T.abs().amax()]).double()
    return TokenSums(torch.cat([sums, histogram(bounded_T, mask_T)]), maxima)


def histogram(log_ratio_T: Tensor, mask_T: Tensor) -> Tensor:
    """float64[NUM_BINS]: loss tokens by log ratio; the first and last bin hold what is further than ``BIN_RANGE`` from 0."""
    bins_T = (torch.floor((log_ratio_T + BIN_RANGE) / BIN_WIDTH) + 1).nan_to_num().clamp(0, NUM_BINS - 1).long()
    return torch.zeros(NUM_BINS, dtype=torch.float64, device=mask_T.device).index_add(0, bins_T, mask_T.double())


def quantile(counts: list[float], share: float) -> float:
    """The ratio below which ``share`` of the tokens lie: the middle of its bin, so within ``BIN_WIDTH / 2`` of the logarithm.

    >>> counts = [0.0] * NUM_BINS
    >>> counts[NUM_BINS // 2] = 10.0  # log ratios in [0, 0.01)
    >>> round(quantile(counts, 0.5), 3)
    1.005
    """
    wanted, seen = share * sum(counts), 0.0
    for index, count in enumerate(counts):
        seen += count
        if count and seen >= wanted:
            return math.exp((index - 0.5) * BIN_WIDTH - BIN_RANGE)
    return math.nan


@dataclass(frozen=True)
class Totals:
    """What all micro-batches and ranks together have added, by name, and the histogram of log ratios."""

    sums: dict[str, float]
    maxima: dict[str, float]
    counts: list[float]

    @classmethod
    def of(cls, sums: list[float], maxima: list[float]) -> Totals:
        """From the vectors of ``TokenSums``."""
        named = len(SUM_NAMES)
        return cls(
            dict(zip(SUM_NAMES, sums[:named], strict=True)), dict(zip(MAX_NAMES, maxima, strict=True)), sums[named:]
        )

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            {name: value + other.sums[name] for name, value in self.sums.items()},
            {name: max(value, other.maxima[name]) for name, value in self.maxima.items()},
            [a + b for a, b in zip(self.counts, other.counts, strict=True)],
        )

    @property
    def num_loss_tokens(self) -> int:
        """Loss tokens, each as often as it was trained on."""
        return int(self.sums["num_loss_tokens"])

    @property
    def gap(self) -> float:
        """Mean ``|trainer - engine|`` log-prob, nats per token."""
        return self.sums["gap"] / self.sums["num_loss_tokens"]

    def means(self) -> dict[str, float]:
        """Fields of ``StepStats``. There must be a loss token.

        The effective sample size is Kish's, ``(sum w)^2 / sum w^2``, as a share of the tokens: 1 for equal ratios.
        """
        sums, maxima, count = self.sums, self.maxima, self.sums["num_loss_tokens"]
        return {
            "loss": sums["loss"] / sums["denominator"],
            "clip_share": (sums["clipped_low"] + sums["clipped_high"]) / count,
            "clip_low_share": sums["clipped_low"] / count,
            "clip_high_share": sums["clipped_high"] / count,
            "ratio_mean": sums["ratio"] / count,
            "ratio_max": maxima["ratio"],
            "ratio_min": 1.0 / maxima["inverse_ratio"],
            "ratio_p01": quantile(self.counts, 0.01),
            "ratio_p99": quantile(self.counts, 0.99),
            "ess_share": sums["ratio"] ** 2 / (count * sums["ratio_squared"]),
            "weight_mean": sums["weight"] / count,
            "masked_share": sums["masked"] / count,
            "truncated_share": sums["truncated"] / count,
            "logprob_gap_mean": self.gap,
            "logprob_gap_max": maxima["gap"],
            "kl_k1": sums["kl_k1"] / count,
            "kl_k3": sums["kl_k3"] / count,
            "entropy": sums["entropy"] / count,
        }
