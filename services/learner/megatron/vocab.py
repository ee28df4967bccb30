"""Log-probs and entropy from logits whose vocabulary is spread over the tensor ranks.

Legend: T = tokens of the micro-batch, v = rows of the padded vocabulary on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from services.learner.megatron.mcore import parallel_state

# Far below any logit, and finite, so that 0 * it is 0.
PADDED_LOGIT = -1e9
# Rows handled at once, to bound the scratch memory: of what is as large as the logits, only the logits themselves are kept.
ROWS = 1024


def logprobs_and_entropy(
    logits_Tv: Tensor, labels_T: Tensor, vocab_size: int, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(log-prob of each label, entropy in nats), float32[T], of ``softmax(logits / temperature)``; both with gradient.

    The columns that pad the vocabulary are masked: the engine has none. ``logits_Tv`` is overwritten.
    """
    logits_Tv = logits_Tv.float()
    if temperature != 1.0:
        logits_Tv = logits_Tv / temperature
    rank, width = parallel_state.get_tensor_model_parallel_rank(), logits_Tv.shape[1]
    real = vocab_size - rank * width
    if real < width:
        logits_Tv[:, max(real, 0) :] = PADDED_LOGIT
    group = parallel_state.get_tensor_model_parallel_group()
    logprobs_T, entropy_T = VocabParallelSoftmax.apply(
        logits_Tv, labels_T, rank * width, group if group.size() > 1 else None
    )
    return logprobs_T, entropy_T


class VocabParallelSoftmax(torch.autograd.Function):
    """Log-probs of labels and the entropy of ``softmax(x)``, over the ranks of ``group``.

    The buffer of ``x`` is all that is kept: ``log p`` takes its place in the forward pass, the gradient in the backward pass. So
    the entropy costs no memory, and its gradient one multiplication more. For label y and entropy H,

        d log p_y / d x_j = [j = y] - p_j        d H / d x_j = -p_j (log p_j + H)

    as follows from ``H = -sum p log p``.
    """

    @staticmethod
    def forward(ctx: Any, x_Tv: Tensor, labels_T: Tensor, first_row: int, group: Any) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # no gradient of the entropy without a bonus
        columns_T = labels_T - first_row
        here_T = (columns_T >= 0) & (columns_T < x_Tv.shape[1])
        columns_T = torch.where(here_T, columns_T, 0)
        entropy, logprobs = [], []
        for rows, columns, here in zip(x_Tv.split(ROWS), columns_T.split(ROWS), here_T.split(ROWS), strict=True):
            top = rows.amax(-1)
            if group is not None:
                dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            rows.sub_(top[:, None])
            weights = rows.exp()
            label = torch.where(here, rows.gather(1, columns[:, None])[:, 0], 0.0)
            # [3, rows]: the normalizer, the weighted sum of the shifted logits, and the label's on the rank that has it.
            sums = torch.stack([weights.sum(-1), torch.einsum("tv,tv->t", weights, rows), label])
            if group is not None:
                dist.all_reduce(sums, group=group)
            log_normalizer = sums[0].log()
            rows.sub_(log_normalizer[:, None])
            entropy.append(log_normalizer - sums[1] / sums[0])
            logprobs.append(sums[2] - log_normalizer)
        entropy_T = torch.cat(entropy)
        ctx.save_for_backward(x_Tv.detach(), columns_T, here_T, entropy_T)
        return torch.cat(logprobs), entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        log_p_Tv, columns_T, here_T, entropy_T = ctx.saved_tensors
        own_T = torch.zeros_like(entropy_T) if grad_logprobs_T is None else grad_logprobs_T
        for start in range(0, len(log_p_Tv), ROWS):
            these = slice(start, start + ROWS)
            rows, own = log_p_Tv[these], own_T[these]
            p = rows.exp()
            if grad_entropy_T is None:
                torch.mul(p, -own[:, None], out=rows)
            else:
                rows.add_(entropy_T[these, None]).mul_(-grad_entropy_T[these, None]).sub_(own[:, None]).mul_(p)
            places = torch.arange(len(rows), device=rows.device), columns_T[these]
            rows[places] += torch.where(here_T[these], own, 0.0)  # deterministic on GPUs, too, unlike scatter_add_
        return log_p_Tv, None, None, None
