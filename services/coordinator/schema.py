"""The journal's tables: how records become rows, and rows the pool's state again. Functions of an open connection; no file, no thread."""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from protocol.verdicts import JudgeResult
from protocol.versions import Segment
from services.coordinator.core.effects import Record
from services.coordinator.core.groups import Group, GroupStatus, Sample
from services.coordinator.core.ledger import Ledger
from services.coordinator.core.pool import PoolState
from services.coordinator.sample_arrays import array_parts, unpack_arrays

SCHEMA_VERSION = 2
_GROUP_STRIDE = 4096  # sample_id = group_id * stride + sample_index: rows of a group lie together, old ones first

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, draw INTEGER NOT NULL, task_index INTEGER NOT NULL, admitted_version INTEGER NOT NULL,
    status TEXT NOT NULL, step INTEGER, overtaken INTEGER NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0,
    deaths INTEGER NOT NULL DEFAULT 0);
CREATE INDEX groups_by_step ON groups (step);
CREATE INDEX live_groups ON groups (status) WHERE status IN ('open', 'ready', 'batched');
CREATE TABLE samples (
    sample_id INTEGER PRIMARY KEY, text TEXT NOT NULL, finish_reason TEXT NOT NULL, segments TEXT NOT NULL,
    num_prompt_tokens INTEGER NOT NULL, arrays BLOB NOT NULL, crc32 INTEGER NOT NULL);
CREATE TABLE results (sample_id INTEGER PRIMARY KEY, result TEXT NOT NULL);
CREATE TABLE unjudged (sample_id INTEGER PRIMARY KEY, attempts INTEGER NOT NULL DEFAULT 0, deaths INTEGER NOT NULL DEFAULT 0,
    lost INTEGER NOT NULL DEFAULT 0);
CREATE TABLE steps (step INTEGER PRIMARY KEY, group_ids TEXT NOT NULL, ages TEXT NOT NULL, committed_at REAL, metrics TEXT);
CREATE TABLE tasks (task_index INTEGER PRIMARY KEY, failures INTEGER NOT NULL, out TEXT);
CREATE TABLE events (at REAL NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL);
"""

_LIVE = (GroupStatus.OPEN, GroupStatus.READY, GroupStatus.BATCHED)
_NOW = "(julianday('now') - 2440587.5) * 86400.0"
_ID = "? * 4096 + ?"

# In the order in which the kinds of one transaction are written; within a kind the order of events is kept.
STATEMENTS = {
    "group": "INSERT INTO groups (group_id, draw, task_index, admitted_version, status) VALUES (?, ?, ?, ?, ?)",
    "sample": f"INSERT INTO samples VALUES ({_ID}, ?, ?, ?, ?, ?, ?)",
    "result": f"INSERT INTO results VALUES ({_ID}, ?)",
    "attempts": "UPDATE groups SET attempts = ?, deaths = ? WHERE group_id = ?",
    "score_attempts": "INSERT INTO unjudged (attempts, deaths, sample_id) VALUES (?, ?, ? * 4096 + ?) "
    "ON CONFLICT DO UPDATE SET attempts = excluded.attempts, deaths = excluded.deaths",
    "sample_lost": f"INSERT INTO unjudged (sample_id, lost) VALUES ({_ID}, 1) ON CONFLICT DO UPDATE SET lost = 1",
    "status": "UPDATE groups SET status = ?, step = ?, overtaken = ? WHERE group_id = ?",
    "step": "INSERT INTO steps (step, group_ids, ages) VALUES (?, ?, ?)",
    "commit": f"UPDATE steps SET metrics = ?1, committed_at = {_NOW} WHERE step = ?2",
    "task": "INSERT INTO tasks VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET failures = excluded.failures, out = excluded.out",
    "event": f"INSERT INTO events (at, kind, data) VALUES ({_NOW}, ?, ?)",
    "ledger": "INSERT INTO meta VALUES ('ledger', ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
    "meta": "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
    "forget_meta": "DELETE FROM meta WHERE key = ?",
    "forget_samples": "DELETE FROM samples WHERE sample_id < ? * 4096",
    "forget_results": "DELETE FROM results WHERE sample_id < ? * 4096",
}

_AT_ONCE = 32  # rows in one statement
_MANY = {
    "sample": f"INSERT INTO samples VALUES {', '.join([f'({_ID}, ?, ?, ?, ?, ?, ?)'] * _AT_ONCE)}",
    "result": f"INSERT INTO results VALUES {', '.join([f'({_ID}, ?)'] * _AT_ONCE)}",
}


# ---- records -> rows ----


def write(db: sqlite3.Connection, kind: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Write the rows of one kind of record, in order.

    Those that are most of all go in many at a time: for each statement the journal's thread lets go of the interpreter and must get it back
    from the loop.
    """
    done = 0
    if many := _MANY.get(kind):
        done = len(rows) // _AT_ONCE * _AT_ONCE
        for first in range(0, done, _AT_ONCE):
            db.execute(many, [value for row in rows[first : first + _AT_ONCE] for value in row])
    db.executemany(STATEMENTS[kind], rows[done:])


