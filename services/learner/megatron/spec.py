"""The local layer spec: what runs where Transformer Engine is not installed, and on CPU.

Linear layers are Megatron's own; the norm and the attention (``attention``) are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from services.learner.megatron.attention import PackedAttention
from services.learner.megatron.mcore import (
    HAVE_TRANSFORMER_ENGINE,
    MLP,
    AttnMaskType,
    ColumnParallelLinear,
    IdentityOp,
    MegatronModule,
    MLPSubmodules,
    ModuleSpec,
    MoESubmodules,
    RowParallelLinear,
    SelfAttention,
    SelfAttentionSubmodules,
    SequentialMLP,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayer,
    TransformerLayerSubmodules,
    get_bias_dropout_add,
    get_num_layers_to_build,
)
from services.learner.megatron.routing import ReplayLayer, ReplayMoE


class RMSNorm(torch.nn.Module):
    """Zhang and Sennrich 2019, arXiv:1910.07467, equation 4; statistics in float32, as transformers and vLLM have it.

    Unlike Megatron's wrapped torch norm it may run under sequence parallelism: the mark on the weight makes
    ``finalize_model_grads`` add its gradient over the tensor ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Any shape [..., hidden_size] to the same shape and dtype."""
        if x.is_cuda:  # one kernel each way
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        out: Tensor = _RMSNorm.apply(x, self.weight, self.eps)
        return out


class _RMSNorm(torch.autograd.Function):
    """``n = x / rms(x)``, ``y = n * w``; ``dx = (g w - n mean(g w n)) / rms(x)``.

    On CPU each pass over memory counts: `python -m bench.learner_parts` times it beside torch's own.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x if x.dtype is torch.float64 else x.float()
        inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = (wide * inverse).to(x.dtype)
        ctx.save_for_backward(normed, inverse, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        normed, inverse, weight = ctx.saved_tensors
        wide = grad.to(inverse.dtype)
        by_column = (wide * normed).flatten(0, -2)
        mean = (by_column @ weight.to(wide.dtype)).div_(-grad.shape[-1]).view_as(inverse)
        dx = torch.addcmul(wide * weight, normed.to(wide.dtype), mean).mul_(inverse)
        return dx.to(grad.dtype), by_column.sum(0).to(weight.dtype), None


class SwiGLU(MegatronModule):
    """``silu(gate) * up`` of the two halves of the last dimension: Shazeer 2020, arXiv:2002.05202, equation 6.

    Megatron's module, without parameters: 0.19 takes no other kind of callable, and 0.16 asks it for its part of a checkpoint.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)

    def forward(self, gate_up: Tensor) -> Tensor:
        """[..., 2 f] to [..., f]."""
        out: Tensor = _SwiGLU.apply(gate_up)
        return out


class _SwiGLU(torch.autograd.Function):
    """Keeps its input alone, where autograd would keep three more tensors of half its size: a third of a layer's activations."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        dgate, dup = result.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=dup)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=dgate)
        return result


class RowParallel(RowParallelLinear):
    """Megatron's, told its own tensor group: without it each call falls back on the default group and warns that it does."""

    def _forward_impl(self, *args: Any, **kwargs: Any) -> Tensor:
        return super()._forward_impl(*args, **{**kwargs, "tp_group": self.tp_group})


@dataclass(frozen=True)
class Parts:
    """The modules that a layer is made of. All have the same parameters under the same names, whoever made them."""

    column_linear: type
    row_linear: type
    norm: Any
    attention: type


LOCAL = Parts(ColumnParallelLinear, RowParallel, RMSNorm, PackedAttention)


def parts_for(device: torch.device) -> Parts:
    """Transformer Engine's where it is installed and there is a GPU to run them; else ours."""
    if device.type == "cuda" and HAVE_TRANSFORMER_ENGINE:
        from services.learner.megatron.te_parts import TE_PARTS

        return TE_PARTS
    return LOCAL


def block_spec(config: TransformerConfig, parts: Parts, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage (of its virtual stage, where there are some) and the final norm, for GPTModel."""
    head_norm = parts.norm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=parts.column_linear,
            core_attention=parts.attention,
            linear_proj=parts.row_linear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    layer = ModuleSpec(
        module=TransformerLayer if config.num_moe_experts is None else ReplayLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=parts.norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=parts.norm,
            mlp=_mlp_spec(config, parts),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    count = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=parts.norm)


def _mlp_spec(config: TransformerConfig, parts: Parts) -> ModuleSpec:
    """One MLP, or a router and experts, which run one after another."""
    linears = MLPSubmodules(linear_fc1=parts.column_linear, linear_fc2=parts.row_linear, activation_func=SwiGLU)
    if config.num_moe_experts is None:
        return ModuleSpec(module=MLP, params={"ffn_hidden_size": config.ffn_hidden_size}, submodules=linears)
    experts = ModuleSpec(module=SequentialMLP, submodules=linears)
    return ModuleSpec(module=ReplayMoE, submodules=MoESubmodules(experts=experts))
