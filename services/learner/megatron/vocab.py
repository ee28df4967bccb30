"""Log-probs and entropy from logits whose vocabulary is spread over the tensor ranks.

Legend: T = tokens of the micro-batch, v = rows of the padded vocabulary on this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from services.learner.megatron.mcore import parallel_state, vocab_parallel_cross_entropy

# Far below any logit, and finite, so that 0 * it is 0.
PADDED_LOGIT = -1e9
# Rows handled at once by the entropy, to bound its scratch memory.
ENTROPY_ROWS = 1024


def logprobs_and_entropy(
    logits_Tv: Tensor, labels_T: Tensor, vocab_size: int, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(log-prob of each label with gradient, entropy in nats without), float32[T], of ``softmax(logits / temperature)``.

    The columns that pad the vocabulary are masked: the engine has none. ``logits_Tv`` is overwritten.
    """
    logits_Tv = logits_Tv.float()
    if temperature != 1.0:
        logits_Tv = logits_Tv / temperature
    real = vocab_size - parallel_state.get_tensor_model_parallel_rank() * logits_Tv.shape[1]
    if real < logits_Tv.shape[1]:
        logits_Tv[:, max(real, 0) :] = PADDED_LOGIT
    entropy_T = _entropy(logits_Tv.detach())
    return -vocab_parallel_cross_entropy(logits_Tv, labels_T), entropy_T


@torch.no_grad()
def _entropy(logits_Tv: Tensor) -> Tensor:
    """``log sum exp(x) - sum x exp(x) / sum exp(x)``, over all ranks."""
    group = parallel_state.get_tensor_model_parallel_group()
    out = []
    for rows in logits_Tv.split(ENTROPY_ROWS):
        top = rows.amax(-1)
        if group.size() > 1:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        shifted = rows - top[:, None]
        weights = shifted.exp()
        # [2, rows]: the normalizer, and the weighted sum of the shifted logits.
        sums = torch.stack([weights.sum(-1), torch.einsum("tv,tv->t", weights, shifted)])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        out.append(sums[0].log() - sums[1] / sums[0])
    return torch.cat(out)
