"""The pool: all groups of the run, and what every event does to them.

Each method applies one event in memory and records what the journal must keep of it. Nothing leaves (acknowledgement, batch) before the
records are durable, so what others have seen is always in the journal.

Work that fails has bounded tries (``*_attempts`` in the config), counted in the journal, so a restart does not reset them. Then its group is
out and the place refilled; what that means for the task is in ``quarantine.py``.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from common.errors import InvariantError
from protocol.codec import Array
from protocol.verdicts import JudgeResult, Verdict
from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.admission import TaskCursor, max_admitted, select_batch
from services.coordinator.core.batches import Retention, batch_ages
from services.coordinator.core.effects import Effects
from services.coordinator.core.groups import Group, GroupStatus, Sample
from services.coordinator.core.ledger import Ledger
from services.coordinator.core.quarantine import Quarantine


@dataclass
class PoolState:
    """What a journal restores."""

    committed: int = 0
    num_draws: int = 0
    next_group_id: int = 0
    groups: dict[int, Group] = field(default_factory=dict)  # live ones only
    ledger: Ledger = field(default_factory=Ledger)
    staleness_counts: Counter[int] = field(default_factory=Counter)
    task_failures: dict[int, int] = field(default_factory=dict)  # task index -> groups that failed in a row
    quarantined: dict[int, str] = field(default_factory=dict)  # task index -> why
    kept_steps: deque[tuple[int, int]] = field(default_factory=deque)  # (step, its oldest group), of those with samples
    forgotten_before: int = 0  # group id


class Pool:
    """See the module. ``version`` is the committed policy version; steps are numbered from 1 and make version = step."""

    def __init__(self, config: CoordinatorConfig, cursor: TaskCursor, state: PoolState, effects: Effects) -> None:
        self._config = config
        self._effects, self._record = effects, effects.record
        self._cursor = cursor
        self.version = state.committed
        self.num_draws = state.num_draws
        self.next_group_id = state.next_group_id
        self.groups = state.groups
        self.ledger = state.ledger
        self.staleness_counts = state.staleness_counts
        self.quarantine = Quarantine(config, self._record, state.task_failures, state.quarantined)
        self._retention = Retention(
            self._record, state.kept_steps, state.forgotten_before, at_once=2 * config.groups_per_step
        )
        self.out_of_tasks = False
        self._meta: dict[str, str] = {}  # changed since the last flush
        self._written_ledger = self.ledger.model_copy()
        self._filtered_since_step = 0
        self._select_again = True  # since the last look for a batch, a group has become ready or gone

    # ---- admission ----

    def admit(self) -> list[Group]:
        """Start as many groups as the staleness bound and the run's length allow."""
        config = self._config
        room = max_admitted(
            self.version,
            groups_per_step=config.groups_per_step,
            max_staleness=config.max_staleness,
            bypass_window=config.bypass_window,
        )
        room = min(room, config.max_steps * config.groups_per_step)
        admitted: list[Group] = []
        while self.places_taken < room and (task_index := self._draw()) is not None:
            group = Group(self.next_group_id, self.num_draws - 1, task_index, self.version)
            self.next_group_id += 1
            self.groups[group.group_id] = group
            self.ledger.groups_admitted += 1
            self._record("group", group.group_id, group.draw, task_index, self.version, group.status)
            admitted.append(group)
        return admitted

    def _draw(self) -> int | None:
        """The next task that isn't quarantined; None: there is none."""
        if self.quarantine.has_all(self._cursor.num_tasks):
            return None
        while (task_index := self._cursor.task_index(self.num_draws)) is not None:
            self.num_draws += 1
            if task_index not in self.quarantine.tasks:
                return task_index
        self._select_again |= not self.out_of_tasks
        self.out_of_tasks = True
        return None

    @property
    def places_taken(self) -> int:
        """Groups that hold a place: trained and live ones."""
        return self.ledger.groups_trained + len(self.groups)

    @property
    def buffered_tokens(self) -> int:
        """Tokens of live groups."""
        return sum(group.num_tokens for group in self.groups.values())

    # ---- generation ----

    def add_sample(self, group_id: int, sample: Sample) -> bool:
        """Take a finished completion, and count its tokens. False: its place is filled or gone, and nothing is counted."""
        group, index = self.groups.get(group_id), sample.sample_index
        if (
            group is None
            or group.status is not GroupStatus.OPEN
            or index in group.samples
            or not 0 <= index < self._config.group_size
        ):
            return False
        group.samples[index] = sample
        self._record("sample", group_id, sample)
        self.ledger.received += sample.num_tokens
        return True

    def has_sample(self, group_id: int, sample_index: int, arrays: Mapping[str, Array]) -> bool:
        """Whether this very completion is here already."""
        group = self.groups.get(group_id)
        sample = group.samples.get(sample_index) if group else None
        return sample is not None and all(
            np.array_equal(sample.arrays[name], arrays[name]) for name in ("completion_ids", "logprobs")
        )

    def generation_failed(self, group_id: int, error: str, *, permanent: bool = False, node_id: str = "") -> bool:
        """A node could not generate a group. True: try again; False: the group is out (or was already)."""
        if (group := self._unfinished(group_id)) is None:
            return False
        group.generate_attempts += 1
        group.avoid_nodes.add(node_id)
        self._record("attempts", group.generate_attempts, group.deaths, group_id)
        if permanent or group.generate_attempts >= self._config.generate_attempts:
            self._fail(group, error, permanent=permanent)
            return False
        return True

    def generation_interrupted(self, group_id: int, *, died: str = "") -> bool:
        """A generate lease ended without a result: the node left, or it ``died``, for the reason given. True: try again."""
        if (group := self._unfinished(group_id)) is None:
            return False
        if died:
            group.deaths += 1
            self._record("attempts", group.generate_attempts, group.deaths, group_id)
            if group.deaths >= self._config.death_attempts:
                self._fail(group, f"{group.deaths} rollout nodes went away while they generated it; the last: {died}")
                return False
        return True

    def _unfinished(self, group_id: int) -> Group | None:
        group = self.groups.get(group_id)
        if group is None or group.status is not GroupStatus.OPEN or not group.missing(self._config.group_size):
            return None
        return group

    # ---- judging ----

    def unjudged(self) -> Iterable[tuple[Group, Sample]]:
        """Samples that need a verdict, oldest group first."""
        for group in self.groups.values():
            if group.status is GroupStatus.OPEN:
                for sample in group.samples.values():
                    if sample.result is None and not sample.lost:
                        yield group, sample

    def add_result(self, group_id: int, sample_index: int, result: JudgeResult, *, node_id: str = "") -> bool:
        """Take a verdict. True: the sample needs another try on another node (infra error).

        A verdict for a sample that has one, or whose group is gone, changes nothing.
        """
        if (found := self._unjudged(group_id, sample_index)) is None:
            return False
        group, sample = found
        if result.verdict is Verdict.INFRA_ERROR or result.reward is None:
            sample.score_attempts += 1
            sample.avoid_nodes.add(node_id)
            self._record("score_attempts", sample.score_attempts, sample.deaths, group_id, sample_index)
            if sample.score_attempts < self._config.score_attempts:
                return True
            self._lose(group, sample, result.message)
        else:
            sample.result = result
            self._record("result", group_id, sample_index, result)
        self._settle(group)
        return False

    def scoring_interrupted(self, group_id: int, sample_index: int, *, died: str = "") -> bool:
        """A score lease ended without a verdict: the node left, or it ``died``, for the reason given. True: try again."""
        if (found := self._unjudged(group_id, sample_index)) is None:
            return False
        group, sample = found
        if died:
            sample.deaths += 1
            self._record("score_attempts", sample.score_attempts, sample.deaths, group_id, sample_index)
            if sample.deaths >= self._config.death_attempts:
                self._lose(
                    group, sample, f"{sample.deaths} reward nodes went away while they judged it; the last: {died}"
                )
                self._settle(group)
                return False
        return True

    def _unjudged(self, group_id: int, sample_index: int) -> tuple[Group, Sample] | None:
        group = self.groups.get(group_id)
        sample = group.samples.get(sample_index) if group else None
        if group is None or sample is None or group.status is not GroupStatus.OPEN or sample.result or sample.lost:
            return None
        return group, sample

    def _lose(self, group: Group, sample: Sample, error: str) -> None:
        """Its scoring failed for good: the group goes on without it."""
        sample.lost = True
        group.error = error
        self._record("sample_lost", group.group_id, sample.sample_index)
        data = {"group_id": group.group_id, "sample_index": sample.sample_index, "error": error}
        self._record("event", "sample_lost", data)

    def _settle(self, group: Group) -> None:
        """If all samples are judged or lost, the group is ready, filtered or failed."""
        config = self._config
        if len(group.samples) < config.group_size or any(
            s.result is None and not s.lost for s in group.samples.values()
        ):
            return
        rewards = group.rewards()
        if len(rewards) < config.min_group_size:
            self._fail(group, f"only {len(rewards)} of {config.group_size} samples could be judged; {group.error}")
            return
        self.quarantine.judged(group.task_index)
        if (
            config.dynamic_sampling
            and len(set(rewards)) == 1
            and self._filtered_since_step < config.max_filtered_per_step
        ):
            self._filtered_since_step += 1
            self.ledger.filtered += group.num_tokens
            self.ledger.groups_filtered += 1
            self._drop(group, GroupStatus.FILTERED, "all rewards equal")
        else:
            self._set_status(group, GroupStatus.READY)

    # ---- giving up ----

    def _fail(self, group: Group, reason: str, *, permanent: bool = False) -> None:
        """The group is out; so is its task when it can't be done (``permanent``) or has failed too often."""
        self.ledger.failed += group.num_tokens
        self.ledger.groups_failed += 1
        self._drop(group, GroupStatus.FAILED, reason)
        self.quarantine.failed(group.task_index, reason, permanent=permanent)

    def _drop(self, group: Group, status: GroupStatus, reason: str) -> None:
        del self.groups[group.group_id]
        self._set_status(group, status)
        self._record("event", f"group_{status}", {"group_id": group.group_id, "reason": reason})

    # ---- training ----

    def take_batch(self, step: int) -> list[Group] | None:
        """Fix the batch of ``step``, the next one; None while it can't be filled. A fixed batch is returned as it was.

        At the end of the data the last step takes what there is, be it less than ``groups_per_step``.
        """
        if step != self.version + 1:
            raise InvariantError(f"Step {step} was asked for, but the next one is {self.version + 1}.")
        if not self._select_again:
            return None
        if fixed := [group for group in self.groups.values() if group.step == step]:
            return sorted(fixed, key=lambda group: group.group_id)
        waiting = sorted(self.groups.values(), key=lambda group: group.group_id)
        size = self._config.groups_per_step
        if self.out_of_tasks and waiting and all(group.status is GroupStatus.READY for group in waiting):
            size = min(size, len(waiting))
        picked = select_batch(
            [group.group_id for group in waiting],
            [group.status is GroupStatus.READY for group in waiting],
            [group.overtaken for group in waiting],
            groups_per_step=size,
            bypass_window=self._config.bypass_window,
        )
        if picked is None:
            self._select_again = False
            return None
        chosen = set(picked)
        for group in waiting:
            if group.group_id in chosen:
                group.step = step
                self._set_status(group, GroupStatus.BATCHED)
            elif passed := len(picked) - bisect(picked, group.group_id):
                group.overtaken += passed
                self._set_status(group, group.status)
        self._filtered_since_step = 0
        batch = [self.groups[group_id] for group_id in picked]
        ages = batch_ages(batch, self.version, max_staleness=self._config.max_staleness)
        self.staleness_counts.update(ages)
        self._record("step", step, picked, {str(age): count for age, count in ages.items()})
        self._retention.add(step, picked[0])
        return batch

    def commit(self, step: int, metrics: dict[str, float]) -> list[Group]:
        """The learner finished ``step``: its groups are trained, the version moves on. A repeated commit changes nothing."""
        if step <= self.version:
            return []
        batch = [group for group in self.groups.values() if group.step == step]
        if step != self.version + 1 or not batch:
            raise InvariantError(
                f"Step {step} was committed, but the next one is {self.version + 1} with {len(batch)} groups."
            )
        for group in batch:
            self._set_status(group, GroupStatus.TRAINED)
            del self.groups[group.group_id]
            trained = sum(sample.num_tokens for sample in group.judged())
            self.ledger.trained += trained
            self.ledger.failed += group.num_tokens - trained
            self.ledger.groups_trained += 1
        self.version = step
        ledger = {f"ledger/{name}": float(value) for name, value in self.ledger.model_dump().items()}
        self._record("commit", metrics | ledger, step)
        self.ledger.check(buffered=self.buffered_tokens, live_groups=len(self.groups))
        return batch

    @property
    def finished(self) -> bool:
        """No step will ever follow: all are done, or the data is."""
        return self.version >= self._config.max_steps or (self.out_of_tasks and not self.groups)

    # ---- what a replay needs ----

    def forget(self, *, replay_from: int) -> None:
        """Let go of samples that nobody will ask for again: a learner resumes at step ``replay_from`` or later."""
        last = min(replay_from, self.version - self._config.keep_trained_steps)
        self._retention.forget(last, live=self.groups, next_group_id=self.next_group_id)

    @property
    def first_kept_step(self) -> int:
        """The oldest step whose batch can be handed out again; the next one, if there is none."""
        return self._retention.first_step or self.version + 1

    # ---- records ----

    def _set_status(self, group: Group, status: GroupStatus) -> None:
        group.status = status
        self._select_again = True
        self._record("status", status, group.step, group.overtaken, group.group_id)

    def keep_meta(self, key: str, value: str) -> None:
        """A note for the next life of the coordinator; the last one of each key counts."""
        self._meta[key] = value

    def flush(self) -> None:
        """Record the ledger and the notes if they have changed since the last flush."""
        if self.ledger != self._written_ledger:
            self._record("ledger", self.ledger.model_dump_json())
            self._written_ledger = self.ledger.model_copy()
        for key, value in self._meta.items():
            self._record("meta", key, value)
        self._meta.clear()
