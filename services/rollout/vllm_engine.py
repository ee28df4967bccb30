"""vLLM behind the ``Engine`` protocol: token ids in, token ids out, new weights while requests are in flight.

Uses ``AsyncLLM`` of vLLM 0.32-0.33. Each completion is a request of its own, so that it leaves as soon as it is finished; the
group's shared prompt is computed once by vLLM's prefix cache. vLLM itself labels the tokens with the weight version that
sampled them (``CompletionOutput.weight_versions``): those labels become the version segments.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
import structlog
import torch
from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from common.errors import ConfigError, ForebayError
from protocol.codec import Array
from protocol.config import RunConfig
from protocol.messages import Sampling, WeightUpdateMember, WeightUpdatePlan
from protocol.versions import Segment, VersionTag
from services.rollout.config import RolloutConfig
from services.rollout.engine import Completion, EngineDied, PromptTooLong
from services.rollout.vllm_plugin import BACKEND, PARENT_ENV
from services.rollout.vllm_sockets import SocketFolder

log = structlog.get_logger()


def _cpu_environment(config: RolloutConfig) -> None:
    """vLLM's CPU platform is configured through the environment, before its processes start."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(config.cpu_kv_cache_gib)
    if shutil.which("g++") is None:  # vLLM compiles its sampler with torch.compile, which needs a compiler on CPU
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        log.warning("no_compiler", effect="vLLM's sampler runs uncompiled, and slower", remedy="install g++")
    if config.num_threads:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["OMP_NUM_THREADS"] = str(config.num_threads)


class _TokenCounter(StatLoggerBase):
    """vLLM's own count of sampled tokens, for the ledger."""

    def __init__(self) -> None:
        self.generated = 0

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> _TokenCounter:
        return self  # vLLM takes a factory; one engine, one counter

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        if iteration_stats is not None:
            self.generated += iteration_stats.num_generation_tokens

    def log_engine_initialized(self) -> None: ...


@contextlib.contextmanager
def _engine_alive() -> Iterator[None]:
    """Around every call of vLLM, which fails with an error of its own once its engine process is gone."""
    try:
        yield
    except EngineDeadError:
        raise EngineDied("vLLM's engine process died. Its last words are above; start this node again.") from None


