"""Which samples the journal still keeps: those of live groups, and those that a learner that resumes would ask for again. Pure bookkeeping."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable


class Retention:
    """``record(kind, *values)`` is for the journal; the other arguments are what it has brought back."""

    def __init__(
        self, record: Callable[..., None], kept_steps: deque[tuple[int, int]], forgotten_before: int, *, at_once: int
    ) -> None:
        self._record = record
        self._steps = kept_steps  # (step, its oldest group)
        self._forgotten_before = forgotten_before  # group id
        self._at_once = at_once  # groups

    def add(self, step: int, oldest_group: int) -> None:
        """The batch of ``step`` is fixed."""
        self._steps.append((step, oldest_group))

    def forget(self, last_step: int, *, live: Iterable[int], next_group_id: int) -> None:
        """Nobody will ask for the steps up to ``last_step`` again; ``live`` are the ids of groups that are not trained."""
        while self._steps and self._steps[0][0] <= last_step:
            self._steps.popleft()
        oldest = min([first for _, first in self._steps] + list(live), default=next_group_id)
        # A learner saves once in many steps. What it needs no more then goes a little with each commit, not all in one long transaction.
        oldest = min(oldest, self._forgotten_before + self._at_once)
        if oldest > self._forgotten_before:
            self._record("forget_samples", oldest)
            self._record("forget_results", oldest)
            self._record("meta", "forgotten_before", str(oldest))
            self._forgotten_before = oldest

    @property
    def first_step(self) -> int | None:
        """The oldest step whose batch can be handed out again; None: there is none."""
        return self._steps[0][0] if self._steps else None
