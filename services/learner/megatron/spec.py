"""The local layer spec: what runs where Transformer Engine is not installed, and on CPU.

Linear layers are Megatron's own; the norm and the attention (``attention``) are ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from services.learner.megatron.attention import PackedAttention
from services.learner.megatron.mcore import (
    MLP,
    AttnMaskType,
    ColumnParallelLinear,
    IdentityOp,
    MLPSubmodules,
    ModuleSpec,
    RowParallelLinear,
    SelfAttention,
    SelfAttentionSubmodules,
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


def block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage (of its virtual stage, where there are some) and the final norm, for GPTModel."""
    head_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedAttention,
            linear_proj=RowParallel,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    mlp = ModuleSpec(
        module=MLP,
        params={"ffn_hidden_size": config.ffn_hidden_size},
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallel),
    )
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage), layer_norm=RMSNorm
    )
