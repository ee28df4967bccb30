"""The trained policy on one rank: load, step, save, export, and its tensors for the broadcast.

    samples --plan--> micro-batches of this data-parallel rank
            --Megatron's schedule: forward, objective, backward--> gradients / loss tokens of the global batch
            --checks: finite, log-prob gap--> clip --> AdamW

Every method but the plain properties is collective: all ranks of the world call it with the same arguments.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from common.errors import TrainingError
from services.learner.architecture import read_architecture
from services.learner.config import LearnerConfig, OptimizerConfig
from services.learner.losses import MAX_NAMES, SUM_NAMES, TokenSums, clipped_objective
from services.learner.megatron import device_map, export, hf_weights
from services.learner.megatron.batch import DeviceBatch, even_out
from services.learner.megatron.checkpoint import Checkpointer
from services.learner.megatron.loss_scale import apply_gradients, gradient_norm
from services.learner.megatron.mcore import get_forward_backward_func
from services.learner.megatron.model import build_model, build_optimizer, choose_device, init_world, needs_equal_lengths
from services.learner.megatron.offload import DeviceMemory
from services.learner.megatron.rotary import Rotary
from services.learner.megatron.vocab import logprobs_and_entropy
from services.learner.packing import MicroBatch, TrainSample, completion_slice, pack, plan_microbatches
from services.learner.policy import StepStats

log = structlog.get_logger()


class MegatronPolicy:
    """This rank's part of the policy and its optimizer.

    ``temperature`` is the engine's: all log-probs and the entropy are of ``softmax(logits / temperature)``, as it samples.
    ``deterministic`` makes torch refuse operations whose result may differ from run to run.

    Raises:
        ConfigError: the model folder or the layout is wrong.
        ForebayError: the CPU is asked for on a machine with CUDA.
    """

    def __init__(
        self, config: LearnerConfig, model_path: Path | str, *, seed: int, deterministic: bool, temperature: float = 1.0
    ) -> None:
        self.config, self.temperature = config, temperature
        self.model_path = Path(model_path)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        torch.use_deterministic_algorithms(deterministic)
        arch = read_architecture(self.model_path)
        self.device = choose_device(config.device)
        self.ranks = init_world(config, arch, self.device, seed=seed)
        with device_map.scope(self.device):
            self.model = build_model(config, arch, self.ranks, self.device, deterministic=deterministic)
            hf_weights.load_hf(self.model, self.model_path)
            self.optimizer = build_optimizer(config, self.model)
        self.memory = DeviceMemory(
            self.model.ddps,
            self.optimizer,
            offload_optimizer=config.optimizer.offload,
            offload_while_waiting=config.offload_while_waiting,
        )
        self.memory.release_optimizer()
        self.rotary = Rotary.of(arch, self.device)
        self.checkpointer = Checkpointer(
            self.model, self.optimizer, source=self.model_path, timeout_s=config.wait_timeout_s
        )
        # Sequence parallelism cuts the tokens over the tensor ranks; tensor cores like multiples of 8.
        self.alignment = math.lcm(
            self.ranks.tensor_size if config.parallel.sequence else 1, 8 if self.device.type == "cuda" else 1
        )

    @property
    def is_sender(self) -> bool:
        """Whether this rank sends its pipeline stage's weights to the engines: one rank per stage does."""
        return self.ranks.tensor == 0 and self.ranks.data == 0

    @property
    def stage(self) -> int:
        """This rank's pipeline stage."""
        return self.ranks.pipeline

    def train_step(self, samples: Sequence[TrainSample], *, total_steps_done: int) -> StepStats:
        """One optimizer step on the global batch ``samples``, which is the same list on every rank.

        Raises:
            ConfigError: a sample is longer than a micro-batch may be.
            TrainingError: no loss tokens; a loss or gradient that is not finite; the log-prob gap past its alarm. All ranks
                raise it together, and neither weights nor optimizer state have changed.
        """
        start = time.perf_counter()
        batches = self._local_batches(samples)
        self.memory.need_gradients()
        with device_map.scope(self.device):
            for ddp in self.model.ddps:
                ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            local = self._run_schedule(batches, self._train_forward, forward_only=False)
            totals, maxima = self._reduce_stats(local)
            self._check_forward(totals, total_steps_done)
            self.memory.need_optimizer()
            norm = gradient_norm(self.optimizer)  # none: float16 overflowed, and this step is skipped
            grad_norm = 0.0 if norm is None else norm
            if not math.isfinite(grad_norm):
                raise TrainingError(
                    f"The gradient norm of step {total_steps_done + 1} is {grad_norm}; nothing was updated."
                )
            lr = learning_rate(self.config.optimizer, total_steps_done)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            if norm is not None:
                apply_gradients(self.optimizer, norm)
            self.memory.release_optimizer()
        count = totals["num_loss_tokens"]
        return StepStats(
            loss=totals["loss"] / count,
            grad_norm=grad_norm,
            lr=lr,
            num_samples=len(samples),
            num_tokens=sum(sample.length for sample in samples),
            num_loss_tokens=int(count),
            num_microbatches=len(batches) * self.ranks.data_size,
            clip_share=totals["num_clipped"] / count,
            ratio_mean=totals["ratio"] / count,
            ratio_max=maxima["ratio"],
            logprob_gap_mean=totals["gap"] / count,
            logprob_gap_max=maxima["gap"],
            kl_k3=totals["kl"] / count,
            entropy=totals["entropy"] / count,
            step_s=time.perf_counter() - start,
            num_overflows=int(norm is None),
            loss_scale=float(self.optimizer.get_loss_scale()),
        )

    @torch.no_grad()
    def logprobs(self, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
        """The policy's log-prob of each completion token: float32[C] per sample, on every rank."""
        batches = self._local_batches(samples)
        bounds = np.cumsum([0] + [len(sample.completion_ids) for sample in samples])
        flat = torch.zeros(int(bounds[-1]), device=self.device)
        with device_map.scope(self.device):
            results = self._run_schedule(batches, self._logprob_forward, forward_only=True)
        if self.ranks.tensor == 0:
            for batch, logprobs_T in zip(batches, results, strict=self.ranks.is_last_stage):
                for i, first in zip(batch.sample_indices, batch.cu_seqlens.tolist(), strict=False):
                    flat[bounds[i] : bounds[i + 1]] = logprobs_T[completion_slice(samples[i], first)]
        dist.all_reduce(flat)
        return [part.astype(np.float32) for part in np.split(flat.cpu().numpy(), bounds[1:-1])]

    def begin_checkpoint(self, root: Path, step: int, extra: dict[str, Any]) -> None:
        """Weights, optimizer and random states into ``root/step-XXXXXXXX``, in the background; see ``checkpoint``."""
        self.memory.need_optimizer()
        with device_map.scope(self.device):
            self.checkpointer.begin(Path(root), step, extra)
        self.memory.release_optimizer()

    def finish_checkpoint(self, *, wait: bool) -> int | None:
        """The step of a checkpoint that has become whole since the last call; see ``checkpoint``."""
        return self.checkpointer.finish(wait=wait)

    def load_checkpoint(self, path: Path) -> tuple[int, dict[str, Any]]:
        """Goes on from the checkpoint folder ``path``, of any layout; returns (step, extra) as they were saved."""
        self.memory.need_optimizer()
        with device_map.scope(self.device):
            loaded = self.checkpointer.load(Path(path))
        self.memory.release_optimizer()
        return loaded

    def export_hf(self, target: Path) -> None:
        """Writes a Hugging Face model folder, with config and tokenizer of the model it started from; see ``export``."""
        self.memory.need_weights()
        export.export_hf(Path(target), self.model_path, self.model)

    def plan_hf_tensors(self, dtype: torch.dtype | None = None) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """(HF name, shape, dtype) of this stage's tensors in the order of sending; see ``hf_weights``."""
        return hf_weights.plan_hf_tensors(self.model, dtype)

    def iter_hf_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yields (HF name, full tensor) of this stage in that order, on every tensor rank; see ``hf_weights``."""
        self.memory.need_weights()
        return hf_weights.iter_hf_tensors(self.model, dtype)

    def rest(self) -> None:
        """Before a wait: weights, gradients and optimizer go to the host, where that is configured. Whoever needs them next gets them."""
        freed = self.memory.rest()
        if freed:
            log.debug("offloaded", bytes=freed)

    def _local_batches(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        plan = plan_microbatches(
            [sample.length for sample in samples],
            max_tokens=self.config.max_tokens_per_microbatch,
            num_ranks=self.ranks.data_size,
            hidden_size=self.model.arch.hidden_size,
            alignment=self.alignment,
        )
        return [pack(samples, indices, alignment=self.alignment) for indices in plan[self.ranks.data]]

    def _run_schedule(
        self, batches: Sequence[MicroBatch], forward: Callable[..., Any], *, forward_only: bool
    ) -> list[Any]:
        """Megatron's schedule over the micro-batches; returns what the loss functions recorded (last stage only)."""
        ddps, num_real = self.model.ddps, len(batches)
        self.memory.need_weights()
        for ddp in ddps:
            ddp.train(not forward_only)
        seq_length = self.config.max_tokens_per_microbatch  # each micro-batch tells its own
        if needs_equal_lengths(self.config, self.model.arch, self.device):
            multiple = self.ranks.pipeline_size if len(ddps) > 1 else 1
            batches = even_out(batches, multiple, alignment=self.alignment, device=self.device)
            seq_length = len(batches[0].tokens)
        dtype = self.model.config.params_dtype
        feeds = [(DeviceBatch.of(batch, self.rotary, dtype) for batch in batches) for _ in ddps]
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=feeds if len(feeds) > 1 else feeds[0],
            model=list(ddps),
            num_microbatches=len(batches),
            seq_length=seq_length,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results[:num_real]

    def _forward(self, batches: Iterator[DeviceBatch], model: Any) -> tuple[DeviceBatch, Tensor]:
        batch = next(batches)
        return batch, model(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed)

    def _train_forward(self, batches: Iterator[DeviceBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch, output = self._forward(batches, model)
        return output, functools.partial(self._loss, batch)

    def _loss(self, batch: DeviceBatch, logits: Tensor) -> tuple[Tensor, Tensor, TokenSums]:
        logprobs_T, entropy_T = self._logprobs(batch, logits)
        loss_sum, sums = clipped_objective(
            logprobs_T,
            batch.behaviour_logprobs,
            batch.advantages,
            batch.loss_mask,
            clip_low=self.config.objective.clip_low,
            clip_high=self.config.objective.clip_high,
            entropy_T=entropy_T,
        )
        return loss_sum, batch.num_loss_tokens, sums

    def _logprobs(self, batch: DeviceBatch, logits: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs_and_entropy(logits[0], batch.labels, self.model.arch.vocab_size, temperature=self.temperature)

    def _logprob_forward(self, batches: Iterator[DeviceBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch, output = self._forward(batches, model)

        def collect(logits: Tensor, non_loss_data: bool = True) -> Tensor:
            return self._logprobs(batch, logits)[0]

        return output, collect

    def _reduce_stats(self, local: list[TokenSums]) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and maxima over all micro-batches and ranks, by name."""
        sums = torch.zeros(len(SUM_NAMES), dtype=torch.float64, device=self.device)
        maxima = torch.zeros(len(MAX_NAMES), dtype=torch.float64, device=self.device)
        for item in local:
            maxima = torch.maximum(maxima, item.maxima)
            if self.ranks.tensor == 0:  # the tensor ranks computed the same
                sums += item.sums
        dist.all_reduce(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        return dict(zip(SUM_NAMES, sums.tolist(), strict=True)), dict(zip(MAX_NAMES, maxima.tolist(), strict=True))

    def _check_forward(self, totals: dict[str, float], total_steps_done: int) -> None:
        step, count = total_steps_done + 1, totals["num_loss_tokens"]
        if not count:
            raise TrainingError(f"Step {step} has no loss tokens: all its completions are empty.")
        if not math.isfinite(totals["loss"]):
            raise TrainingError(f"The loss of step {step} is {totals['loss']}; nothing was updated.")
        gap, alarm = totals["gap"] / count, self.config.logprob_gap_alarm
        # not <=: a gap that is nan is past any alarm.
        if alarm is not None and not gap <= alarm:
            raise TrainingError(
                f"Step {step}: engine and trainer differ by {gap:.4f} nats per token on average, the alarm is at {alarm}"
                " (learner.logprob_gap_alarm). Nothing was updated. Either the engine holds other weights than the trainer,"
                " or it samples with settings the trainer does not apply."
            )


def learning_rate(config: OptimizerConfig, total_steps_done: int) -> float:
    """The rate of the next step: linear from ``lr / warmup_steps`` up to ``lr``, then constant."""
    if total_steps_done >= config.warmup_steps:
        return config.lr
    return config.lr * (total_steps_done + 1) / config.warmup_steps
