"""The ``[coordinator]`` section."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from common.config import StrictModel, idle_settings
from protocol.config import check_address


class CoordinatorConfig(StrictModel):
    """What is trained on, in which order, and how long anything may take."""

    bind: str = ""  # what to listen on; empty: run.address
    insecure: bool = False  # listen on a non-loopback address without run.key_file; elsewhere it changes nothing
    tasks: Path
    shuffle: bool = True

    group_size: int = Field(default=8, ge=2, le=1024)
    groups_per_step: int = Field(default=8, ge=1, le=4096)
    max_steps: int = Field(ge=1)
    max_epochs: int = Field(default=0, ge=0)  # 0: the tasks are gone through as often as the steps take
    max_staleness: int = Field(default=1, ge=0, le=64)  # optimizer steps
    bypass_window: int = Field(default=0, ge=0)  # groups; see services/coordinator/core/admission.py
    min_group_size: int = Field(default=2, ge=2)
    dynamic_sampling: bool = False  # refill groups whose rewards are all equal
    # Of dynamic_sampling: after so many the step goes on with what there is.
    max_filtered_per_step: int = Field(default=16, ge=0)

    heartbeat_interval_s: float = Field(default=1.0, gt=0)
    node_timeout_s: float = Field(default=15.0, gt=0)  # silence after which a node is taken for dead
    generate_timeout_s: float = Field(default=300.0, gt=0)  # one generate lease
    score_timeout_s: float = Field(default=60.0, gt=0)  # one score lease
    step_timeout_s: float = Field(default=3600.0, gt=0)  # one step of the learner, from its batch to its commit
    generate_attempts: int = Field(default=3, ge=1)  # of a group
    score_attempts: int = Field(default=3, ge=1)  # of a sample
    death_attempts: int = Field(default=3, ge=3)  # nodes that may die on a group, or on a sample, before it is given up
    task_attempts: int = Field(default=2, ge=1)  # groups of a task that may fail in a row before the task is out
    max_failed_in_a_row: int = Field(default=64, ge=1)  # groups of any task: then it is the system, and the run ends
    disk_timeout_s: float = Field(default=600.0, gt=0)  # a full disk; nothing is acknowledged meanwhile
    keep_trained_steps: int = Field(default=0, ge=0)  # steps whose samples the journal keeps beyond what a replay needs
    no_progress_timeout_s: float = Field(default=900.0, gt=0)  # the run ends with an error when nothing happens so long
    leave_timeout_s: float = Field(default=10.0, gt=0)  # at the end: for the nodes to leave

    @field_validator("bind")
    @classmethod
    def _an_address(cls, value: str) -> str:
        return check_address(value) if value else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_group_size > self.group_size:
            raise ValueError(f"min_group_size {self.min_group_size} is over group_size {self.group_size}")
        most = self.max_staleness * self.groups_per_step
        if self.bypass_window > most:
            raise ValueError(
                f"bypass_window {self.bypass_window} is over max_staleness * groups_per_step = {most}: "
                "no step could ever be filled (services/coordinator/core/admission.py has the proof)"
            )
        if self.node_timeout_s < 3 * self.heartbeat_interval_s:
            raise ValueError("node_timeout_s must be at least 3 * heartbeat_interval_s, or one late beat kills a node")
        if idle := idle_settings(self, {"max_filtered_per_step": (self.dynamic_sampling, "dynamic_sampling = true")}):
            raise ValueError("; ".join(idle))
        if self.dynamic_sampling and not self.max_filtered_per_step:
            raise ValueError(
                "dynamic_sampling = true filters nothing with max_filtered_per_step = 0: change one of them"
            )
        return self
