"""Routing replay: routers that send tokens where the engine sent them. What it is for: ``services.learner.routed_experts``.

    MicroBatch.routed_experts --DeviceBatch--> PackedSequences.routed_experts --this layer's column--> ReplayRouting.get_replay_topk

Megatron's router asks an object of its own (``megatron.core.transformer.moe.router_replay``) for the experts, at one place, from 0.16 to
0.19. We put ours there. Megatron's keeps the experts of recomputed layers in one queue for all micro-batches; ours are handed down
with the micro-batch, so that any schedule and any recomputation gives each forward pass its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.learner.megatron.mcore import (
    MoELayer,
    TransformerLayer,
    checkpoint,
)
from services.learner.packing import TrainSample


class ReplayRouting:
    """One layer's. ``routed_experts``: int16[t, k] of the forward pass that comes next, below 0 where the router chooses; none: it always does.

    ``counts``: int64 [2], (token rows replayed, those of them where the router would have chosen another set), of passes with gradient.
    """

    def __init__(self) -> None:
        self.routed_experts: Tensor | None = None
        self.counts: Tensor | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(scores of the chosen experts, the experts), each [t, k]. Called by Megatron's router, under this name."""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.routed_experts is None:
            return values, own
        given = self.routed_experts >= 0
        chosen = torch.where(given, self.routed_experts.long(), own)
        if torch.is_grad_enabled():  # once for each forward pass, recomputed or not
            other = (chosen.sort(-1).values != own.sort(-1).values).any(-1)
            counts = torch.stack([given[:, 0].sum(), other.sum()])
            self.counts = counts if self.counts is None else self.counts + counts
        return scores.gather(1, chosen), chosen


class ReplayMoE(MoELayer):
    """Megatron's layer, which keeps ``routed_experts`` (as in ``ReplayRouting``) for when it is computed again in the backward pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.routed_experts: Tensor | None = None
        self.replay = self.router.router_replay = ReplayRouting()
        self.recomputed, self.moe_layer_recompute = self.moe_layer_recompute, False

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's."""
        routed_experts = self.routed_experts

        def run(hidden_states: Tensor) -> Any:
            self.replay.routed_experts = routed_experts
            return super(ReplayMoE, self).forward(hidden_states, *args, **kwargs)

        if self.recomputed and self.training:
            return checkpoint(run, False, hidden_states)
        return run(hidden_states)


class ReplayLayer(TransformerLayer):
    """Hands a micro-batch's routed_experts to the experts behind it, also when the whole layer is computed again."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's, which passes ``packed_seq_params`` by name."""
        routed_experts = kwargs["packed_seq_params"].routed_experts
        self.mlp.routed_experts = None if routed_experts is None else routed_experts[:, self.layer_number - 1]
        return super().forward(*args, **kwargs)


def take_counts(chunks: Iterable[torch.nn.Module]) -> list[int]:
    """[token rows replayed, those where the router would have chosen another set] of all layers since the last call."""
    total = [0, 0]
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, ReplayMoE) and module.replay.counts is not None:
                total = [a + b for a, b in zip(total, module.replay.counts.tolist(), strict=True)]
                module.replay.counts = None
    return total


def replayed_shares(
    samples: Sequence[TrainSample], chunks: Iterable[torch.nn.Module], device: torch.device
) -> dict[str, float]:
    """Fields of ``StepStats``, of the step just done; none where the engine told no routed_experts. Collective over the world."""
    num_tokens = sum(sample.length for sample in samples if sample.routed_experts is not None)
    if not num_tokens:
        return {}
    # Each rank has counted the tokens that its routers saw, and no two of them the same.
    counts = torch.tensor(take_counts(chunks), dtype=torch.float64, device=device)
    dist.all_reduce(counts)
    replayed, other = counts.tolist()
    return {
        "routing_replayed_share": num_tokens / sum(sample.length for sample in samples),
        "routing_changed_share": other / max(1.0, replayed),
    }
