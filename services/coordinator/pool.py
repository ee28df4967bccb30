"""The pool: all groups of the run, and what every event does to them. No I/O, no clock.

Each method applies one event in memory and appends to ``records`` what the journal must keep of it. The service writes the
records in order and lets nothing out (acknowledgement, batch) before they are durable, so what others have seen is always
in the journal.

Poison: work that fails has bounded tries (``*_attempts`` in the config), counted in the journal, so a restart is not a new chance. Then its
group is out and the place refilled; a task whose groups keep failing is out, too, for the rest of the run. Where nothing but
failures comes back, it is not the tasks: ``hopeless`` says so, and the service ends the run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.errors import InvariantError
from protocol.codec import Array
from protocol.verdicts import JudgeResult, Verdict
from protocol.versions import Segment, staleness
from services.coordinator.admission import max_admitted, select_batch
from services.coordinator.config import CoordinatorConfig
from services.coordinator.cursor import TaskCursor
from services.coordinator.groups import Group, GroupStatus, Sample
from services.coordinator.ledger import Ledger

LIVE = (GroupStatus.OPEN, GroupStatus.READY, GroupStatus.BATCHED)


@dataclass(frozen=True, slots=True)
class Record:
    """Something for the journal: ``kind`` names the statement in ``journal.STATEMENTS``, ``values`` its parameters."""

    kind: str
    values: tuple[Any, ...]


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
    tasks_out: dict[int, str] = field(default_factory=dict)  # task index -> why
    kept_steps: deque[tuple[int, int]] = field(default_factory=deque)  # (step, its oldest group), of those with samples
    forgotten_before: int = 0  # group id


class Pool:
    """See the module. ``version`` is the committed policy version; steps are numbered from 1 and make version = step."""

    def __init__(self, config: CoordinatorConfig, cursor: TaskCursor, state: PoolState | None = None) -> None:
        state = state or PoolState()
        self._config = config
        self._cursor = cursor
        self.version = state.committed
        self.num_draws = state.num_draws
        self.next_group_id = state.next_group_id
        self.groups = state.groups
        self.ledger = state.ledger
        self.staleness_counts = state.staleness_counts
        self.task_failures = state.task_failures
        self.tasks_out = state.tasks_out
        self.records: list[Record] = []
        self.out_of_tasks = False
        self.hopeless = ""
        self._kept_steps = state.kept_steps
        self._forgotten_before = state.forgotten_before
        self._ledger_changed = False
        self._filtered_since_step = 0
        self._failed_in_a_row = 0
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
        self._ledger_changed |= bool(admitted)
        return admitted

    def _draw(self) -> int | None:
        """The next task that isn't out; None: there is none."""
        if len(self.tasks_out) >= self._cursor.num_tasks:
            self.hopeless = f"All {self._cursor.num_tasks} tasks are out. The last one: {[*self.tasks_out.values()][-1].rstrip('.')}."
            return None
        while (task_index := self._cursor.task_index(self.num_draws)) is not None:
            self.num_draws += 1
            if task_index not in self.tasks_out:
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

    def add_sample(
        self,
        group_id: int,
        sample_index: int,
        *,
        text: str,
        finish_reason: str,
        segments: list[Segment],
        arrays: dict[str, Array],
        lease_id: str = "",
    ) -> bool:
        """Take a finished completion. False: its place is filled or gone, so it is a duplicate and counted as such."""
        num_tokens = int(arrays["completion_ids"].size)
        self.ledger.received += num_tokens
        self._ledger_changed = True
        group = self.groups.get(group_id)
        if (
            group is None
            or group.status is not GroupStatus.OPEN
            or sample_index in group.samples
            or not 0 <= sample_index < self._config.group_size
        ):
            self.ledger.duplicate += num_tokens
            return False
        sample = Sample(sample_index, text, finish_reason, segments, arrays, lease_id)
        group.samples[sample_index] = sample
        self.records.append(Record("sample", (group_id, sample)))
        return True

    def has_sample(self, group_id: int, sample_index: int, arrays: dict[str, Array], *, lease_id: str) -> bool:
        """Whether this very completion is here already: then its message came twice, and its tokens were generated once."""
        group = self.groups.get(group_id)
        sample = group.samples.get(sample_index) if group else None
        if sample is None or sample.lease_id:
            return sample is not None and sample.lease_id == lease_id
        return all(np.array_equal(sample.arrays[name], arrays[name]) for name in ("completion_ids", "logprobs"))

    def count_thrown_away(self, num_tokens: int) -> None:
        """Tokens that a node generated for a lease and gave up."""
        self.ledger.received += num_tokens
        self.ledger.failed += num_tokens
        self._ledger_changed |= num_tokens > 0

    def count_lost(self, num_tokens: int) -> None:
        """Tokens that a node had in flight when it died. Negative: it had not."""
        self.ledger.received += num_tokens
        self.ledger.lost += num_tokens
        self._ledger_changed |= num_tokens != 0

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
        """A lease ended without a word on its group: the node left, or it ``died``, which says how. True: try again."""
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
            self.records.append(Record("result", (group_id, sample_index, result)))
        self._settle(group)
        return False

    def scoring_interrupted(self, group_id: int, sample_index: int, *, died: str = "") -> bool:
        """A score lease ended without a verdict: the node left, or it ``died``, which says how. True: try again."""
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
        self._failed_in_a_row = 0
        if self.task_failures.pop(group.task_index, 0):
            self._record("task", group.task_index, 0, self.tasks_out.get(group.task_index))
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
        failures = self.task_failures[group.task_index] = self.task_failures.get(group.task_index, 0) + 1
        if permanent or failures >= self._config.task_attempts:
            self.tasks_out[group.task_index] = reason
            self._record("event", "task_out", {"task_index": group.task_index, "reason": reason})
        self._record("task", group.task_index, failures, self.tasks_out.get(group.task_index))
        self._failed_in_a_row += not permanent
        if self._failed_in_a_row >= self._config.max_failed_in_a_row:
            self.hopeless = (
                f"The last {self._failed_in_a_row} groups failed, with none judged between "
                f"(coordinator.max_failed_in_a_row). The last reason: {reason.rstrip('.')}."
            )

    def _drop(self, group: Group, status: GroupStatus, reason: str) -> None:
        del self.groups[group.group_id]
        self._set_status(group, status)
        self._record("event", f"group_{status}", {"group_id": group.group_id, "reason": reason})
        self._ledger_changed = True

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
        for group in waiting:
            if group.group_id in picked:
                group.step = step
                self._set_status(group, GroupStatus.BATCHED)
            elif passed := sum(other > group.group_id for other in picked):
                group.overtaken += passed
                self._set_status(group, group.status)
        self._filtered_since_step = 0
        batch = [self.groups[group_id] for group_id in picked]
        self._record("step", step, picked, self._count_staleness(batch))
        self._kept_steps.append((step, picked[0]))
        return batch

    def _count_staleness(self, batch: list[Group]) -> dict[str, int]:
        """Adds the ages of a batch to the counts of the run; returns its own."""
        ages: Counter[int] = Counter()
        for group in batch:
            for sample in group.judged():
                age = staleness(sample.segments, self.version)
                if age > self._config.max_staleness:
                    raise InvariantError(
                        f"Group {group.group_id} sample {sample.sample_index} would be trained {age} versions late; "
                        f"the cap is {self._config.max_staleness}. Segments: {sample.segments}."
                    )
                ages[age] += 1
        self.staleness_counts.update(ages)
        return {str(age): count for age, count in ages.items()}

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
        self._ledger_changed = True
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
        while self._kept_steps and self._kept_steps[0][0] <= last:
            self._kept_steps.popleft()
        oldest = min([first for _, first in self._kept_steps] + list(self.groups), default=self.next_group_id)
        # A learner saves once in many steps. What it needs no more then goes a little with each commit, not all in one long transaction.
        oldest = min(oldest, self._forgotten_before + 2 * self._config.groups_per_step)
        if oldest > self._forgotten_before:
            self._record("forget_samples", oldest)
            self._record("forget_results", oldest)
            self._record("meta", "forgotten_before", str(oldest))
            self._forgotten_before = oldest

    @property
    def first_kept_step(self) -> int:
        """The oldest step whose batch can be handed out again; the next one, if there is none."""
        return self._kept_steps[0][0] if self._kept_steps else self.version + 1

    # ---- records ----

    def _set_status(self, group: Group, status: GroupStatus) -> None:
        group.status = status
        self._select_again = True
        self._record("status", status, group.step, group.overtaken, group.group_id)

    def _record(self, kind: str, *values: Any) -> None:
        self.records.append(Record(kind, values))

    def drain_records(self) -> list[Record]:
        """The records since the last call, and the ledger if it has changed."""
        if self._ledger_changed:
            self._record("ledger", self.ledger.model_dump_json())
            self._ledger_changed = False
        records, self.records = self.records, []
        return records
