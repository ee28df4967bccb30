"""What the learner's loop needs of a policy. ``MegatronPolicy`` trains; ``FakePolicy`` is for tests of everything around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from services.learner.packing import TrainSample


@dataclass(frozen=True)
class StepStats:
    """One optimizer step, the same on every rank. Means are over the loss tokens of the global batch, before the update.

    ``logprob_gap_*`` and ``kl_k3`` compare the engine's log-probs (behaviour) with the trainer's own at the start of the
    step, in nats: for samples of the current version that is the mismatch of the two programs, for older ones also the drift.
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
        """One optimizer step on the global batch, which every rank passes whole.

        Raises:
            TrainingError: before anything changed.
        """

    def rest(self) -> None:
        """Called before a wait of unknown length."""

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
