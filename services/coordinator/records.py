"""What pool and journal tell each other: records of what happened, and the state that a restart brings back. Data only."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from services.coordinator.groups import Group
from services.coordinator.ledger import Ledger


@dataclass(slots=True)
class Record:
    """Something for the journal: ``kind`` names the statement in ``rows.STATEMENTS``, ``values`` its parameters."""

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
