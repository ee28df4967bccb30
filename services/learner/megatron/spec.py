"""The local layer spec: what runs where Transformer Engine is not installed, and on CPU.

Linear layers are Megatron's own; the norm and the attention (``attention``) are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.learner.megatron.attention import PackedAttention
from services.learner.megatron.mcore import (
    HAVE_TRANSFORMER_ENGINE,
    MLP,
    AttnMaskType,
    ColumnParallelLinear,
    IdentityOp,
    MLPSubmodules,
    ModuleSpec,
    MoELayer,
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
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


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
        module=TransformerLayer,
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
    linears = MLPSubmodules(linear_fc1=parts.column_linear, linear_fc2=parts.row_linear)
    if config.num_moe_experts is None:
        return ModuleSpec(module=MLP, params={"ffn_hidden_size": config.ffn_hidden_size}, submodules=linears)
    experts = ModuleSpec(module=SequentialMLP, submodules=linears)
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts))
