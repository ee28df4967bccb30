"""A run's journal as others may read it: read-only, beside a live coordinator, and as far as a damaged one goes."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NUM_EVENTS = 200
NUM_GROUPS = 20
# How services/coordinator/journal.py numbers samples, by group.
_OF_GROUP = "sample_id >= groups.group_id * 4096 AND sample_id < (groups.group_id + 1) * 4096"


@dataclass
class JournalFacts:
    """``steps`` are committed ones with their metrics, oldest first; ``events`` the last 200; ``problems`` are sentences."""

    readable: bool = False
    version: int = 0
    meta: dict[str, str] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    oldest_open: list[dict[str, Any]] = field(default_factory=list)
    tasks_out: list[dict[str, Any]] = field(default_factory=list)
    open_steps: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_journal(path: Path) -> JournalFacts:
    """What can be read of it. Never raises for what is wrong with the file: that is in ``problems``.

    ``mode=ro`` takes no lock that a writer in WAL mode would meet, and never writes the database.
    """
    facts = JournalFacts()
    if not path.is_file():
        facts.problems.append("The run has no journal: it never began, or its folder is another one.")
        return facts
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=5.0)) as db:
            db.row_factory = sqlite3.Row
            for part in (_meta, _groups, _tasks, _steps, _events):
                _attempt(part, db, facts)
    except sqlite3.Error as error:
        facts.problems.append(f"The journal {path.name} can't be opened: {error}.")
    return facts


def _attempt(
    part: Callable[[sqlite3.Connection, JournalFacts], None], db: sqlite3.Connection, facts: JournalFacts
) -> None:
    """Parts are read one by one: damage to a page costs what is on it."""
    try:
        part(db, facts)
    except (sqlite3.Error, ValueError, TypeError) as error:
        facts.problems.append(
            f"The journal is damaged or of another release: its {part.__name__[1:]} can't be read ({error})."
        )


def _meta(db: sqlite3.Connection, facts: JournalFacts) -> None:
    facts.meta = dict(tuple(row) for row in db.execute("SELECT key, value FROM meta"))
    facts.ledger = json.loads(facts.meta.pop("ledger", "{}"))
    facts.readable = True


def _groups(db: sqlite3.Connection, facts: JournalFacts) -> None:
    facts.groups = dict(tuple(row) for row in db.execute("SELECT status, COUNT(*) FROM groups GROUP BY status"))
    facts.oldest_open = [
        dict(row)
        for row in db.execute(
            "SELECT group_id, task_index, admitted_version, status, step, overtaken, attempts, deaths, "
            f"(SELECT COUNT(*) FROM samples WHERE {_OF_GROUP}) AS samples, "
            f"(SELECT COUNT(*) FROM results WHERE {_OF_GROUP}) AS judged "
            "FROM groups WHERE status IN ('open', 'ready', 'batched') ORDER BY group_id LIMIT ?",
            (NUM_GROUPS,),
        )
    ]


def _tasks(db: sqlite3.Connection, facts: JournalFacts) -> None:
    rows = db.execute("SELECT task_index, failures, out AS reason FROM tasks WHERE out IS NOT NULL ORDER BY task_index")
    facts.tasks_out = [dict(row) for row in rows]


def _steps(db: sqlite3.Connection, facts: JournalFacts) -> None:
    rows = db.execute("SELECT step, committed_at, metrics FROM steps WHERE committed_at IS NOT NULL ORDER BY step")
    facts.steps = [{"step": step, "at": at, **json.loads(metrics)} for step, at, metrics in rows]
    facts.version = facts.steps[-1]["step"] if facts.steps else 0
    facts.open_steps = [
        {"step": step, "group_ids": json.loads(group_ids)}
        for step, group_ids in db.execute("SELECT step, group_ids FROM steps WHERE committed_at IS NULL ORDER BY step")
    ]


def _events(db: sqlite3.Connection, facts: JournalFacts) -> None:
    rows = db.execute("SELECT at, kind, data FROM events ORDER BY rowid DESC LIMIT ?", (NUM_EVENTS,)).fetchall()
    facts.events = [{"at": at, "kind": kind, "data": json.loads(data)} for at, kind, data in reversed(rows)]
