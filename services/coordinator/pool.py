"""The pool: all groups of the run, and what every event does to them. No I/O, no clock.

Each method applies one event in memory and appends to ``records`` what the journal must keep of it. The service writes the
records in order and lets nothing out (acknowledgement, batch) before they are durable, so what others have seen is always
in the journal.
"""

from __future__ import annotations

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
    staleness_counts: dict[int, int] = field(default_factory=dict)


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
        self.records: list[Record] = []
        self.out_of_tasks = False
        self._filtered_since_step = 0

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
        admitted = []
        while self.places_taken < room:
            task_index = self._cursor.task_index(self.num_draws)
            if task_index is None:
                self.out_of_tasks = True
                break
            group = Group(self.next_group_id, self.num_draws, task_index, self.version)
            self.num_draws += 1
            self.next_group_id += 1
            self.groups[group.group_id] = group
            self.ledger.groups_admitted += 1
            self._record("group", group.group_id, group.draw, task_index, self.version, group.status)
            admitted.append(group)
        if admitted:
            self._record_ledger()
        return admitted

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
    ) -> bool:
        """Take a finished completion. False: its place is filled or gone, so it is a duplicate and counted as such."""
        num_tokens = int(arrays["completion_ids"].size)
        self.ledger.received += num_tokens
        group = self.groups.get(group_id)
        if (
            group is None
            or group.status is not GroupStatus.OPEN
            or sample_index not in group.missing(self._config.group_size)
        ):
            self.ledger.duplicate += num_tokens
            self._record_ledger()
            return False
        group.samples[sample_index] = Sample(sample_index, text, finish_reason, segments, arrays)
        self._record(
            "sample",
            group_id,
            sample_index,
            text,
            finish_reason,
            [(segment.version, segment.num_tokens) for segment in segments],
            *(arrays[name].tobytes() for name in ("prompt_ids", "completion_ids", "logprobs")),
        )
        self._record_ledger()
        return True

    def has_sample(self, group_id: int, sample_index: int, arrays: dict[str, Array]) -> bool:
        """Whether this very completion is here already: then its message came twice, and its tokens were generated once."""
        group = self.groups.get(group_id)
        sample = group.samples.get(sample_index) if group else None
        return sample is not None and all(
            np.array_equal(sample.arrays[name], arrays[name]) for name in ("completion_ids", "logprobs")
        )

    def count_thrown_away(self, num_tokens: int) -> None:
        """Tokens that a node generated for a lease and gave up."""
        if num_tokens:
            self.ledger.received += num_tokens
            self.ledger.failed += num_tokens
            self._record_ledger()

    def count_lost(self, num_tokens: int) -> None:
        """Tokens that a node had in flight when it died."""
        if num_tokens:
            self.ledger.received += num_tokens
            self.ledger.lost += num_tokens
            self._record_ledger()

    def generation_failed(
        self, group_id: int, error: str, *, permanent: bool, counted: bool = True, node_id: str = ""
    ) -> bool:
        """A generate lease ended without all its samples. True: try again; False: the group is out (or was already)."""
        group = self.groups.get(group_id)
        if group is None or group.status is not GroupStatus.OPEN or not group.missing(self._config.group_size):
            return False
        if counted:
            group.generate_attempts += 1
            group.avoid_nodes.add(node_id)
        if permanent or group.generate_attempts >= self._config.generate_attempts:
            self._drop(group, GroupStatus.FAILED, error)
            return False
        return True

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
        group = self.groups.get(group_id)
        sample = group.samples.get(sample_index) if group else None
        if group is None or sample is None or group.status is not GroupStatus.OPEN or sample.result or sample.lost:
            return False
        if result.verdict is Verdict.INFRA_ERROR or result.reward is None:
            sample.score_attempts += 1
            sample.avoid_nodes.add(node_id)
            if sample.score_attempts < self._config.score_attempts:
                return True
            sample.lost = True
            self._record("sample_lost", group_id, sample_index)
            self._record(
                "event", "sample_lost", {"group_id": group_id, "sample_index": sample_index, "error": result.message}
            )
        else:
            sample.result = result
            self._record("result", group_id, sample_index, result.model_dump_json())
        self._settle(group)
        return False

    def _settle(self, group: Group) -> None:
        """If all samples are judged or lost, the group is ready, filtered or failed."""
        config = self._config
        if group.missing(config.group_size) or any(s.result is None and not s.lost for s in group.samples.values()):
            return
        rewards = group.rewards()
        if len(rewards) < config.min_group_size:
            self._drop(group, GroupStatus.FAILED, f"only {len(rewards)} of {config.group_size} samples could be judged")
        elif (
            config.dynamic_sampling
            and len(set(rewards)) == 1
            and self._filtered_since_step < config.max_filtered_per_step
        ):
            self._filtered_since_step += 1
            self._drop(group, GroupStatus.FILTERED, "all rewards equal")
        else:
            self._set_status(group, GroupStatus.READY)

    # ---- training ----

    def take_batch(self, step: int) -> list[Group] | None:
        """Fix the batch of ``step``, the next one; None while it can't be filled. A fixed batch is returned as it was."""
        if step != self.version + 1:
            raise InvariantError(f"Step {step} was asked for, but the next one is {self.version + 1}.")
        fixed = [group for group in self.groups.values() if group.step == step]
        if fixed:
            return sorted(fixed, key=lambda group: group.group_id)
        waiting = sorted(self.groups.values(), key=lambda group: group.group_id)
        picked = select_batch(
            [group.group_id for group in waiting],
            [group.status is GroupStatus.READY for group in waiting],
            [group.overtaken for group in waiting],
            groups_per_step=self._config.groups_per_step,
            bypass_window=self._config.bypass_window,
        )
        if picked is None:
            return None
        for group in waiting:
            if group.group_id in picked:
                group.step = step
                self._set_status(group, GroupStatus.BATCHED)
            else:
                group.overtaken += sum(other > group.group_id for other in picked)
        self._filtered_since_step = 0
        batch = [self.groups[group_id] for group_id in picked]
        self._count_staleness(batch)
        self._record("step", step, picked)
        return batch

    def _count_staleness(self, batch: list[Group]) -> None:
        for group in batch:
            for sample in group.judged():
                age = staleness(sample.segments, self.version)
                if age > self._config.max_staleness:
                    raise InvariantError(
                        f"Group {group.group_id} sample {sample.sample_index} would be trained {age} versions late; "
                        f"the cap is {self._config.max_staleness}. Segments: {sample.segments}."
                    )
                self.staleness_counts[age] = self.staleness_counts.get(age, 0) + 1

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
        self._record("commit", metrics, step)
        self._record_ledger()
        self.ledger.check(buffered=self.buffered_tokens, live_groups=len(self.groups))
        return batch

    @property
    def finished(self) -> bool:
        """No step will ever follow: all are done, or the data is."""
        if self.version >= self._config.max_steps:
            return True
        return self.out_of_tasks and len(self.groups) < self._config.groups_per_step

    # ---- records ----

    def _drop(self, group: Group, status: GroupStatus, reason: str) -> None:
        del self.groups[group.group_id]
        self._set_status(group, status)
        if status is GroupStatus.FILTERED:
            self.ledger.filtered += group.num_tokens
            self.ledger.groups_filtered += 1
        else:
            self.ledger.failed += group.num_tokens
            self.ledger.groups_failed += 1
        self._record("event", f"group_{status}", {"group_id": group.group_id, "reason": reason})
        self._record_ledger()

    def _set_status(self, group: Group, status: GroupStatus) -> None:
        group.status = status
        self._record("status", status, group.step, group.overtaken, group.group_id)

    def _record(self, kind: str, *values: Any) -> None:
        self.records.append(Record(kind, values))

    def _record_ledger(self) -> None:
        if self.records and self.records[-1].kind == "ledger":
            self.records.pop()
        self._record("ledger", self.ledger.model_dump_json())

    def drain_records(self) -> list[Record]:
        """The records since the last call."""
        records, self.records = self.records, []
        return records
