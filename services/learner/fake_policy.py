"""A policy of one number that "trains" in no time, through the real transport, broadcast, checkpoints and loop."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from common.errors import TrainingError
from services.learner.checkpoints import CheckpointError, step_folder
from services.learner.packing import TrainSample
from services.learner.policy import StepStats
from services.learner.world import join


class FakePolicy:
    """Its weight is a running checksum of all it was trained on: equal histories give equal weights, and only those."""

    def __init__(self, *, step_s: float, rank: int = 0, die_at_step: int = 0, gap_alarm: float | None = None) -> None:
        self.device = torch.device("cpu")
        self.weight = 0.0
        self._finished: int | None = None
        self.is_sender = rank == 0  # every rank trains the same; this one speaks for all
        self._step_s, self._die_at_step, self._gap_alarm = step_s, die_at_step, gap_alarm

    stage = 0

    def train_step(self, samples: Sequence[TrainSample], *, total_steps_done: int) -> StepStats:
        """Fold the samples into the weight."""
        gap = self._logprob_gap(samples, total_steps_done + 1)
        time.sleep(self._step_s)
        if dist.is_initialized():  # as the ranks of a real policy do, in each step
            dist.all_reduce(torch.tensor(gap))
        if total_steps_done + 1 == self._die_at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        _check_routes(samples, total_steps_done + 1)
        for sample in samples:
            self.weight = (self.weight * 31 + float(sample.completion_ids.sum()) + sample.advantage) % 1_000_003
        num_loss_tokens = sum(len(sample.completion_ids) for sample in samples)
        return StepStats(
            loss=0.0,
            grad_norm=0.0,
            lr=0.0,
            num_samples=len(samples),
            num_tokens=sum(sample.length for sample in samples),
            num_loss_tokens=num_loss_tokens,
            num_microbatches=1,
            clip_share=0.0,
            ratio_mean=1.0,
            ratio_max=1.0,
            logprob_gap_mean=gap,
            logprob_gap_max=gap,
            kl_k3=0.0,
            entropy=0.0,
            step_s=self._step_s,
            routing_replayed_share=None
            if all(sample.routed_experts is None for sample in samples)
            else sum(sample.length for sample in samples if sample.routed_experts is not None)
            / sum(sample.length for sample in samples),
        )

    def reference_logprobs(self, samples: Sequence[TrainSample]) -> list[NDArray[np.float32]]:
        """What the fake engine says with the start weight 0: -1 nat per token."""
        return [np.full(len(sample.completion_ids), -1.0, np.float32) for sample in samples]

    def _logprob_gap(self, samples: Sequence[TrainSample], step: int) -> float:
        """How far the engine's log-probs are from those of this weight, or without an alarm from -1, in nats per token."""
        own = -1.0 if self._gap_alarm is None else -1.0 - self.weight % 97 / 97  # as ``fake_engine.weight_logprob``
        gap = float(np.mean([abs(float(sample.logprobs.mean()) - own) for sample in samples]))
        if self._gap_alarm is not None and gap > self._gap_alarm:
            raise TrainingError(
                f"Step {step}: engine and trainer differ by {gap:.4f} nats per token on average, the alarm is at "
                f"{self._gap_alarm} (learner.fake_gap_alarm). Nothing was updated."
            )
        return gap

    def rest(self) -> None:
        """There is nothing to put away."""

    def plan_hf_tensors(self, dtype: torch.dtype | None = None) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """One tensor."""
        return [("weight", (256,), torch.float32)]

    def iter_hf_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The weight, repeated."""
        yield "weight", torch.full((256,), self.weight, dtype=torch.float32)

    def begin_checkpoint(self, root: Path, step: int, extra: dict[str, Any]) -> None:
        """One JSON file in the folder that a real policy would write, at once."""
        if self.is_sender:
            folder = step_folder(root, step)
            partial = folder / "fake.json.partial"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                partial.write_text(json.dumps({"step": step, "extra": extra, "weight": self.weight}))
                partial.rename(folder / "fake.json")
            except OSError as error:
                raise CheckpointError(f"The checkpoint of step {step} was not written: {error}.") from error
        self._finished = step

    def finish_checkpoint(self, *, wait: bool) -> int | None:
        """It is finished as soon as it is begun."""
        finished, self._finished = self._finished, None
        return finished

    def load_checkpoint(self, path: Path) -> tuple[int, dict[str, Any]]:
        """See ``begin_checkpoint``."""
        data = json.loads((path / "fake.json").read_text())
        self.weight = data["weight"]
        return int(data["step"]), dict(data["extra"])

    def export_hf(self, target: Path) -> None:
        """The weight as JSON."""
        if not self.is_sender:
            return
        target.mkdir(parents=True, exist_ok=True)
        (target / "fake.json").write_text(json.dumps({"weight": self.weight}))


def _check_routes(samples: Sequence[TrainSample], step: int) -> None:
    """What the fake engine tells of each token must have come here with that token."""
    for sample in samples:
        if sample.routed_experts is None:
            continue
        first = np.concatenate([sample.prompt_ids, sample.completion_ids])[:-1] % 128  # as ``fake_engine.fake_routes``
        if not np.array_equal(
            sample.routed_experts.reshape(-1, 4), np.stack([first, first + 128, first + 64, first], axis=1)
        ):
            raise TrainingError(f"Step {step}: the routed_experts of {sample.name} are not those of its tokens.")


def init_world(*, timeout_s: float) -> int:
    """Join the world that this process is a rank of, if there is one; returns the rank."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0
    join("gloo", timeout_s=timeout_s)
    return dist.get_rank()
