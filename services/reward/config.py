"""The ``[reward]`` section of the config. Imports nothing heavy: it is read before any role starts."""

from __future__ import annotations

import os
import sys
from typing import Literal

from pydantic import Field

from common.config import StrictModel


class RewardWeights(StrictModel):
    """Weights of the parts of a reward. The reward is the weighted mean of the parts that a suite has, so it lies in [0, 1]."""

    correctness: float = Field(default=1.0, gt=0, le=1)
    # Counts in the measure of correctness: wrong code earns nothing by it. Python only.
    readability: float = Field(default=0.0, ge=0, le=1)
    # Of accepted programs whose suite has a ``solution`` to measure by.
    efficiency: float = Field(default=0.0, ge=0, le=1)


class RewardConfig(StrictModel):
    """How a reward node judges completions. The limits of one execution belong to the task (``TestSuite.limits``)."""

    workers: int = Field(default=0, ge=0, le=1024)  # judgements at a time; 0: one per core of the affinity mask
    weights: RewardWeights = RewardWeights()
    correctness: Literal["all", "fraction"] = "all"  # 1 if every test passed else 0, or the passed fraction
    unsafe: bool = False  # True: judge even where this node offers no isolation at all
    max_completion_kib: int = Field(default=256, ge=1, le=16384)  # longer completions are a compile_error
    max_memory_mib: int = Field(default=4096, ge=64)  # a suite that allows its programs more is refused here
    max_queue: int = Field(default=10_000, ge=1)  # completions that wait for a judge in this process
    cache_size: int = Field(default=20_000, ge=0)  # verdicts kept, of those that would come out the same again
    drain_timeout_s: float = Field(default=5.0, gt=0)  # after SIGTERM: for open leases; then they go to another node
    graders: list[str] = []  # entry points of ``forebay.graders`` that suites of kind ``custom`` may name
    python: str = ""  # interpreter that runs candidates; "": the base interpreter of this process

    @property
    def num_workers(self) -> int:
        """Judgements at a time, with 0 resolved to this machine."""
        return self.workers or len(os.sched_getaffinity(0))

    @property
    def interpreter(self) -> str:
        """Path of the sandbox's interpreter. The base one, so that the judge's own packages are not in the sandbox."""
        return self.python or getattr(sys, "_base_executable", None) or sys.executable
