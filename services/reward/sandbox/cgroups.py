"""Control groups, where this process may make some: one group a worker, with memory and number of processes limited for all in it.

Placeholder until measured: see WorkerGroups.find.
"""

from __future__ import annotations

from typing import Any


class WorkerGroups:
    """The groups of a judge's workers; does nothing where there are none."""

    @classmethod
    def find(cls) -> WorkerGroups:
        """Groups if this process may make them."""
        return cls()

    def add(self, worker: Any) -> bool:
        """Put a worker into a group of its own; whether there is one."""
        return False

    def limit(self, worker: Any, limits: Any) -> None:
        """Set the limits of the next run."""

    def corrected(self, worker: Any, report: Any) -> Any:
        """The report with what the group knows better."""
        return report

    def close(self) -> None:
        """Remove the groups."""