def row_of(record: Record) -> tuple[Any, ...]:
    """The parameters of a record's statement. Built here, in the journal's thread, and not where the loop waits for it."""
    if (build := _BUILD.get(record.kind)) is not None:
        return build(*record.values)
    return tuple(json.dumps(value) if isinstance(value, dict | list) else value for value in record.values)


def _sample_row(group_id: int, sample: Sample) -> tuple[Any, ...]:
    parts = array_parts(sample.arrays)
    checksum = 0
    # One by one: zlib lets go of the interpreter for what is over 5 KiB, and getting it back takes longer.
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    segments = ", ".join([f"[{segment.version}, {segment.num_tokens}]" for segment in sample.segments])
    num_prompt = int(sample.arrays["prompt_ids"].size)
    return (
        group_id,
        sample.sample_index,
        sample.text,
        sample.finish_reason,
        f"[{segments}]",
        num_prompt,
        b"".join(parts),
        checksum,
    )


def _result_row(group_id: int, sample_index: int, result: JudgeResult) -> tuple[Any, ...]:
    return group_id, sample_index, result.model_dump_json()


_BUILD: dict[str, Callable[..., tuple[Any, ...]]] = {"sample": _sample_row, "result": _result_row}


# ---- rows -> state ----


def load_state(db: sqlite3.Connection, meta: dict[str, str]) -> PoolState:
    """The pool as of the last durable record."""

    def one(query: str) -> int:
        return int(db.execute(query).fetchone()[0])

    state = PoolState()
    state.committed = one("SELECT COALESCE(MAX(step), 0) FROM steps WHERE committed_at IS NOT NULL")
    state.num_draws = one("SELECT COALESCE(MAX(draw) + 1, 0) FROM groups")
    state.next_group_id = one("SELECT COALESCE(MAX(group_id) + 1, 0) FROM groups")
    state.forgotten_before = int(meta.get("forgotten_before", "0"))
    if "ledger" in meta:
        state.ledger = Ledger.model_validate_json(meta["ledger"])
    marks = ", ".join(f"'{status}'" for status in _LIVE)
    state.groups = load_groups(db, f"status IN ({marks})", [])
    for task_index, failures, out in db.execute("SELECT task_index, failures, out FROM tasks"):
        if failures:
            state.task_failures[task_index] = failures
        if out is not None:
            state.quarantined[task_index] = out
    for step, group_ids, ages in db.execute("SELECT step, group_ids, ages FROM steps ORDER BY step"):
        state.staleness_counts.update({int(age): count for age, count in json.loads(ages).items()})
        if (oldest := min(json.loads(group_ids))) >= state.forgotten_before:
            state.kept_steps.append((step, oldest))
    return state


def load_groups(db: sqlite3.Connection, where: str, values: list[Any]) -> dict[int, Group]:
    groups: dict[int, Group] = {}
    for row in db.execute(f"SELECT * FROM groups WHERE {where} ORDER BY group_id", values):
        group_id, draw, task_index, admitted_version, status, step, overtaken, attempts, deaths = row
        group = Group(
            group_id, draw, task_index, admitted_version, GroupStatus(status), step, overtaken, attempts, deaths
        )
        groups[group_id] = group
        ids = (group_id * _GROUP_STRIDE, (group_id + 1) * _GROUP_STRIDE)
        for sample in _samples(db, *ids):
            group.samples[sample.sample_index] = sample
    return groups


def _samples(db: sqlite3.Connection, first_id: int, end_id: int) -> Iterator[Sample]:
    query = (
        "SELECT samples.*, result, COALESCE(attempts, 0), COALESCE(deaths, 0), COALESCE(lost, 0) FROM samples "
        "LEFT JOIN results USING (sample_id) LEFT JOIN unjudged USING (sample_id) WHERE sample_id >= ? AND sample_id < ?"
    )
    for row in db.execute(query, (first_id, end_id)):
        sample_id, text, finish, segments, num_prompt, arrays, crc32, result, attempts, deaths, lost = row
        if zlib.crc32(arrays) != crc32:
            raise ValueError(f"the arrays of group {first_id // _GROUP_STRIDE} fail their checksum")
        spans = [Segment(version=version, num_tokens=count) for version, count in json.loads(segments)]
        yield Sample(
            sample_index=sample_id % _GROUP_STRIDE,
            text=text,
            finish_reason=finish,
            segments=spans,
            arrays=unpack_arrays(arrays, num_prompt=num_prompt, num_completion=sum(span.num_tokens for span in spans)),
            result=None if result is None else JudgeResult.model_validate_json(result),
            score_attempts=attempts,
            deaths=deaths,
            lost=bool(lost),
        )
