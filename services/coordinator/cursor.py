"""Where the run stands in its tasks: a pure function of the number of draws, so one integer in the journal restores it."""

from __future__ import annotations

import random


def task_order(num_tasks: int, epoch: int, *, seed: int, shuffle: bool) -> list[int]:
    """Task indices of one epoch: all of them, once each."""
    order = list(range(num_tasks))
    if shuffle:
        random.Random(f"forebay/{seed}/{epoch}").shuffle(order)
    return order


class TaskCursor:
    """Draw ``n`` (from 0) -> the task index of that draw."""

    def __init__(self, num_tasks: int, *, seed: int, shuffle: bool, max_epochs: int) -> None:
        self.num_tasks = num_tasks
        self._seed = seed
        self._shuffle = shuffle
        self._max_draws = max_epochs * num_tasks or None
        self._epoch = -1
        self._order: list[int] = []

    def task_index(self, draw: int) -> int | None:
        """The task of ``draw``, or None past the last epoch."""
        if self._max_draws is not None and draw >= self._max_draws:
            return None
        epoch, position = divmod(draw, self.num_tasks)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, task_order(self.num_tasks, epoch, seed=self._seed, shuffle=self._shuffle)
        return self._order[position]
