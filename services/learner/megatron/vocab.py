"""Log-probs and entropy of completion tokens, from hidden states and an output weight that is cut over the tensor ranks.

The output layer is most of a small model's memory traffic and a good part of its flops, so it runs only at the positions that
predict a completion token, and its softmax, log-prob, entropy and their gradients are one operation, which keeps one matrix.

Legend: L = completion tokens of the micro-batch, T = its positions, v = rows of the padded vocabulary on this rank, c = hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import InvariantError
from services.learner.megatron.context import ContextCut, gather_rows
from services.learner.megatron.mcore import GPTModel, gather_from_sequence_parallel_region, parallel_state

# Far below any logit, and finite in every type, so that 0 * it is 0.
PADDED_LOGIT = -6e4
# Elements that one pass over rows handles, to bound its scratch memory: about a processor's cache, or little of a GPU's memory.
CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**27}


@dataclass(frozen=True)
class LossRows:
    """What is asked of the last pipeline stage. ``positions``: int64[L], rising. ``labels``: int64[L].

    ``vocab_size``: without the padding. Log-probs and entropy are of ``softmax(logits / temperature)``. Whether the entropy has
    a gradient, which costs another logarithm of each probability: ``entropy_gradient``.
    """

    positions: Tensor
    labels: Tensor
    vocab_size: int
    temperature: float = 1.0
    entropy_gradient: bool = False
    cut: ContextCut | None = None  # under context parallelism: these are this rank's rows


class PolicyModel(GPTModel):
    """Megatron's GPTModel, whose last stage returns float32[2, L]: log-prob and entropy of each completion token."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        rows: LossRows = packed_seq_params.rows
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        hidden_Lc = hidden_states.flatten(0, -2).index_select(0, rows.positions)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        weight_vc = self.output_layer.weight if weight is None else weight
        found = torch.stack(logprobs_and_entropy(hidden_Lc, weight_vc, rows))
        return found if rows.cut is None else gather_rows(found, rows.cut)


def logprobs_and_entropy(hidden_Lc: Tensor, weight_vc: Tensor, rows: LossRows) -> tuple[Tensor, Tensor]:
    """(log-prob of each label, entropy in nats), float32[L], the same on all tensor ranks.

    The columns that pad the vocabulary are masked: the engine has none.
    """
    first = parallel_state.get_tensor_model_parallel_rank() * weight_vc.shape[0]
    group = parallel_state.get_tensor_model_parallel_group()
    logprobs_L, entropy_L = _LogProbs.apply(
        hidden_Lc, weight_vc, rows.labels - first, rows.vocab_size - first, rows, group
    )
    return logprobs_L, entropy_L


class _LogProbs(torch.autograd.Function):
    """With ``x = hidden @ weight.T / temperature``, ``p = softmax(x)``: ``log p[label]`` and ``H = -sum p log p``.

    ``d log p[y] / dx_j = [j = y] - p_j`` and ``dH / dx_j = -p_j (log p_j + H)``. One matrix is kept, ``exp(x - max)`` in the
    type of the weights; the backward overwrites it with the gradient of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_Lc: Tensor, weight_vc: Tensor, labels_L: Tensor, real: int, asked: LossRows, group: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        temperature = asked.temperature
        kept_Lv = hidden_Lc @ weight_vc.T
        num_columns = kept_Lv.shape[1]
        mine_L = (labels_L >= 0) & (labels_L < num_columns)
        column_L = labels_L.clamp(0, num_columns - 1)
        label_logit_L = kept_Lv.gather(1, column_L[:, None])[:, 0].to(_wide(kept_Lv)) / temperature
        if real < num_columns:
            kept_Lv[:, max(real, 0) :] = PADDED_LOGIT
        top_L = kept_Lv.amax(-1).to(_wide(kept_Lv)) / temperature
        if group.size() > 1:
            dist.all_reduce(top_L, op=dist.ReduceOp.MAX, group=group)
        # [3, L]: the normalizer, the weighted sum of the logits less their maximum, and the label's.
        sums = torch.stack([torch.zeros_like(top_L)] * 2 + [torch.where(mine_L, label_logit_L - top_L, 0.0)])
        for rows in _chunks(kept_Lv):
            shifted = (kept_Lv[rows] / temperature if temperature != 1.0 else kept_Lv[rows]) - top_L[rows, None]
            weights = shifted.exp()
            sums[0, rows] = weights.sum(-1)
            sums[1, rows] = torch.linalg.vecdot(weights, shifted)
            kept_Lv[rows] = weights
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        log_norm_L = sums[0].log()
        entropy_L = log_norm_L - sums[1] / sums[0]
        ctx.save_for_backward(hidden_Lc, weight_vc, mine_L, column_L, log_norm_L, entropy_L)
        ctx.kept_Lv, ctx.temperature, ctx.group = kept_Lv, temperature, group
        if not asked.entropy_gradient:
            ctx.mark_non_differentiable(entropy_L)
        return sums[2] - log_norm_L, entropy_L

    @staticmethod
    def backward(ctx: Any, dlogprobs_L: Tensor | None, dentropy_L: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        hidden_Lc, weight_vc, mine_L, column_L, log_norm_L, entropy_L = ctx.saved_tensors
        grad_Lv, ctx.kept_Lv = ctx.kept_Lv, None
        if grad_Lv is None:
            raise InvariantError("The output layer's backward ran twice; the first one has overwritten what it kept.")
        given_L = torch.zeros_like(log_norm_L) if dlogprobs_L is None else dlogprobs_L
        inverse_L = (-log_norm_L).exp() / ctx.temperature
        for rows in _chunks(grad_Lv):
            kept = grad_Lv[rows]
            factor = -(given_L * inverse_L)[rows, None]
            if dentropy_L is not None:
                # log p = log(kept) - log_norm; where kept is 0, so is the product.
                log_p = kept.to(factor.dtype).clamp_min(1e-37).log() - log_norm_L[rows, None]
                factor = factor - (dentropy_L * inverse_L)[rows, None] * (log_p + entropy_L[rows, None])
            if kept.dtype is factor.dtype:
                kept *= factor
            else:
                grad_Lv[rows] = kept.to(factor.dtype) * factor
        at_label_L = torch.where(mine_L, given_L / ctx.temperature, 0.0).to(grad_Lv.dtype)
        each_L = torch.arange(len(column_L), device=column_L.device)
        grad_Lv[each_L, column_L] += at_label_L  # one element of each row: deterministic also on GPUs
        dhidden_Lc = grad_Lv @ weight_vc
        if ctx.group.size() > 1:
            dist.all_reduce(dhidden_Lc, group=ctx.group)
        return dhidden_Lc, grad_Lv.T @ hidden_Lc, None, None, None, None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _chunks(matrix: Tensor) -> list[slice]:
    step = max(CHUNK_ELEMENTS.get(matrix.device.type, 2**22) // matrix.shape[1], 1)
    return [slice(start, start + step) for start in range(0, matrix.shape[0], step)]
