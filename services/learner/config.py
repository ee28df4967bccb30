"""Config of the learner: everything below its service loop. Imports neither torch nor Megatron."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from common.config import StrictModel, idle_settings
from protocol.config import WILDCARDS

Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"]
Aggregation = Literal["token", "sequence", "constant"]
KlKind = Literal["k1", "k2", "k3"]

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

    @model_validator(mode="after")
    def _nothing_idle(self) -> RecomputeConfig:
        full = (self.granularity == "full", "granularity = 'full'")
        needs = {
            "modules": (self.granularity == "selective", "granularity = 'selective'"),
            "method": full,
            "num_layers": full,
        }
        if problems := idle_settings(self, needs):
            raise ValueError("; ".join(problems))
        return self


class OptimizerConfig(StrictModel):
    """AdamW by Megatron, with the gradient clipped to a global norm before each step."""

    lr: float = Field(default=1e-6, ge=0.0, description="learning rate after the warm-up")
    allow_zero_lr: bool = Field(
        default=False, description="let lr = 0 pass: everything runs and is measured, nothing is learned"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="of the learning rate after the warm-up; counts optimizer steps"
    )
    decay_steps: int = Field(
        default=0,
        ge=0,
        description="linear, cosine: optimizer steps until lr_min is reached, warm-up included; lr_min from there",
    )
    lr_min: float = Field(default=0.0, ge=0.0, description="linear, cosine: the learning rate at the end of the decay")
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
        default=2.0**12,
        ge=1.0,
        description="float16 only: the loss is multiplied by it, so that small gradients last (the loss is a sum over tokens)",
    )
    loss_scale_window: int = Field(
        default=1000,
        ge=1,
        description="float16 only: steps without overflow until the scale doubles; an overflow halves it",
    )

    @model_validator(mode="after")
    def _a_rate_that_makes_sense(self) -> OptimizerConfig:
        if self.lr == 0.0 and not self.allow_zero_lr:
            raise ValueError(
                "lr = 0 would train nothing. Give a learning rate, or set allow_zero_lr = true to run and measure everything else"
            )
        if self.schedule == "constant" and (self.decay_steps or self.lr_min):
            raise ValueError("decay_steps and lr_min belong to schedule = 'linear' or 'cosine'; it is 'constant'")
        if self.schedule != "constant" and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule = '{self.schedule}' needs decay_steps over warmup_steps = {self.warmup_steps}; it is "
                f"{self.decay_steps}. For a whole run: coordinator.max_steps * objective.minibatches * objective.epochs"
            )
        if self.lr_min > self.lr:
            raise ValueError(f"lr_min = {self.lr_min:g} is over lr = {self.lr:g}")
        return self


class ObjectiveConfig(StrictModel):
    """Advantages, the objective and what is added to it. The formulas: services/learner/README.md, section Algorithms."""

    advantage: Advantage = Field(default="grpo", description="see services/learner/advantages.py")
    std_floor: float = Field(
        default=1e-4, gt=0.0, description="in units of reward: grpo and reinforce_pp divide by max(std, std_floor)"
    )
    kind: Literal["clipped", "gspo", "cispo"] = Field(
        default="clipped", description="see services/learner/objectives.py"
    )
    clip_low: float = Field(
        default=0.2, gt=0.0, le=1.0, description="the ratio's gain is cut below 1 - clip_low; 1: not at all"
    )
    clip_high: float = Field(default=0.28, gt=0.0, description="the ratio's gain is cut above 1 + clip_high (DAPO)")
    aggregation: Aggregation | None = Field(
        default=None,
        description="token: mean over the loss tokens of the global batch (the default); sequence: mean over sequences of their "
        "token means (the default of gspo); constant: sum over tokens / (sequences * constant_length) (Dr. GRPO)",
    )
    constant_length: int = Field(
        default=0, ge=0, description="aggregation = constant: tokens; usually run.max_completion_tokens"
    )
    decoupled: bool = Field(
        default=False,
        description="clip against the weights at the start of the step, and weigh by them / behaviour policy (AReaL)",
    )
    importance: Literal["none", "full", "truncate", "mask"] = Field(
        default="none",
        description="what becomes of the weight to the behaviour policy: nothing, min(w, importance_max), or 0 outside of "
        "[importance_min, importance_max]; see services/learner/importance.py",
    )
    importance_level: Literal["token", "sequence"] = Field(default="token", description="whose weight it is")
    importance_max: float = Field(default=2.0, ge=1.0, description="truncate, mask: the largest weight")
    importance_min: float = Field(default=0.0, ge=0.0, le=1.0, description="mask: the smallest weight")
    minibatches: int = Field(default=1, ge=1, description="optimizer steps that a batch is dealt to")
    epochs: int = Field(default=1, ge=1, description="times that a batch is gone through")
    kl_coef: float = Field(
        default=0.0, ge=0.0, description="of the KL to the start model, nats per token; 0: the KL is not computed"
    )
    kl_in: Literal["loss", "reward"] = Field(default="loss", description="where the KL is added")
    kl_kind: KlKind = Field(default="k3", description="see services/learner/kl.py")
    kl_importance: bool = Field(
        default=False, description="kl_in = loss: times the ratio to the behaviour policy, with gradient (unbiased)"
    )
    entropy_coef: float = Field(default=0.0, ge=0.0, description="of the entropy bonus, nats per token")
    overlong_buffer: int = Field(
        default=0, ge=0, description="tokens before max_completion_tokens over which a penalty grows (DAPO); 0: none"
    )
    overlong_penalty: float = Field(default=1.0, gt=0.0, description="in units of reward, at the full length")
    overlong_filter: bool = Field(
        default=False, description="truncated completions count as rewards of their group but are not trained on"
    )

    @property
    def aggregation_or_default(self) -> Aggregation:
        """``aggregation``, or what the objective's paper has."""
        return self.aggregation or ("sequence" if self.kind == "gspo" else "token")

    @property
    def has_reference(self) -> bool:
        """Whether log-probs of the start model are needed."""
        return self.kl_coef > 0.0

    @model_validator(mode="after")
    def _parts_that_go_together(self) -> ObjectiveConfig:
        if problems := [*self._weight_problems(), *self._other_problems(), *self._idle()]:
            raise ValueError("; ".join(problems))
        return self

    def _weight_problems(self) -> list[str]:
        found = []
        if self.decoupled and self.importance == "none":
            found.append(
                "decoupled = true without an importance weight would train on old samples as if they were new: set importance "
                "= 'truncate', 'mask' or 'full'"
            )
        if not self.decoupled and self.importance in ("full", "truncate"):
            found.append(
                f"importance = '{self.importance}' needs decoupled = true: the ratio is to the behaviour policy already, and "
                "the weight would count twice (importance = 'mask' works without: it only leaves tokens out)"
            )
        if self.kind == "gspo" and self.importance != "none" and self.importance_level == "token":
            found.append("kind = 'gspo' has one ratio a sequence: set importance_level = 'sequence'")
        return found

    def _idle(self) -> list[str]:
        """Settings that nothing would read as the others are."""
        uses_start_model = self.kl_coef > 0.0
        needs = {
            "importance_min": (self.importance == "mask", "importance = 'mask'"),
            "importance_max": (self.importance in ("truncate", "mask"), "importance = 'truncate' or 'mask'"),
            "importance_level": (self.importance != "none", "an importance other than 'none'"),
            "std_floor": (self.advantage in ("grpo", "reinforce_pp"), "advantage = 'grpo' or 'reinforce_pp'"),
            "overlong_penalty": (self.overlong_buffer > 0, "overlong_buffer over 0"),
            "kl_kind": (uses_start_model, "kl_coef over 0"),
            "kl_in": (uses_start_model, "kl_coef over 0"),
        }
        return idle_settings(self, needs)

    def _other_problems(self) -> list[str]:
        found = []
        if (self.aggregation == "constant") != bool(self.constant_length):
            found.append(
                "aggregation = 'constant' and constant_length go together: give both (constant_length = "
                "run.max_completion_tokens, usually) or neither"
            )
        if self.kl_coef and self.kl_in == "loss" and self.kl_kind == "k1" and not self.kl_importance:
            found.append(
                "kl_kind = 'k1' in the loss has a gradient of mean zero, which pulls nowhere: set kl_importance = true, or take "
                "k2 or k3, or kl_in = 'reward'"
            )
        if self.kl_importance and (not self.kl_coef or self.kl_in == "reward"):
            found.append(
                "kl_importance belongs to kl_in = 'loss' with kl_coef over 0: samples carry the KL of a reward"
            )
        return found


class LearnerConfig(StrictModel):
    """The learner's section of the config file."""

    policy: Literal["megatron", "fake"] = Field(
        default="megatron",
        description="fake: no model, for tests of everything around it; settings of a real one are let pass, so that any config can be tried",
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
    share_prefixes: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: the prompt of a group is computed once per micro-batch where that is cheaper; see services/learner/packing.py",
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

    @field_validator("host")
    @classmethod
    def _one_address(cls, value: str) -> str:
        if value in WILDCARDS:
            raise ValueError("must name an address of this machine: it is given to the engines, and they connect to it")
        return value

    @model_validator(mode="after")
    def _nothing_idle(self) -> LearnerConfig:
        fake = (self.policy == "fake", "policy = 'fake'")
        float16 = (self.dtype == "float16", "dtype = 'float16'")
        problems = [
            *idle_settings(self, dict.fromkeys(("fake_step_s", "fake_die_at_step", "fake_gap_alarm"), fake)),
            *idle_settings(
                self.optimizer, dict.fromkeys(("initial_loss_scale", "loss_scale_window"), float16), prefix="optimizer."
            ),
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self
