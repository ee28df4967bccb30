"""From a config and a model's shape to a Megatron model in its process groups: world, GPTModel, DDP, optimizer."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from common.errors import ConfigError, InvariantError
from services.learner.architecture import Architecture
from services.learner.config import LearnerConfig, ParallelConfig
from services.learner.layouts import layout_violations, stage_layers
from services.learner.megatron import device_map
from services.learner.megatron.loss_scale import LossScale
from services.learner.megatron.mcore import (
    ColumnParallelLinear,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    Float16Module,
    GPTModel,
    MegatronOptimizerConfig,
    RowParallelLinear,
    TransformerConfig,
    VocabParallelEmbedding,
    finalize_model_grads,
    get_megatron_optimizer,
    model_parallel_cuda_manual_seed,
    parallel_state,
    set_tensor_model_parallel_attributes,
)
from services.learner.megatron.spec import Parts, block_spec, parts_for
from services.learner.megatron.vocab import PolicyModel
from services.learner.world import group_timeout_s, join


@dataclass(frozen=True)
class Ranks:
    """Where this process stands in the layout."""

    tensor: int
    tensor_size: int
    pipeline: int
    pipeline_size: int
    data: int
    data_size: int
    context: int = 0
    context_size: int = 1
    expert: int = 0
    expert_size: int = 1
    expert_tensor: int = 0
    expert_tensor_size: int = 1

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pipeline == self.pipeline_size - 1


@dataclass(frozen=True)
class BuiltModel:
    """One rank's part of the policy: one chunk of layers per virtual pipeline stage (one in all, without interleaving).

    ``chunks[v]`` is the bare model inside ``ddps[v]``; they share their parameters. ``layers[stage][v]``: which layers of the
    whole model, from 0, chunk v of each pipeline stage holds.
    """

    arch: Architecture
    config: TransformerConfig
    chunks: tuple[GPTModel, ...]
    ddps: tuple[DistributedDataParallel, ...]
    layers: tuple[tuple[range, ...], ...]
    ranks: Ranks
    device: torch.device

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters of all chunks; a name is ``CHUNK.name-in-the-chunk``, as in ``1.decoder.layers.0.mlp.linear_fc1.weight``."""
        for v, chunk in enumerate(self.chunks):
            for name, parameter in chunk.named_parameters():
                yield f"{v}.{name}", parameter


def choose_device(wanted: str) -> torch.device:
    """``auto`` is cuda where there is one.

    Raises:
        ConfigError: cuda is asked for and there is none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("learner.device = 'cuda', but torch sees no GPU on this machine. Set it to 'auto' or 'cpu'.")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def init_world(config: LearnerConfig, arch: Architecture, device: torch.device, *, seed: int) -> Ranks:
    """Joins the learner's world (or makes a world of one) and cuts it into Megatron's groups. Again is a check, not a new world.

    Raises:
        ConfigError: the layout doesn't fit the world or the model; lists all that is wrong.
        InvariantError: this process already has a world of another layout.
        WaitTimeout: the other ranks don't come.
    """
    parallel = config.parallel
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if violations := layout_violations(arch, parallel, world_size, config.recompute):
        raise ConfigError("The learner's parallel layout does not fit:\n" + "\n".join(f"  {v}" for v in violations))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        device_map.install()
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        join(backend, timeout_s=config.wait_timeout_s)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=_virtual(parallel),
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor_size,
            distributed_timeout_minutes=group_timeout_s(backend, config.wait_timeout_s) / 60,
            create_gloo_process_groups=False,
        )
    ranks = current_ranks()
    found = (ranks.tensor_size, ranks.pipeline_size, ranks.context_size, ranks.expert_size, ranks.expert_tensor_size)
    wanted = (parallel.tensor, parallel.pipeline, parallel.context, parallel.expert, parallel.expert_tensor_size)
    if found != wanted:
        raise InvariantError(f"This process has a Megatron world of {ranks}; the config asks for {parallel}.")
    torch.manual_seed(seed)
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(seed)
    return ranks


def _virtual(parallel: ParallelConfig) -> int | None:
    """Megatron's word for the virtual stages: none means no interleaving."""
    return parallel.virtual_stages if parallel.virtual_stages > 1 else None


def leave_layout() -> None:
    """Ends Megatron's groups, where they are, and all others but the world; ``init_world`` may then cut it another way.

    Megatron itself only forgets its groups. Those of gloo have threads each, which stay until the group is destroyed.
    """
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        gc.collect()  # models refer to their groups, in circles


