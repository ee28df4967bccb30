"""Which task comes next, which groups may start, and which are trained next: the last two bound staleness. Pure functions.

Let G = groups per step, S = max_staleness, W = bypass_window, v = the learner's committed version, and A = groups admitted,
net of those whose place was given back (failed, filtered).

Admission: one more group may start only if, counting it, ``A <= (S + 1 + v) * G - W``.
Bypass: a group is overtaken, i.e. sees younger groups trained before it, at most W times.

Bound: every group g is trained at a learner version <= (version at its admission) + S.
Proof: let g be admitted at version v as the A-th. Trained before g are at most the A - 1 older groups that hold a place, and
at most W younger ones, so n <= A - 1 + W groups. g is in step number floor(n / G) + 1, at which the learner stands at version
floor(n / G) <= floor((A - 1 + W) / G) <= floor(((S + 1 + v) * G - 1) / G) = S + v. Engines that generate for g hold version v
or newer (older ones are fenced), so no token of g is older than v, and its staleness is at most S. []

Progress: with v steps trained, v * G places are used up, so (S + 1) * G - W >= G groups may be live as long as W <= S * G
(checked in the config): a step can always be filled. The oldest unfinished group can hold a step back, but its leases are
bounded in time and number, after which it gives its place back.

``tests/unit/test_admission.py`` drives both functions with random speeds and checks the bound.
"""

from __future__ import annotations

import random
from collections.abc import Sequence


def max_admitted(version: int, *, groups_per_step: int, max_staleness: int, bypass_window: int) -> int:
    """Most groups that may hold a place while the learner's committed version is ``version``."""
    return (max_staleness + 1 + version) * groups_per_step - bypass_window


def select_batch(
    group_ids: Sequence[int],
    ready: Sequence[bool],
    overtaken: Sequence[int],
    *,
    groups_per_step: int,
    bypass_window: int,
) -> list[int] | None:
    """The groups of the next step, or None while it can't be filled.

    Args:
        group_ids: untrained groups in order of admission.
        ready: whether each is fully judged.
        overtaken: how many younger groups were trained before each so far.

    Ready groups are taken in order of admission; an unready one may be passed while it stays within ``bypass_window``.
    Only the oldest unready group can be at its bound: all that overtakes a younger one overtakes it too.
    """
    picked: list[int] = []
    room = None  # how many groups may still pass the oldest unready one
    for group_id, is_ready, passed in zip(group_ids, ready, overtaken, strict=True):
        if is_ready and (room is None or room > 0):
            picked.append(group_id)
            room = None if room is None else room - 1
            if len(picked) == groups_per_step:
                return picked
        elif not is_ready and room is None:
            room = bypass_window - passed
    return None


def task_order(num_tasks: int, epoch: int, *, seed: int, shuffle: bool) -> list[int]:
    """Task indices of one epoch: all of them, once each."""
    order = list(range(num_tasks))
    if shuffle:
        random.Random(f"forebay/{seed}/{epoch}").shuffle(order)
    return order


class TaskCursor:
    """Draw ``n`` (from 0) -> the task index of that draw. A pure function, so one integer in the journal restores it."""

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
