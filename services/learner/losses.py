"""The training loss of one packed micro-batch: the objective, its importance weights, KL, entropy, and how tokens add up. Pure.

    loss = sum over loss tokens of  c * (w * objective(r) + kl_coef * KL - entropy_coef * entropy)      here
           / (loss tokens, or sequences, of the *global* batch)                                         once, by the caller

The division happens after the sums of all micro-batches and ranks are added, so that the same batch gives the same gradient under
any split. Legend: T = tokens of one packed micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.learner.config import ObjectiveConfig
from services.learner.importance import Sequences, importance_weights
from services.learner.kl import MAX_LOG_RATIO, kl_estimate
from services.learner.objectives import cispo, clipped, gspo
from services.learner.token_statistics import TokenSums, token_sums


@dataclass(frozen=True)
class LossInputs:
    """What the loss is made of, each [T]. Off ``mask_T`` the others may hold anything, finite or not.

    ``logprobs_T``: the trained policy's log-probs of the tokens, float32, with gradient. ``behaviour_T``: the engine's.
    ``slots_T``: int64, which of the ``num_sequences`` sequences a loss token is of; 0 elsewhere. ``entropy_T``: nats, with
    gradient if it has a bonus. ``start_T``: log-probs by the weights at the start of the step; none: they are those at hand.
    ``reference_T``: log-probs by the start model; none: there is no KL in the loss.
    """

    logprobs_T: Tensor
    behaviour_T: Tensor
    advantages_T: Tensor
    mask_T: Tensor
    slots_T: Tensor
    num_sequences: int
    entropy_T: Tensor | None = None
    start_T: Tensor | None = None
    reference_T: Tensor | None = None


def policy_loss(inputs: LossInputs, config: ObjectiveConfig) -> tuple[Tensor, Tensor, TokenSums]:
    """The sum (not the mean) over the micro-batch, what it adds to the ``denominator``, and to the step's statistics.

    With ``decoupled`` (AReaL, Fu et al. 2025, arXiv:2505.24298, equation 5; Hilton et al. 2021, arXiv:2110.00641) the ratio is to
    the policy at the start of the step, and the detached weight is from there to the behaviour policy. Without it, the ratio is
    to the behaviour policy, and a weight can only leave tokens out.
    """
    mask_T = inputs.mask_T
    logprobs_T = _masked(inputs.logprobs_T, mask_T)
    behaviour_T = _masked(inputs.behaviour_T, mask_T)
    start_T = logprobs_T.detach() if inputs.start_T is None else _masked(inputs.start_T, mask_T)
    entropy_T = _masked(torch.zeros_like(logprobs_T) if inputs.entropy_T is None else inputs.entropy_T, mask_T)
    sequences = Sequences.of(mask_T, inputs.slots_T, inputs.num_sequences, logprobs_T.dtype)

    anchor_T = start_T if config.decoupled else behaviour_T
    loss_T, low_T, high_T = objective(logprobs_T, anchor_T, _masked(inputs.advantages_T, mask_T), sequences, config)
    start_ratio_T = (start_T if config.decoupled else logprobs_T.detach()) - behaviour_T
    weights_T = importance_weights(start_ratio_T, sequences, config)
    if config.importance != "none":
        loss_T = loss_T * (weights_T if config.decoupled else (weights_T > 0.0).to(loss_T.dtype))
    kl_T = None
    if inputs.reference_T is not None:
        kl_T = kl_estimate(logprobs_T - _masked(inputs.reference_T, mask_T), config.kl_kind)
        weight_T = bounded(logprobs_T - behaviour_T).exp() if config.kl_importance else 1.0
        loss_T = loss_T + config.kl_coef * weight_T * kl_T
    if config.entropy_coef:
        loss_T = loss_T - config.entropy_coef * entropy_T
    loss = (torch.where(mask_T, loss_T, 0.0) * token_weights(sequences, config)).sum()
    divisor = denominator(sequences, config)
    sums = token_sums(
        loss=loss,
        denominator=divisor,
        log_ratio_T=logprobs_T - behaviour_T,
        start_log_ratio_T=start_T - behaviour_T,
        weights_T=weights_T,
        entropy_T=entropy_T,
        kl_T=kl_T,
        low_T=low_T & mask_T,
        high_T=high_T & mask_T,
        mask_T=mask_T,
        config=config,
    )
    return loss, divisor, sums


def objective(
    logprobs_T: Tensor, anchor_T: Tensor, advantages_T: Tensor, sequences: Sequences, config: ObjectiveConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """The objective that the config names; see ``objectives``."""
    log_ratio_T = bounded(logprobs_T - anchor_T)
    clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    match config.kind:
        case "clipped":
            return clipped(log_ratio_T, advantages_T, **clip)
        case "gspo":
            return gspo(log_ratio_T, advantages_T, sequences, **clip)
        case "cispo":
            return cispo(log_ratio_T, logprobs_T, advantages_T, **clip)


def token_weights(sequences: Sequences, config: ObjectiveConfig) -> Tensor:
    """``c`` of each loss token, before the division by the global ``denominator``.

        token      1           mean over tokens: DAPO, arXiv:2503.14476, section 3.3
        sequence   1 / its sequence's loss tokens    mean of means: GRPO, arXiv:2402.03300, equation 3; GSPO
        constant   1 / constant_length     no length bias at all: Dr. GRPO, arXiv:2503.20783, section 3.2

    >>> two = Sequences.of(torch.ones(3, dtype=torch.bool), torch.tensor([0, 0, 1]), 2, torch.float32)
    >>> token_weights(two, ObjectiveConfig(aggregation="sequence")).tolist()
    [0.5, 0.5, 1.0]
    >>> token_weights(two, ObjectiveConfig(aggregation="constant", constant_length=4)).tolist()
    [0.25, 0.25, 0.25]
    """
    match config.aggregation_or_default:
        case "token":
            each_S = torch.ones_like(sequences.lengths_S)
        case "sequence":
            each_S = 1.0 / sequences.lengths_S.clamp(min=1.0)
        case "constant":
            each_S = torch.full_like(sequences.lengths_S, 1.0 / config.constant_length)
    return sequences.spread_T(each_S)


def denominator(sequences: Sequences, config: ObjectiveConfig) -> Tensor:
    """What this micro-batch adds to the divisor: its loss tokens, or its sequences that have any. int32 scalar.

    Tokens whose importance weight is 0 stay in: the estimate is a mean over what was sampled, and a few survivors of a mask must
    not get the weight of all.
    """
    if config.aggregation_or_default == "token":
        return sequences.mask_T.sum(dtype=torch.int32)
    return (sequences.lengths_S > 0).sum(dtype=torch.int32)


def bounded(log_ratio_T: Tensor) -> Tensor:
    """Logarithms of ratios that ``exp`` can take; beyond, the gradient is 0."""
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _masked(values_T: Tensor, mask_T: Tensor) -> Tensor:
    # where(), not a product: 0 * nan of a padded position would be nan.
    return torch.where(mask_T, values_T, 0.0)