def leave_world() -> None:
    """Ends Megatron's groups and the process group, where they are."""
    leave_layout()
    if dist.is_initialized():
        dist.destroy_process_group()


def current_ranks() -> Ranks:
    """This process's place in Megatron's groups."""
    return Ranks(
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel_state.get_pipeline_model_parallel_world_size(),
        data=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        context=parallel_state.get_context_parallel_rank(),
        context_size=parallel_state.get_context_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_rank(),
        expert_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_rank(),
        expert_tensor_size=parallel_state.get_expert_tensor_parallel_world_size(),
    )


def build_model(
    config: LearnerConfig, arch: Architecture, ranks: Ranks, device: torch.device, *, deterministic: bool
) -> BuiltModel:
    """This rank's layers with uninitialized weights: load them next, and make the optimizer after that."""
    megatron_config = transformer_config(config, arch, device, deterministic=deterministic)
    layers = stage_layers(arch.num_layers, config.parallel)
    parts, num_chunks = parts_for(device), config.parallel.virtual_stages
    chunks = [_build_chunk(megatron_config, arch, ranks, parts, v, num_chunks).to(device) for v in range(num_chunks)]
    for chunk, held in zip(chunks, layers[ranks.pipeline], strict=True):
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        assert numbers == list(held), (numbers, held)
        _mark_tensor_parallel(chunk)
    ddps = [_wrap(config, megatron_config, chunk) for chunk in chunks]
    # A list for the interleaved schedule, a function for the others.
    megatron_config.no_sync_func = [ddp.no_sync for ddp in ddps] if len(ddps) > 1 else ddps[0].no_sync
    return BuiltModel(arch, megatron_config, tuple(chunks), tuple(ddps), layers, ranks, device)


def _build_chunk(
    config: TransformerConfig, arch: Architecture, ranks: Ranks, parts: Parts, v: int, num_chunks: int
) -> GPTModel:
    """Virtual stage ``v`` of this rank's ``num_chunks``."""
    vp_stage = v if num_chunks > 1 else None
    return PolicyModel(
        config=config,
        transformer_layer_spec=block_spec(config, parts, vp_stage),
        vocab_size=arch.padded_vocab_size(ranks.tensor_size),
        max_sequence_length=arch.max_positions,
        pre_process=ranks.pipeline == 0 and v == 0,
        post_process=ranks.is_last_stage and v == num_chunks - 1,
        share_embeddings_and_output_weights=arch.tied_embeddings,
        position_embedding_type="none",  # our attention applies ``rotary``
        vp_stage=vp_stage,
    )


def _wrap(config: LearnerConfig, megatron_config: TransformerConfig, chunk: GPTModel) -> DistributedDataParallel:
    return DistributedDataParallel(
        config=megatron_config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=config.optimizer.distributed
        ),
        module=Float16Module(megatron_config, chunk) if megatron_config.params_dtype.itemsize == 2 else chunk,
    )


def _mark_tensor_parallel(gpt: GPTModel) -> None:
    """Marks the weights that are cut over the tensor ranks.

    Megatron does so only while it initializes weights at random, which we leave out; unmarked, it takes them for copies and
    counts only the first tensor rank's part in the gradient norm.
    """
    axes = {VocabParallelEmbedding: 0, ColumnParallelLinear: 0, RowParallelLinear: 1}
    for module in gpt.modules():
        axis = next((axis for kind, axis in axes.items() if isinstance(module, kind)), None)
        weight = getattr(module, "weight", None)
        if axis is not None and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=axis, stride=1)


