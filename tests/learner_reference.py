"""The learner's loss once more, as plain loops over sequences: what the packed one is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.learner.config import ObjectiveConfig

# Every objective, weight, aggregation, KL and bonus, each at least once, and the mixtures that interact.
OBJECTIVES: dict[str, dict] = {
    "clipped": {},
    "clipped-symmetric-by-sequence": {"clip_high": 0.2, "aggregation": "sequence"},
    "clipped-constant": {"aggregation": "constant", "constant_length": 64},
    "clipped-mask-token": {"importance": "mask", "importance_min": 0.9, "importance_max": 1.1},
    "clipped-mask-sequence": {
        "importance": "mask",
        "importance_level": "sequence",
        "importance_min": 0.7,
        "importance_max": 1.5,
    },
    "gspo": {"kind": "gspo", "clip_low": 0.02, "clip_high": 0.03},
    "gspo-by-token": {"kind": "gspo", "clip_low": 0.02, "clip_high": 0.03, "aggregation": "token"},
    "gspo-decoupled": {
        "kind": "gspo",
        "clip_low": 0.02,
        "clip_high": 0.03,
        "decoupled": True,
        "importance": "truncate",
        "importance_level": "sequence",
        "importance_max": 1.2,
    },
    "cispo": {"kind": "cispo", "clip_low": 1.0, "clip_high": 0.1},
    "cispo-both-sides": {"kind": "cispo", "clip_low": 0.1, "clip_high": 0.1},
    "decoupled-full": {"decoupled": True, "importance": "full"},
    "decoupled-truncate-token": {"decoupled": True, "importance": "truncate", "importance_max": 1.1},
    "decoupled-truncate-sequence": {
        "decoupled": True,
        "importance": "truncate",
        "importance_level": "sequence",
        "importance_max": 1.2,
    },
    "decoupled-mask-token": {
        "decoupled": True,
        "importance": "mask",
        "importance_min": 0.9,
        "importance_max": 1.1,
        "aggregation": "sequence",
    },
    "decoupled-mask-sequence": {
        "decoupled": True,
        "importance": "mask",
        "importance_level": "sequence",
        "importance_min": 0.7,
        "importance_max": 1.5,
    },
    "decoupled-cispo": {"kind": "cispo", "decoupled": True, "importance": "truncate", "importance_max": 1.1},
    "kl-k1-weighted": {"kl_coef": 0.3, "kl_kind": "k1", "kl_importance": True},
    "kl-k2": {"kl_coef": 0.3, "kl_kind": "k2"},
    "kl-k3": {"kl_coef": 0.3, "kl_kind": "k3", "aggregation": "sequence"},
    "kl-k3-weighted": {"kl_coef": 0.3, "kl_kind": "k3", "kl_importance": True},
    "entropy": {"entropy_coef": 0.2},
    "all-of-it": {
        "decoupled": True,
        "importance": "mask",
        "importance_max": 1.2,
        "kl_coef": 0.1,
        "entropy_coef": 0.05,
        "aggregation": "constant",
        "constant_length": 32,
    },
}


@dataclass
class Sequence:
    """One completion: all float64 or float32 [C]."""

    logprobs: torch.Tensor
    behaviour: torch.Tensor
    advantage: float
    start: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


def sequence_loss(s: Sequence, o: ObjectiveConfig) -> torch.Tensor:
    """The loss of each token of one sequence."""
    start = s.logprobs.detach() if s.start is None else s.start
    log_ratio = s.logprobs - (start if o.decoupled else s.behaviour)
    if o.kind == "gspo":
        log_ratio = log_ratio.mean().repeat(len(log_ratio))
    ratio, low, high = log_ratio.exp(), 1 - o.clip_low, 1 + o.clip_high
    if o.kind == "cispo":
        fixed = np.clip(ratio.detach().numpy(), low, high)
        loss = -torch.from_numpy(fixed) * s.advantage * s.logprobs
    elif s.advantage >= 0:
        loss = -s.advantage * torch.where(ratio > high, torch.full_like(ratio, high), ratio)
    else:
        loss = -s.advantage * torch.where(ratio < low, torch.full_like(ratio, low), ratio)
    if o.importance != "none":
        loss = loss * torch.tensor(_weights(s, start, o), dtype=loss.dtype)
    if s.reference is not None:
        x = s.logprobs - s.reference
        kl = {"k1": x, "k2": 0.5 * x**2, "k3": (-x).exp() - 1 + x}[o.kl_kind]
        loss = loss + o.kl_coef * kl * ((s.logprobs - s.behaviour).exp() if o.kl_importance else 1)
    if o.entropy_coef:
        loss = loss - o.entropy_coef * s.entropy
    return loss


def _weights(s: Sequence, start: torch.Tensor, o: ObjectiveConfig) -> list[float]:
    log = [float(x) for x in (start if o.decoupled else s.logprobs.detach()) - s.behaviour]
    if o.importance_level == "sequence":
        log = [sum(log)] * len(log)
    weights = [float(np.exp(x)) for x in log]
    if o.importance == "truncate":
        weights = [min(w, o.importance_max) for w in weights]
    if o.importance == "mask":
        weights = [w if o.importance_min <= w <= o.importance_max else 0.0 for w in weights]
    return weights if o.decoupled else [float(w > 0) for w in weights]


def reference_loss(sequences: list[Sequence], o: ObjectiveConfig) -> torch.Tensor:
    """The mean that is differentiated."""
    losses = [sequence_loss(s, o) for s in sequences if len(s.logprobs)]
    match o.aggregation or ("sequence" if o.kind == "gspo" else "token"):
        case "token":
            return sum(loss.sum() for loss in losses) / sum(len(loss) for loss in losses)
        case "sequence":
            return sum(loss.mean() for loss in losses) / len(losses)
        case "constant":
            return sum(loss.sum() for loss in losses) / (len(losses) * o.constant_length)
