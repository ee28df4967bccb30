"""Config of the learner: everything below its service loop. Imports neither torch nor Megatron."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from common.config import StrictModel

Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class ParallelConfig(StrictModel):
    """How one copy of the model is cut, in Megatron's terms. Checked against model and world by ``layouts.layout_violations``.

    The world is tensor * context * data * pipeline ranks. Experts are cut another way: expert_tensor * expert * their data * pipeline.
    """

    tensor: int = Field(default=1, ge=1, description="ranks that share each matrix (Megatron tensor parallelism)")
    pipeline: int = Field(default=1, ge=1, description="stages the layers are cut into (Megatron 1F1B schedule)")
    virtual_stages: int = Field(
        default=1,
        ge=1,
        description="parts of each stage, dealt in turns (Megatron's interleaved schedule); above 1 needs pipeline > 1",
    )
    first_stage_layers: int | None = Field(
        default=None,
        ge=1,
        description="layers of the first stage; none: as many as the others. Leaves room for embeddings",
    )
    last_stage_layers: int | None = Field(
        default=None,
        ge=1,
        description="layers of the last stage; none: as many as the others. Leaves room for the head",
    )
    context: int = Field(default=1, ge=1, description="ranks that share the tokens of each sequence")
    expert: int = Field(default=1, ge=1, description="ranks that share the experts of a layer, each with whole ones")
    expert_tensor: int | None = Field(
        default=None, ge=1, description="ranks that share each matrix of an expert; none: as tensor"
    )
    sequence: bool = Field(
        default=False,
        description="Megatron sequence parallelism: norms run on 1/tensor of the tokens; needs tensor > 1",
    )

    @property
    def expert_tensor_size(self) -> int:
        """``expert_tensor`` with its default filled in."""
        return self.tensor if self.expert_tensor is None else self.expert_tensor


class RecomputeConfig(StrictModel):
    """Activations that are computed again in the backward pass instead of kept. Changes memory and time, not the numbers."""

    granularity: Literal["none", "selective", "full"] = Field(
        default="none", description="selective: some parts of each layer; full: whole layers"
    )
    modules: tuple[Literal["core_attn", "mlp", "moe"], ...] = Field(
        default=("core_attn",), min_length=1, description="of selective: the parts (moe: router and experts)"
    )
    method: Literal["uniform", "block"] = Field(
        default="uniform",
        description="of full; uniform: keep the input of every num_layers-th layer; block: recompute num_layers of a stage",
    )
    num_layers: int = Field(default=1, ge=1, description="of full; see method")


class OptimizerConfig(StrictModel):
    """AdamW by Megatron, with the gradient clipped to a global norm before each step."""

    lr: float = Field(default=1e-6, gt=0.0, description="learning rate after the warm-up, constant from there")
    betas: tuple[Probability, Probability] = Field(default=(0.9, 0.999), description="decay of the two Adam moments")
    eps: float = Field(default=1e-8, gt=0.0, description="added to the root of the second moment")
    weight_decay: float = Field(default=0.0, ge=0.0, description="decoupled; not applied to biases and norms")
    clip_grad_norm: float = Field(default=1.0, gt=0.0, description="largest global L2 norm of the gradient")
    warmup_steps: int = Field(default=0, ge=0, description="steps over which lr rises linearly from lr / warmup_steps")
    distributed: bool = Field(default=False, description="shard the optimizer state over data-parallel ranks (ZeRO-1)")
    offload: bool = Field(
        default=False,
        description="masters and moments are on the device only within the optimizer's step, else on the host",
    )
    initial_loss_scale: float = Field(
        default=2.0**16, ge=1.0, description="float16 only: the loss is multiplied by it, so that small gradients last"
    )
    loss_scale_window: int = Field(
        default=1000,
        ge=1,
        description="float16 only: steps without overflow until the scale doubles; an overflow halves it",
    )


class ObjectiveConfig(StrictModel):
    """Advantages and the clipped objective."""

    advantage: Literal["grpo", "dr_grpo"] = Field(default="grpo", description="see services/learner/advantages.py")
    std_floor: float = Field(
        default=1e-4, gt=0.0, description="in units of reward: GRPO divides by max(group std, std_floor)"
    )
    clip_low: float = Field(default=0.2, gt=0.0, lt=1.0, description="the ratio's gain is cut below 1 - clip_low")
    clip_high: float = Field(default=0.28, gt=0.0, description="the ratio's gain is cut above 1 + clip_high (DAPO)")


class LearnerConfig(StrictModel):
    """The learner's section of the config file."""

    policy: Literal["megatron", "fake"] = Field(
        default="megatron", description="fake: no model, for tests of everything around it"
    )
    fake_step_s: float = Field(default=0.05, ge=0.0, description="seconds of one step of the fake policy")
    fake_die_at_step: int = Field(
        default=0, ge=0, description="the fake policy kills its process within this step; 0: never"
    )
    fake_gap_alarm: float | None = Field(
        default=None,
        gt=0.0,
        description="nats per token: as logprob_gap_alarm, of the fake policy (with rollout.fake.logprobs_tell_weights)",
    )
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    max_tokens_per_microbatch: int = Field(
        default=4096, ge=2, description="token budget of one packed micro-batch; also the longest prompt + completion"
    )
    recompute: RecomputeConfig = RecomputeConfig()
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="of weights and activations; the other two have float32 masters, and are slow on CPUs without AMX;"
        " float16 skips steps whose gradient overflows",
    )
    offload_while_waiting: bool = Field(
        default=False,
        description="while the learner waits for a batch, its weights, gradients and optimizer are on the host",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda where there is one")
    num_threads: int | None = Field(
        default=None,
        ge=1,
        description="torch threads per rank; none: torch's choice. 1 where ranks or engines share the cores",
    )
    checkpoint_interval_steps: int = Field(default=20, ge=1, description="optimizer steps between checkpoints")
    async_checkpoints: bool = Field(
        default=True,
        description="write them while the next steps run; costs a copy of weights and optimizer state in host memory",
    )
    export_interval_steps: int | None = Field(
        default=None, ge=1, description="optimizer steps between Hugging Face exports, besides that at the end"
    )
    keep_checkpoints: int = Field(default=2, ge=1, description="older checkpoints are deleted")
    logprob_gap_alarm: float | None = Field(
        default=0.5,
        gt=0.0,
        description="nats per token: a step whose mean |trainer - engine| log-prob is above it is refused; none: never",
    )
    wait_timeout_s: float = Field(
        default=600.0, gt=0.0, description="longest wait of one rank for another inside a collective operation"
    )
    stop_timeout_s: float = Field(
        default=5.0, gt=0.0, description="when the run was stopped within a step: for the answer to its commit"
    )
    deterministic: bool = Field(
        default=False, description="torch's deterministic algorithms: equal runs give equal bits, where they cost speed"
    )
    publish_dtype: Literal["parameters", "float32", "bfloat16"] = Field(
        default="parameters", description="of the weights on their way to the engines; parameters: as they are trained"
    )
    host: str = Field(
        default="",
        description="address of this machine for the engines; empty: that of the interface towards the coordinator",
    )
