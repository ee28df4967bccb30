"""What the learner's loop needs of a policy. ``MegatronPolicy`` trains; ``FakePolicy`` is for tests of everything around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from services.learner.packing import TrainSample


@dataclass(frozen=True)
class StepStats:
    """One step of the run, the same on every rank: one optimizer step, or ``num_updates`` of them with mini-batches or epochs.

    Means and shares are over the loss tokens that were trained on, each as often as it was, before its update. ``ratio_*`` and
    ``ess_share`` (effective sample size / tokens) are of the trained policy to the behaviour policy, the engine's log-probs; the
    quantiles ``ratio_p01`` and ``ratio_p99`` are told within [0.135, 7.39], to 1%.
    ``logprob_gap_*``, ``kl_k1`` and ``kl_k3`` compare the engine's log-probs with the trainer's own at the start of the step, in
    nats: for samples of the current version that is the mismatch of the two programs, for older ones also the drift.
    ``weight_mean`` is of the importance weights after truncation or masking, as configured. ``kl_reference`` is None where the
    loss has no KL. ``routing_*`` are None where the engine told no experts: the share of the tokens that were sent to the engine's, and
    of these in all layers the share for which the trainer would have chosen another set. ``grad_norm`` is the mean over the updates, ``lr`` that of the last.
    """

    loss: float
    grad_norm: float
    lr: float
    num_samples: int
    num_tokens: int
    num_loss_tokens: int
    num_microbatches: int
    clip_share: float
    ratio_mean: float
    ratio_max: float
    logprob_gap_mean: float
    logprob_gap_max: float
    kl_k3: float
    entropy: float
    step_s: float
    num_updates: int = 1
    clip_low_share: float = 0.0
    clip_high_share: float = 0.0
    ratio_min: float = 1.0
    ratio_p01: float = 1.0
    ratio_p99: float = 1.0
    ess_share: float = 1.0
    weight_mean: float = 1.0
    masked_share: float = 0.0
    truncated_share: float = 0.0
    kl_k1: float = 0.0
    kl_reference: float | None = None
    routing_replayed_share: float | None = None
    routing_changed_share: float | None = None
    num_overflows: int = 0  # float16: optimizer steps that were skipped; their gradient norm counts as 0
    loss_scale: float = 1.0


class Policy(Protocol):
    """One rank's part of the policy. All methods but the properties are collective over the learner's world."""

    device: torch.device

    @property
    def is_sender(self) -> bool:
        """Whether this rank sends its stage's weights."""

    @property
    def stage(self) -> int:
        """Pipeline stage of this rank."""

    def train_step(self, samples: Sequence[TrainSample], *, total_steps_done: int) -> StepStats:
        """The optimizer steps of one global batch, which every rank passes whole.

        Raises:
            TrainingError: before anything changed; or the step ended in its middle, and its message says so.
        """

    def rest(self) -> None:
        """Called before a wait of unknown length."""

    def reference_logprobs(self, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
        """Log-probs of the completions by the start model: float32[C] per sample, on every rank."""

    def plan_hf_tensors(self, dtype: torch.dtype | None = None) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """This stage's tensors: (Hugging Face name, full shape, dtype)."""

    def iter_hf_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the plan, in its order."""

    def begin_checkpoint(self, root: Path, step: int, extra: dict[str, Any]) -> None:
        """Begin to write one; durable, atomic, and finished by ``finish_checkpoint``. At most one at a time.

        Raises:
            CheckpointError: it can't be begun.
        """

    def finish_checkpoint(self, *, wait: bool) -> int | None:
        """The step of the checkpoint that has become whole since the last call, or none; with ``wait`` when it is.

        Raises:
            CheckpointError: it could not be written.
        """

    def load_checkpoint(self, path: Path) -> tuple[int, dict[str, Any]]:
        """(step, extra) of the checkpoint; the policy goes on from there."""

    def export_hf(self, target: Path) -> None:
        """A Hugging Face checkpoint folder."""
