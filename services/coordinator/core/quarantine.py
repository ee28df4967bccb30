"""Quarantine: tasks whose groups keep failing are out for the rest of the run. The counts are in the journal, so a restart does not reset
them.

Where nothing but failures comes back, the tasks are not the cause: ``give_up_reason`` is set, and the core ends the run.
"""

from __future__ import annotations

from collections.abc import Callable

from services.coordinator.config import CoordinatorConfig


class Quarantine:
    """See the module. ``record(kind, *values)`` is for the journal; ``failures`` and ``tasks`` are restored from it."""

    def __init__(
        self, config: CoordinatorConfig, record: Callable[..., None], failures: dict[int, int], tasks: dict[int, str]
    ) -> None:
        self._config, self._record = config, record
        self.failures = failures  # task index -> groups that failed in a row
        self.tasks = tasks  # task index -> why
        self.give_up_reason = ""
        self._failed_in_a_row = 0  # groups, of any task

    def failed(self, task_index: int, reason: str, *, permanent: bool) -> None:
        """A group of the task failed; ``permanent``: any other of it would, too."""
        failures = self.failures[task_index] = self.failures.get(task_index, 0) + 1
        if permanent or failures >= self._config.task_attempts:
            self.tasks[task_index] = reason
            self._record("event", "task_quarantined", {"task_index": task_index, "reason": reason})
        self._record("task", task_index, failures, self.tasks.get(task_index))
        self._failed_in_a_row += not permanent
        if self._failed_in_a_row >= self._config.max_failed_in_a_row:
            self.give_up_reason = (
                f"The last {self._failed_in_a_row} groups failed, with none judged between "
                f"(coordinator.max_failed_in_a_row). The last reason: {reason.rstrip('.')}."
            )

    def judged(self, task_index: int) -> None:
        """A group of the task was judged. A quarantined task stays so: this group is older."""
        self._failed_in_a_row = 0
        if self.failures.pop(task_index, 0):
            self._record("task", task_index, 0, self.tasks.get(task_index))

    def has_all(self, num_tasks: int) -> bool:
        """Whether no task is left, which ends the run."""
        if len(self.tasks) < num_tasks:
            return False
        self.give_up_reason = (
            f"All {num_tasks} tasks are quarantined. The last one: {[*self.tasks.values()][-1].rstrip('.')}."
        )
        return True
