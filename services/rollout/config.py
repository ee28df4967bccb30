"""The ``[rollout]`` section."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from common.config import StrictModel, idle_settings


class FakeEngineConfig(StrictModel):
    """A scripted engine without a model, for tests of everything around it. It never stands in for vLLM in a claim."""

    completion: str = "```python\ndef f(x):\n    return x\n```"  # {sample} in it is another text in each sample
    tokens_per_s: float = Field(default=2000.0, gt=0)  # for each sequence
    num_tokens: int = Field(default=16, gt=0)
    fail_every: int = Field(default=0, ge=0)  # every n-th group fails; 0: none
    engine_dies_at: int = Field(default=0, ge=0)  # at the n-th group, and the node with it; 0: never
    fail_update_at: int = Field(default=0, ge=0)  # the update to this version fails; 0: none
    # What happens to prompts that hold one of these texts; "": none does.
    never_ends_on: str = ""  # the generation goes on for ever, and yields nothing
    dies_on: str = ""  # the process kills itself, as an engine does that crashes
    slow_on: str = ""  # its first completion stands still after its first token, until the next weight update
    update_s: float = Field(default=0.0, ge=0)  # an update takes so long at least
    keep_weights_from: int = Field(default=0, ge=0)  # from this version on it says that it took weights, and didn't
    logprobs_tell_weights: bool = False  # log-probs depend on the weights, as a model's do (learner.fake_gap_alarm)


class RolloutConfig(StrictModel):
    """The inference engine and how much it takes on at once."""

    engine: Literal["vllm", "fake"] = "vllm"  # with fake, vLLM's settings are let pass, so that any config can be tried
    max_concurrent_groups: int = Field(default=16, ge=1)  # the node's credits
    tensor_parallel: int = Field(default=1, ge=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_num_seqs: int = Field(default=128, ge=1)
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)  # only where there is one
    cpu_kv_cache_gib: int = Field(default=1, ge=1)  # only where there is no GPU
    num_threads: int = Field(default=0, ge=0)  # OpenMP threads of a CPU engine; 0: vLLM's choice
    enforce_eager: bool = True
    # Each completion from a random generator of its own: generated again by the same weights (its node died, say) it is the same. For looking
    # into a run; vLLM then samples sequence by sequence, which costs speed, most of all on a GPU.
    seeded_sampling: bool = False
    keep_prefix_cache: bool = False  # over a weight update: then old weights' cache serves new tokens
    fake: FakeEngineConfig = FakeEngineConfig()

    @model_validator(mode="after")
    def _nothing_idle(self) -> Self:
        if problems := idle_settings(self, {"fake": (self.engine == "fake", "engine = 'fake'")}):
            raise ValueError("; ".join(problems))
        return self
