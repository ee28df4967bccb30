"""Every name of Megatron-Core that the learner uses, imported in one place and quietly.

Without Transformer Engine and Apex, which are optional, importing Megatron warns of their absence seven times, and its own
and torch's deprecations add more. Those messages, and no others, are silenced, and only during this import.
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    for _message in (
        r"(Transformer Engine and )?Apex (is|are) not installed",
        r"`torch\.jit\.script(_method)?` is deprecated",
        r"The following imports from `dynamic_context\.py` will be removed",
    ):
        warnings.filterwarnings("ignore", message=_message)
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        gather_from_sequence_parallel_region,
        model_parallel_cuda_manual_seed,
        set_tensor_model_parallel_attributes,
    )
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.module import Float16Module, MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
        get_transformer_layer_offset,
    )

__all__ = [
    "MLP",
    "AttnMaskType",
    "ColumnParallelLinear",
    "CudaRNGStatesTracker",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "Float16Module",
    "GPTModel",
    "IdentityOp",
    "MLPSubmodules",
    "MegatronModule",
    "MegatronOptimizerConfig",
    "ModuleSpec",
    "PackedSeqParams",
    "RowParallelLinear",
    "SelfAttention",
    "SelfAttentionSubmodules",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "TransformerLayerSubmodules",
    "VocabParallelEmbedding",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "get_bias_dropout_add",
    "get_forward_backward_func",
    "get_megatron_optimizer",
    "get_num_layers_to_build",
    "get_transformer_layer_offset",
    "model_parallel_cuda_manual_seed",
    "parallel_state",
    "set_tensor_model_parallel_attributes",
]
