"""The trained policy on one rank: load, step, save, export, and its tensors for the broadcast.

    samples --check, reference and start log-probs where needed, plan--> optimizer steps: usually one
    each    --plan--> micro-batches of this data-parallel rank
            --Megatron's schedule: forward, objective, backward--> gradients / loss tokens of the global batch
            --checks: finite, log-prob gap--> clip --> AdamW

Every method but the plain properties is collective: all ranks of the world call it with the same arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from common.errors import InvariantError, TrainingError
from services.learner.architecture import read_architecture
from services.learner.config import LearnerConfig
from services.learner.losses import LossInputs, policy_loss
from services.learner.megatron import device_map, export, hf_weights
from services.learner.megatron.batch import DeviceBatch, even_out
from services.learner.megatron.checkpoint import Checkpointer
from services.learner.megatron.context import align
from services.learner.megatron.loss_scale import apply_gradients, gradient_norm
from services.learner.megatron.mcore import get_forward_backward_func
from services.learner.megatron.model import build_model, build_optimizer, choose_device, init_world, needs_equal_lengths
from services.learner.megatron.offload import DeviceMemory
from services.learner.megatron.reference import ReferenceWeights
from services.learner.megatron.rotary import Rotary
from services.learner.megatron.routing import replayed_shares
from services.learner.megatron.spec import LOCAL, parts_for
from services.learner.packing import MicroBatch, TrainSample, add_columns, pack, plan_microbatches
from services.learner.policy import StepStats
from services.learner.signs import Progress
from services.learner.token_statistics import MAX_NAMES, NUM_BINS, SUM_NAMES, TokenSums, Totals
from services.learner.updates import check_gap, check_samples, learning_rate, plan_updates

# Key of ours in the record that a checkpoint carries for its caller.
OPTIMIZER_STEPS = "policy.optimizer_steps"

log = structlog.get_logger()


class MegatronPolicy:
    """This rank's part of the policy and its optimizer.

    ``temperature`` is the engine's: all log-probs and the entropy are of ``softmax(logits / temperature)``, as it samples.
    ``deterministic`` makes torch refuse operations whose result may differ from run to run. ``progress`` hears what this rank is at.

    Raises:
        ConfigError: the model folder or the layout is wrong.
        ForebayError: the CPU is asked for on a machine with CUDA.
    """

    def __init__(
        self,
        config: LearnerConfig,
        model_path: Path | str,
        *,
        seed: int,
        deterministic: bool,
        temperature: float = 1.0,
        progress: Progress | None = None,
    ) -> None:
        self.config, self.temperature, self.seed = config, temperature, seed
        self.progress = progress or Progress()
        self.optimizer_steps = 0  # done so far; the learning rate counts them
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
        parameters = (parameter for _, parameter in self.model.named_parameters())
        self.reference = ReferenceWeights(parameters) if config.objective.has_reference else None
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
        if self.ranks.context_size > 1:
            self.alignment = self.ranks.context_size * math.lcm(2, self.alignment)

    @property
    def is_sender(self) -> bool:
        """Whether this rank sends its pipeline stage's weights to the engines: one rank per stage does."""
        return hf_weights.is_sender(self.ranks)

    @property
    def stage(self) -> int:
        """This rank's pipeline stage."""
        return self.ranks.pipeline

    @property
    def _counts(self) -> bool:
        """Whether this rank's log-probs and sums are added up over the world: tensor and context ranks computed the same."""
        return self.ranks.tensor == 0 and self.ranks.context == 0

    def train_step(self, samples: Sequence[TrainSample], *, total_steps_done: int) -> StepStats:
        """Trains on the global batch ``samples``, which is the same list on every rank; by default in one optimizer step.

        Raises:
            ConfigError: a sample is longer than a micro-batch may be.
            TrainingError: numbers of a sample that are not finite; no loss tokens; a loss or gradient that is not finite; the
                log-prob gap past its alarm. All ranks raise it together, and neither weights nor optimizer state have changed,
                unless the message says that some optimizer steps of several were done.
        """
        start, step, objective = time.perf_counter(), total_steps_done + 1, self.config.objective
        check_samples(samples, self.model.arch, step=step)
        samples = [sample for sample in samples if len(sample.completion_ids)]
        if not samples:
            raise TrainingError(f"Step {step} has no loss tokens: all its completions are empty. Nothing was updated.")
        updates = plan_updates(
            samples, minibatches=objective.minibatches, epochs=objective.epochs, seed=(self.seed, step)
        )
        samples = self._with_fixed_logprobs(samples, step, several=len(updates) > 1)
        # Of several, ``_with_fixed_logprobs`` has looked at the gap before the first.
        alarm = None if len(updates) > 1 else self.config.logprob_gap_alarm
        done = []
        for number, indices in enumerate(updates):
            so_far = f"{number} of its {len(updates)} optimizer steps were done" if number else "nothing was updated"
            done.append(self._update([samples[i] for i in indices], step, so_far, gap_alarm=alarm))
        totals = functools.reduce(lambda a, b: a + b, (update.totals for update in done))
        replayed = replayed_shares(samples, self.model.chunks, self.device)
        has_kl = objective.has_reference and objective.kl_in == "loss"
        return StepStats(
            **totals.means(),
            **replayed,
            grad_norm=sum(update.grad_norm for update in done) / len(done),
            lr=done[-1].lr,
            num_samples=len(samples),
            num_tokens=sum(sample.length for sample in samples),
            num_loss_tokens=sum(len(sample.completion_ids) for sample in samples),
            num_microbatches=sum(update.num_microbatches for update in done),
            num_updates=len(done),
            kl_reference=totals.sums["kl_reference"] / totals.num_loss_tokens if has_kl else None,
            step_s=time.perf_counter() - start,
            num_overflows=sum(update.overflowed for update in done),
            loss_scale=float(self.optimizer.get_loss_scale()),
        )

    def _with_fixed_logprobs(self, samples: list[TrainSample], step: int, *, several: bool) -> list[TrainSample]:
        """The samples with the log-probs that stay the same over the optimizer steps of a batch, where those are needed.

        With one optimizer step, the weights at its start are those that are differentiated: they need no pass of their own.
        """
        objective = self.config.objective
        if objective.has_reference and objective.kl_in == "loss":
            samples = [
                dataclasses.replace(sample, reference_logprobs=logprobs)
                for sample, logprobs in zip(samples, self.reference_logprobs(samples), strict=True)
            ]
        if several:
            samples = [
                dataclasses.replace(sample, start_logprobs=logprobs)
                for sample, logprobs in zip(samples, self.logprobs(samples), strict=True)
            ]
            gaps = [np.abs(sample.start_logprobs - sample.logprobs) for sample in samples]
            check_gap(float(np.concatenate(gaps).mean(dtype=np.float64)), self.config.logprob_gap_alarm, step=step)
        return samples

    def _update(self, samples: Sequence[TrainSample], step: int, so_far: str, *, gap_alarm: float | None) -> _Update:
        """One optimizer step. ``so_far``: what a failure leaves behind."""
        batches = self._local_batches(samples)
        self.memory.need_gradients()
        with device_map.scope(self.device):
            for ddp in self.model.ddps:
                ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            totals = self._reduce_stats(self._run_schedule(batches, self._train_forward, forward_only=False))
            if not math.isfinite(totals.sums["loss"]):
                raise TrainingError(f"The loss of step {step} is {totals.sums['loss']}; {so_far}.")
            check_gap(totals.gap, gap_alarm, step=step)
            self.progress.part("the optimizer's step")
            self.memory.need_optimizer()
            norm = gradient_norm(self.optimizer)  # none: float16 overflowed, and this step is skipped
            grad_norm = 0.0 if norm is None else norm
            if not math.isfinite(grad_norm):
                raise TrainingError(f"The gradient norm of step {step} is {grad_norm}; {so_far}.")
            lr = learning_rate(self.config.optimizer, self.optimizer_steps)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            if norm is not None:
                apply_gradients(self.optimizer, norm)
                self.optimizer_steps += 1
            self.memory.release_optimizer()
        return _Update(totals, grad_norm, lr, len(batches) * self.ranks.data_size, overflowed=norm is None)

    def reference_logprobs(self, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
        """As ``logprobs``, by the start model, which chooses its own experts. Only with ``objective.kl_coef`` over 0."""
        if self.reference is None:
            raise InvariantError("The start model's weights are only kept where objective.kl_coef is over 0.")
        self.memory.need_weights()
        with self.reference.in_place():
            return self.logprobs([dataclasses.replace(sample, routed_experts=None) for sample in samples])

    @torch.no_grad()
    def logprobs(self, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
        """The policy's log-prob of each completion token: float32[C] per sample, on every rank."""
        batches = self._local_batches(samples)
        bounds = np.cumsum([0] + [len(sample.completion_ids) for sample in samples])
        flat = torch.zeros(int(bounds[-1]), device=self.device)
        with device_map.scope(self.device):
            results = self._run_schedule(batches, self._logprob_forward, forward_only=True)
        if self._counts:
            for batch, logprobs_L in zip(batches, results, strict=self.ranks.is_last_stage):
                rows = np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in batch.sample_indices] or [[]])
                flat[torch.from_numpy(rows.astype(np.int64)).to(self.device)] = logprobs_L[: len(rows)]
        self.progress.part("the log-probs of all ranks")
        dist.all_reduce(flat)
        return [part.astype(np.float32) for part in np.split(flat.cpu().numpy(), bounds[1:-1])]

    def begin_checkpoint(self, root: Path, step: int, extra: dict[str, Any]) -> None:
        """Weights, optimizer and random states into ``root/step-XXXXXXXX``, in the background; see ``checkpoint``."""
        self.memory.need_optimizer()
        with device_map.scope(self.device):
            self.checkpointer.begin(Path(root), step, {**extra, OPTIMIZER_STEPS: self.optimizer_steps})
        self.memory.release_optimizer()

    def finish_checkpoint(self, *, wait: bool) -> int | None:
        """The step of a checkpoint that has become whole since the last call; see ``checkpoint``."""
        return self.checkpointer.finish(wait=wait)

    def load_checkpoint(self, path: Path) -> tuple[int, dict[str, Any]]:
        """Goes on from the checkpoint folder ``path``, of any layout; returns (step, extra) as they were saved."""
        self.memory.need_optimizer()
        with device_map.scope(self.device):
            step, extra = self.checkpointer.load(Path(path))
        self.memory.release_optimizer()
        self.optimizer_steps = extra.pop(OPTIMIZER_STEPS, step)
        return step, extra

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
            samples,
            max_tokens=self.config.max_tokens_per_microbatch,
            num_ranks=self.ranks.data_size,
            hidden_size=self.model.arch.hidden_size,
            alignment=self.alignment,
            share_prefixes=self.config.share_prefixes == "auto"
            and parts_for(self.device) is LOCAL
            and self.ranks.context_size == 1,
        )
        packed = (pack(samples, pieces, alignment=self.alignment) for pieces in plan[self.ranks.data])
        return [add_columns(batch, samples) for batch in packed]

    def _to_device(self, batch: MicroBatch) -> DeviceBatch:
        return DeviceBatch.of(
            batch,
            self.rotary,
            self.model.config.params_dtype,
            vocab_size=self.model.arch.vocab_size,
            temperature=self.temperature,
            entropy_gradient=self.config.objective.entropy_coef != 0.0,
            context=(self.ranks.context, self.ranks.context_size),
            sequence=(self.ranks.tensor, self.ranks.tensor_size) if self.config.parallel.sequence else (0, 1),
        )

    def _run_schedule(
        self, batches: Sequence[MicroBatch], forward: Callable[..., Any], *, forward_only: bool
    ) -> list[Any]:
        """Megatron's schedule over the micro-batches; returns what the loss functions recorded (last stage only)."""
        ddps, num_real = self.model.ddps, len(batches)
        self.memory.need_weights()
        for ddp in ddps:
            ddp.train(not forward_only)
        seq_length = self.config.max_tokens_per_microbatch  # each micro-batch tells its own
        if self.ranks.context_size > 1:
            batches = [align(batch, self.ranks.context_size, total=self.alignment) for batch in batches]
        if needs_equal_lengths(self.config, self.model.arch, self.device):
            multiple = self.ranks.pipeline_size if len(ddps) > 1 else 1
            batches = even_out(batches, multiple, alignment=self.alignment, device=self.device)
            seq_length = len(batches[0].tokens)
        feeds = [self._feed(batches, "log-probs" if forward_only else "loss") for _ in ddps]
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

    def _feed(self, batches: Sequence[MicroBatch], what: str) -> Iterator[DeviceBatch]:
        for number, batch in enumerate(batches, 1):
            self.progress.part(f"{what} of micro-batch {number} of {len(batches)}")
            yield self._to_device(batch)

    def _forward(self, batches: Iterator[DeviceBatch], model: Any) -> tuple[DeviceBatch, Tensor]:
        batch = next(batches)
        return batch, model(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed)

    def _train_forward(self, batches: Iterator[DeviceBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch, output = self._forward(batches, model)
        return output, functools.partial(self._loss, batch)

    def _loss(self, batch: DeviceBatch, output: Tensor) -> tuple[Tensor, Tensor, TokenSums]:
        logprobs_T, entropy_T = output
        inputs = LossInputs(
            logprobs_T=logprobs_T,
            behaviour_T=batch.behaviour_logprobs,
            advantages_T=batch.advantages,
            mask_T=batch.loss_mask,
            slots_T=batch.slots,
            num_sequences=batch.num_sequences,
            entropy_T=entropy_T,
            start_T=batch.start_logprobs,
            reference_T=batch.reference_logprobs,
        )
        loss, count, sums = policy_loss(inputs, self.config.objective)
        # The ranks that share these positions all have the loss of all of them; one counts them.
        return loss, count if self.ranks.context == 0 else torch.zeros_like(count), sums

    def _logprob_forward(self, batches: Iterator[DeviceBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        _, output = self._forward(batches, model)

        def collect(output: Tensor, non_loss_data: bool = True) -> Tensor:
            return output[0]

        return output, collect

    def _reduce_stats(self, local: list[TokenSums]) -> Totals:
        """Sums and maxima over all micro-batches and ranks."""
        sums = torch.zeros(len(SUM_NAMES) + NUM_BINS, dtype=torch.float64, device=self.device)
        maxima = torch.zeros(len(MAX_NAMES), dtype=torch.float64, device=self.device)
        for item in local:
            maxima = torch.maximum(maxima, item.maxima)
            if self._counts:
                sums += item.sums
        self.progress.part("the sums over all ranks")
        dist.all_reduce(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        return Totals.of(sums.tolist(), maxima.tolist())


@dataclass(frozen=True)
class _Update:
    """What one optimizer step leaves for the statistics."""

    totals: Totals
    grad_norm: float
    lr: float
    num_microbatches: int
    overflowed: bool
