"""The loss scale of float16, and the one way in which gradients of any dtype reach the weights.

Micikevicius et al. 2018, arXiv:1710.03740, section 3.2: the loss is multiplied by a scale, the gradients are divided by it. A gradient
that overflows means a step without update and half the scale; a window of steps without one doubles it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from common.errors import TrainingError
from services.learner.config import OptimizerConfig
from services.learner.megatron.mcore import DynamicGradScaler, clip_grad_by_total_norm_fp32


class LossScale(DynamicGradScaler):  # type: ignore[misc]
    """Megatron's scaler, one for all of its chained optimizers and ranks.

    Megatron gives each of them (experts and the rest, say) its own, and those part when only one sees an overflow; the loss has
    one scale. So ``update``, which each calls, waits for ``settle``.
    """

    @classmethod
    def of(cls, config: OptimizerConfig, device: torch.device) -> LossScale:
        """As configured."""
        with torch.device(device):
            return cls(
                initial_scale=config.initial_loss_scale,
                min_scale=1.0,
                growth_factor=2.0,
                backoff_factor=0.5,
                growth_interval=config.loss_scale_window,
                hysteresis=1,
            )

    def share(self, optimizer: Any) -> None:
        """Make it that of every optimizer in the chain."""
        for chained in optimizer.chained_optimizers:
            chained.grad_scaler = self

    def update(self, found_inf: bool) -> None:
        """Not yet."""

    def settle(self, found_inf: bool) -> None:
        """The word of all ranks on this step."""
        super().update(found_inf)


def loss_scale_of(optimizer: Any) -> LossScale | None:
    """The scale of a float16 optimizer; none for the other dtypes."""
    scaler = getattr(optimizer.chained_optimizers[0], "grad_scaler", None)
    return scaler if isinstance(scaler, LossScale) else None


def gradient_norm(optimizer: Any) -> float | None:
    """The global L2 norm of the summed gradients, which are made ready for ``apply_gradients``. None: float16 overflowed, and the
    scale was halved; this step must not be applied. Collective.

    Raises:
        TrainingError: an overflow at a scale of 1, which can't be halved: the gradients themselves are too large.
    """
    found_inf = bool(optimizer.prepare_grads())
    if (scale := loss_scale_of(optimizer)) is not None:
        flag = torch.tensor([float(found_inf)], device=scale.scale.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        before, found_inf = float(scale.scale), bool(flag)
        scale.settle(found_inf)
        if found_inf and before <= 1.0:
            raise TrainingError(
                "The gradient is not finite in float16 even at a loss scale of 1. Nothing was updated."
                " Use learner.dtype = 'bfloat16', which has the range of float32."
            )
        if found_inf:
            return None
    return float(optimizer.get_grad_norm())


def apply_gradients(optimizer: Any, norm: float) -> None:
    """Clip what ``gradient_norm`` made ready to the optimizer's limit, and step.

    As Megatron's own ``step``, which would prepare the gradients a second time and so count the step twice in the loss scale.
    """
    assert math.isfinite(norm), norm
    for chained in optimizer.chained_optimizers:
        if getattr(chained, "is_stub_optimizer", False):
            continue
        if parameters := chained.get_parameters():
            clip_grad_by_total_norm_fp32(parameters, max_norm=chained.config.clip_grad, total_norm=norm)
    optimizer.step_with_ready_grads()
