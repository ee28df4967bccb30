"""Poison: tasks whose groups keep failing are out for the rest of the run. Pure bookkeeping; its counts are in the journal, so a restart is
not a new chance.

Where nothing but failures comes back, it is not the tasks: ``hopeless`` says so, and the service ends the run.
"""

from __future__ import annotations

from collections.abc import Callable

from services.coordinator.config import CoordinatorConfig


class Poison:
    """See the module. ``record(kind, *values)`` is for the journal; ``failures`` and ``out`` are what it has brought back."""

    def __init__(
        self, config: CoordinatorConfig, record: Callable[..., None], failures: dict[int, int], out: dict[int, str]
    ) -> None:
        self._config, self._record = config, record
        self.failures = failures  # task index -> groups that failed in a row
        self.out = out  # task index -> why
        self.hopeless = ""
        self._failed_in_a_row = 0  # groups, of any task

    def failed(self, task_index: int, reason: str, *, permanent: bool) -> None:
        """A group of the task failed; ``permanent``: any other of it would, too."""
        failures = self.failures[task_index] = self.failures.get(task_index, 0) + 1
        if permanent or failures >= self._config.task_attempts:
            self.out[task_index] = reason
            self._record("event", "task_out", {"task_index": task_index, "reason": reason})
        self._record("task", task_index, failures, self.out.get(task_index))
        self._failed_in_a_row += not permanent
        if self._failed_in_a_row >= self._config.max_failed_in_a_row:
            self.hopeless = (
                f"The last {self._failed_in_a_row} groups failed, with none judged between "
                f"(coordinator.max_failed_in_a_row). The last reason: {reason.rstrip('.')}."
            )

    def judged(self, task_index: int) -> None:
        """A group of the task was judged. A task that is out stays out: this group is older."""
        self._failed_in_a_row = 0
        if self.failures.pop(task_index, 0):
            self._record("task", task_index, 0, self.out.get(task_index))

    def all_out(self, num_tasks: int) -> bool:
        """Whether no task is left, which is hopeless."""
        if len(self.out) < num_tasks:
            return False
        self.hopeless = f"All {num_tasks} tasks are out. The last one: {[*self.out.values()][-1].rstrip('.')}."
        return True