def transformer_config(
    config: LearnerConfig, arch: Architecture, device: torch.device, *, deterministic: bool
) -> TransformerConfig:
    """Megatron's config of the model. Fusions that need Apex, or torch.compile on CPU, are off."""
    dtype, parallel, recompute = getattr(torch, config.dtype), config.parallel, config.recompute
    full = recompute.granularity == "full"
    with warnings.catch_warnings():
        # 0.16's own default of an option we don't use (CUDA graphs) is one that it warns about.
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        # Its advice about fused attention; the user asked for it.
        warnings.filterwarnings(
            "ignore", message="If you are using transformer_engine as the transformer implementation"
        )
        # Its advice to route in float32: the engines route in the model's dtype, and so does the trainer.
        warnings.filterwarnings("ignore", message="Using a large number of experts")
        return TransformerConfig(
            num_layers=arch.num_layers,
            hidden_size=arch.hidden_size,
            ffn_hidden_size=arch.ffn_size,
            num_attention_heads=arch.num_heads,
            num_query_groups=arch.num_kv_heads,
            kv_channels=arch.head_dim,
            normalization="RMSNorm",
            layernorm_epsilon=arch.norm_eps,
            qk_layernorm=arch.qk_norm,
            add_bias_linear=False,
            add_qkv_bias=arch.qkv_bias,
            gated_linear_unit=True,
            activation_func=F.silu,
            use_te_activation_func=True,  # that of the spec, which is ours
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=_virtual(parallel),
            num_layers_in_first_pipeline_stage=parallel.first_stage_layers,
            num_layers_in_last_pipeline_stage=parallel.last_stage_layers,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            expert_tensor_parallel_size=parallel.expert_tensor_size,
            sequence_parallel=parallel.sequence,
            # Micro-batches differ in size, and the stages tell each other how long the next one is. Not so where they are made of
            # one length (see ``needs_equal_lengths``); with virtual stages the messages then go while the layers compute.
            variable_seq_lengths=parallel.pipeline > 1 and not needs_equal_lengths(config, arch, device),
            overlap_p2p_comm=parallel.virtual_stages > 1,
            batch_p2p_comm=parallel.virtual_stages == 1,
            recompute_granularity=None if recompute.granularity == "none" else recompute.granularity,
            recompute_modules=list(recompute.modules) if recompute.granularity == "selective" else None,
            recompute_method=recompute.method if full else None,
            recompute_num_layers=recompute.num_layers if full else None,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            fp16=dtype is torch.float16,
            # The loss is a sum over tokens; Megatron divides the added gradients by the global number of loss tokens.
            calculate_per_token_loss=True,
            finalize_model_grads_func=finalize_model_grads,
            perform_initialization=False,
            use_cpu_initialization=device.type == "cpu",
            deterministic_mode=deterministic,
            gradient_accumulation_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            apply_rope_fusion=False,
            **_expert_options(arch, device),
        )


def _expert_options(arch: Architecture, device: torch.device) -> dict[str, Any]:
    """Qwen3-MoE's routing in Megatron's terms: no balancing loss, nothing dropped.

    Softmax over the chosen experts alone equals softmax over all with the chosen ones scaled to sum 1.
    """
    # gloo has no all-to-all. The default is refused together with variable_seq_lengths, even for a dense model.
    dispatcher = "allgather" if arch.is_moe and device.type == "cpu" else "alltoall"
    if not arch.is_moe:
        return {"moe_token_dispatcher_type": dispatcher}
    return {
        "moe_token_dispatcher_type": dispatcher,
        "num_moe_experts": arch.num_experts,
        "moe_ffn_hidden_size": arch.moe_ffn_size,
        "moe_router_topk": arch.experts_per_token,
        "moe_router_pre_softmax": not arch.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": False,
    }


def needs_equal_lengths(config: LearnerConfig, arch: Architecture, device: torch.device) -> bool:
    """Whether all micro-batches of a step must be of one length: for the interleaved schedule, and for Megatron's all-gather of
    tokens between the experts' ranks."""
    return config.parallel.virtual_stages > 1 or (arch.is_moe and device.type == "cpu")


# Without no_grad the distributed optimizer's float32 shards are slices with a history, and torch warns at each step.
@torch.no_grad()
def build_optimizer(config: LearnerConfig, model: BuiltModel) -> Any:
    """AdamW over the loaded weights (in 16 bits it copies them to its float32 masters here)."""
    section = config.optimizer
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=section.lr,
            weight_decay=section.weight_decay,
            adam_beta1=section.betas[0],
            adam_beta2=section.betas[1],
            adam_eps=section.eps,
            clip_grad=section.clip_grad_norm,
            bf16=model.config.bf16,
            fp16=model.config.fp16,
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=section.distributed,
        ),
        list(model.ddps),
        use_gloo_process_groups=False,
    )
    for group in optimizer.param_groups:
        if "fused" in group:  # torch's AdamW: one pass over the moments rather than nine
            group["fused"] = True
    if model.config.fp16:
        scale = LossScale.of(section, model.device)
        scale.share(optimizer)
        model.config.grad_scale_func = optimizer.scale_loss
    return optimizer