class VllmEngine:
    """See the module. One instance per process."""

    def __init__(self, run: RunConfig, config: RolloutConfig) -> None:
        self.run = run
        self.config = config
        self.num_workers = config.tensor_parallel
        self.holds = VersionTag(version=0)
        self._llm: AsyncLLM | None = None
        self._sockets: SocketFolder | None = None
        self._tokenizer: Any = None
        self._counter = _TokenCounter()
        self._group_key = ""

    @property
    def llm(self) -> AsyncLLM:
        """The engine, once started."""
        assert self._llm is not None, "start() comes first"
        return self._llm

    async def start(self) -> None:
        """Load the model and label its weights version 0."""
        self._llm = await asyncio.to_thread(self._build)
        self._tokenizer = self._llm.get_tokenizer()
        await self._llm.update_weight_version("0")
        warm_up = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY)
        await self._one([1, 2, 3], 0, warm_up)  # compiles the sampler: seconds that no lease should wait for
        self._counter.generated = 0

    def _build(self) -> AsyncLLM:
        self._sockets = SocketFolder()
        if not torch.cuda.is_available():
            _cpu_environment(self.config)
        if self.run.routing_replay:
            _require_routes()
        os.environ[PARENT_ENV] = str(os.getpid())
        args = AsyncEngineArgs(
            model=str(self.run.model),
            dtype=self.config.dtype,
            tensor_parallel_size=self.config.tensor_parallel,
            max_model_len=self.run.max_prompt_tokens + self.run.max_completion_tokens,
            max_num_seqs=self.config.max_num_seqs,
            gpu_memory_utilization=self.config.gpu_memory_utilization,
            enforce_eager=self.config.enforce_eager,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
            seed=self.run.seed,
            use_tqdm_on_load=False,
            enable_return_routed_experts=self.run.routing_replay,
            disable_log_stats=False,  # the ledger's count of tokens comes from the stats
        )
        return AsyncLLM.from_engine_args(args, stat_loggers=[self._counter])

    def generated_tokens(self) -> int:
        """By vLLM's count."""
        return self._counter.generated

    def render(self, prompt: str) -> list[int]:
        """Token ids of the user's message in the model's chat template, ready for the answer."""
        chat = [{"role": "user", "content": prompt}]
        ids = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        return [int(token) for token in ids]

    async def generate(
        self, prompt: str, sample_indices: Sequence[int], sampling: Sampling, seed: int
    ) -> AsyncIterator[Completion]:
        """See ``Engine.generate``. ``seed`` is used with ``rollout.seeded_sampling`` only; else one generator serves the engine."""
        prompt_ids = self.render(prompt)
        if len(prompt_ids) > self.run.max_prompt_tokens:
            raise PromptTooLong(f"{len(prompt_ids)} tokens, run.max_prompt_tokens is {self.run.max_prompt_tokens}")
        params = [self._params(sampling, seed + index) for index in sample_indices]
        tasks = [asyncio.create_task(self._one(prompt_ids, *each)) for each in zip(sample_indices, params, strict=True)]
        try:
            for next_done in asyncio.as_completed(tasks):
                yield await next_done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _params(self, sampling: Sampling, seed: int) -> SamplingParams:
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=1.0,
            top_k=0,
            max_tokens=sampling.max_tokens,
            seed=seed if self.config.seeded_sampling else None,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def _one(self, prompt_ids: list[int], sample_index: int, params: SamplingParams) -> Completion:
        final: RequestOutput | None = None
        with _engine_alive():
            async for output in self.llm.generate({"prompt_token_ids": prompt_ids}, params, uuid.uuid4().hex):
                final = output
        assert final is not None
        completion = _completion(sample_index, prompt_ids, final.outputs[0])
        if self.run.routing_replay:
            return dataclasses.replace(completion, routed_experts=_routes(completion, final.outputs[0]))
        return completion

    async def form_groups(self, plan: WeightUpdatePlan, member: WeightUpdateMember) -> None:
        """All workers join the senders' groups, unless they are in them already."""
        if plan.group_key == self._group_key:
            return
        self._group_key = ""
        init = {
            "stores": plan.stores,
            "group_key": plan.group_key,
            "first_rank": member.first_rank,
            "world_size": plan.world_size,
            "timeout_s": plan.timeout_s,
        }
        with _engine_alive():
            await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init))
        self._group_key = plan.group_key

    async def update_weights(self, plan: WeightUpdatePlan) -> float:
        """Pause with requests kept, receive, load, label, resume.

        In ``keep`` mode requests stay where they are and go on with the new weights; their next tokens start a new segment.
        """
        started = time.monotonic()
        with _engine_alive():
            await self.llm.pause_generation(mode="keep", clear_cache=not self.config.keep_prefix_cache)
            try:
                await self.llm.start_weight_update()
                await self.llm.update_weights(WeightTransferUpdateRequest(update_info={"version": plan.tag.version}))
                await self.llm.finish_weight_update(str(plan.tag.version))
                self.holds = plan.tag
            finally:
                await self.llm.resume_generation()
        return time.monotonic() - started

    async def leave_groups(self) -> None:
        """Close the workers' groups; the next update forms new ones."""
        self._group_key = ""
        with _engine_alive():
            await self.llm.shutdown_weight_transfer_engine()

    async def close(self) -> None:
        """Stop vLLM's processes."""
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.to_thread(llm.shutdown)
            await asyncio.sleep(0)  # vLLM's output task sees the end of its engine and ends, too
        if self._sockets is not None:
            self._sockets.close()


def _completion(sample_index: int, prompt_ids: list[int], output: CompletionOutput) -> Completion:
    token_ids = list(output.token_ids)
    assert output.logprobs is not None
    assert output.weight_versions is not None
    logprobs = [position[token].logprob for token, position in zip(token_ids, output.logprobs, strict=True)]
    return Completion(
        sample_index=sample_index,
        prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
        completion_ids=np.asarray(token_ids, dtype=np.int32),
        logprobs=np.asarray(logprobs, dtype=np.float32),
        text=output.text.encode("utf-8", "replace").decode(),
        finish_reason=str(output.finish_reason),
        segments=[
            Segment(version=int(span.version), num_tokens=span.end - span.start) for span in output.weight_versions
        ],
    )


def _routes(completion: Completion, output: CompletionOutput) -> Array:
    """The experts of the prompt's and the completion's tokens but the last, which nothing was computed from.

    Raises:
        ForebayError: vLLM has not told those of all these tokens.
    """
    routed_experts = output.routed_experts
    num_rows = len(completion.prompt_ids) + len(completion.completion_ids) - 1
    if routed_experts is None or len(routed_experts) != num_rows:
        raise ForebayError(
            f"vLLM told the experts of {0 if routed_experts is None else len(routed_experts)} tokens of {num_rows}, and run.routing_replay needs all. "
            "Set it to false, or report this with vLLM's version."
        )
    return routed_experts


def _require_routes() -> None:
    """
    Raises:
        ConfigError: this vLLM can't say which experts it chose.
    """
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        raise ConfigError(
            "run.routing_replay: vLLM tells its experts through its second model runner alone, which needs Triton for this machine's "
            "device (on a CPU: the package triton-cpu). Install it, or set run.routing_replay = false."
        )
