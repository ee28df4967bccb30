"""Every name of Megatron-Core that the learner uses, imported in one place and quietly.

Without Transformer Engine and Apex, which are optional, importing Megatron warns of their absence seven times, and its own
and torch's deprecations add more. Those messages, and no others, are silenced, and only during this import.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def _compiled_when_called() -> Iterator[None]:
    """Within it, what ``torch.compile`` decorates is compiled at its first call.

    Megatron decorates dozens of functions, of which a dense model on a CPU calls none. The decorator alone imports torch's compiler, some
    800 modules.
    """
    compile_now = torch.compile

    def compile_later(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(compile_later, **options)
        compiled = functools.cache(lambda: compile_now(function, **options))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            run = function if torch.compiler.is_compiling() else compiled()
            return run(*args, **kwargs)

        return call

    torch.compile = compile_later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_now


with warnings.catch_warnings(), _compiled_when_called():
    for _message in (
        r"(Transformer Engine and )?Apex (is|are) not installed",
        r"`torch\.jit\.script(_method)?` is deprecated",
        # 0.19:
        r"absl\.logging is not installed",
        r"MimoModelConfig is experimental",
        r"The following imports from `dynamic_context\.py` will be removed",
    ):
        warnings.filterwarnings("ignore", message=_message)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException
    from megatron.core.dist_checkpointing.core import save_config as save_checkpoint_config
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        mcore_to_pyt_state_dict,
    )
    from megatron.core.dist_checkpointing.strategies.torch import (
        _replace_state_dict_keys_with_sharded_keys as _by_key,
    )
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        checkpoint,
        gather_from_sequence_parallel_region,
        model_parallel_cuda_manual_seed,
        set_tensor_model_parallel_attributes,
    )
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.module import Float16Module, MegatronModule
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
        get_transformer_layer_offset,
    )

    with contextlib.suppress(ImportError):
        import megatron.core.models.mimo  # noqa: F401 (what 0.19 imports with its first optimizer, and warns of)

    try:
        import transformer_engine  # noqa: F401

        HAVE_TRANSFORMER_ENGINE = True
    except ImportError:
        HAVE_TRANSFORMER_ENGINE = False
        # Without Transformer Engine 0.16 leaves this name out, and its router asks for it all the same.
        moe_utils.te_general_gemm = None

# 0.19 says at each model that GPTModel gives way to HybridModel. Both ends of our range have GPTModel.
logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(
    lambda record: "GPTModel IS DEPRECATED" not in record.getMessage()
)

# 0.16 knows Megatron's own MoE layer by its class, and says so of ours, which inherits from it; both then take the default groups.
logging.getLogger("megatron.core.transformer.transformer_layer").addFilter(
    lambda record: "Unknown MLP type" not in record.getMessage()
)

# What torch says of how Megatron loads a checkpoint; the last two of 0.19, whose ranks read without asking each other.
CHECKPOINT_LOAD_WARNINGS = (
    "`load_state_dict` is deprecated|Please use DTensor instead|The argument order of load has been changed"
    "|torch.distributed is disabled, unavailable or uninitialized"
)


def by_checkpoint_key(sharded_state_dict: Any) -> dict[str, list[Any]]:
    """Megatron's grouping of a state by the names in the checkpoint, without what another rank writes.

    Megatron has no public name for it; its own writer begins with it, in 0.16 as in 0.19.
    """
    return _by_key(sharded_state_dict, keep_only_main_replica=True)[0]


__all__ = [
    "CHECKPOINT_LOAD_WARNINGS",
    "HAVE_TRANSFORMER_ENGINE",
    "MLP",
    "AttnMaskType",
    "CheckpointingConfig",
    "CheckpointingException",
    "ColumnParallelLinear",
    "CudaRNGStatesTracker",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DynamicGradScaler",
    "Float16Module",
    "GPTModel",
    "IdentityOp",
    "MCoreSavePlanner",
    "MLPSubmodules",
    "MegatronModule",
    "MegatronOptimizerConfig",
    "MoELayer",
    "MoESubmodules",
    "ModuleSpec",
    "PackedSeqParams",
    "RowParallelLinear",
    "SelfAttention",
    "SelfAttentionSubmodules",
    "SequentialMLP",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StrictHandling",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "TransformerLayerSubmodules",
    "VocabParallelEmbedding",
    "by_checkpoint_key",
    "checkpoint",
    "clip_grad_by_total_norm_fp32",
    "dist_checkpointing",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "get_bias_dropout_add",
    "get_forward_backward_func",
    "get_megatron_optimizer",
    "get_num_layers_to_build",
    "get_transformer_layer_offset",
    "mcore_to_pyt_state_dict",
    "megatron_random",
    "model_parallel_cuda_manual_seed",
    "parallel_state",
    "save_checkpoint_config",
    "save_preprocess",
    "set_tensor_model_parallel_attributes",
]
