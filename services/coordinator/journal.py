"""The journal: one SQLite database that holds everything a restarted coordinator needs.

One thread owns the connection and writes whatever is queued in one transaction, so a hundred acknowledgements cost one sync.
WAL mode with ``synchronous=FULL``: a committed transaction survives kill -9 and a power cut (https://sqlite.org/pragma.html).
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import queue
import sqlite3
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ConfigError, ForebayError
from protocol.verdicts import JudgeResult
from protocol.versions import Segment
from services.coordinator.groups import Group, GroupStatus, Sample
from services.coordinator.ledger import Ledger
from services.coordinator.pool import LIVE, PoolState, Record

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, draw INTEGER NOT NULL, task_index INTEGER NOT NULL, admitted_version INTEGER NOT NULL,
    status TEXT NOT NULL, step INTEGER, overtaken INTEGER NOT NULL DEFAULT 0);
CREATE INDEX groups_by_step ON groups (step);
CREATE TABLE samples (
    group_id INTEGER NOT NULL, sample_index INTEGER NOT NULL, text TEXT NOT NULL, finish_reason TEXT NOT NULL,
    segments TEXT NOT NULL, prompt_ids BLOB NOT NULL, completion_ids BLOB NOT NULL, logprobs BLOB NOT NULL,
    result TEXT, lost INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (group_id, sample_index)) WITHOUT ROWID;
CREATE TABLE steps (step INTEGER PRIMARY KEY, group_ids TEXT NOT NULL, committed_at REAL, metrics TEXT);
CREATE TABLE events (at REAL NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL);
"""

STATEMENTS = {
    "group": "INSERT INTO groups (group_id, draw, task_index, admitted_version, status) VALUES (?, ?, ?, ?, ?)",
    "status": "UPDATE groups SET status = ?, step = ?, overtaken = ? WHERE group_id = ?",
    "sample": "INSERT INTO samples (group_id, sample_index, text, finish_reason, segments, prompt_ids, completion_ids, logprobs) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
    "result": "UPDATE samples SET result = ?3 WHERE group_id = ?1 AND sample_index = ?2",
    "sample_lost": "UPDATE samples SET lost = 1 WHERE group_id = ? AND sample_index = ?",
    "step": "INSERT INTO steps (step, group_ids) VALUES (?, ?)",
    "commit": "UPDATE steps SET metrics = ?1, committed_at = (julianday('now') - 2440587.5) * 86400.0 WHERE step = ?2",
    "event": "INSERT INTO events (at, kind, data) VALUES ((julianday('now') - 2440587.5) * 86400.0, ?, ?)",
    "ledger": "INSERT INTO meta VALUES ('ledger', ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
    "meta": "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
}

_Item = tuple[Sequence[Record], asyncio.Future[None] | None]


class Journal:
    """Open or create the journal of a run.

    Raises:
        ConfigError: the file is of another run, of another schema, is damaged, or is in use by another coordinator.
    """

    def __init__(self, path: Path, *, run_id: str) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = path.with_suffix(".lock").open("w")  # SQLite's own exclusive mode would shut out readers, too
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(f"Another coordinator has the journal {path} open. Stop it first.") from None
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=2.0)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._create_or_check(run_id)
        except sqlite3.DatabaseError as error:
            self._db.close()
            self._lock.close()
            raise ConfigError(
                f"The journal {path} can't be used: {error}. Nothing in it was changed. Restore it from a copy, or start "
                "a new run with another run.id."
            ) from None
        except ConfigError:
            self._db.close()
            self._lock.close()
            raise
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self.failure: ForebayError | None = None
        self._thread = threading.Thread(target=self._write_loop, name="journal", daemon=True)
        self._thread.start()

    def _create_or_check(self, run_id: str) -> None:
        tables = {row[0] for row in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables:
            self._db.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
            for key, value in (("schema", str(SCHEMA_VERSION)), ("run_id", run_id), ("run_uid", uuid.uuid4().hex)):
                self._db.execute(STATEMENTS["meta"], (key, value))
        self.meta = (
            dict(self._db.execute("SELECT key, value FROM meta").fetchall()) if not tables or "meta" in tables else {}
        )
        if self.meta.get("schema") != str(SCHEMA_VERSION) or self.meta.get("run_id") != run_id:
            raise ConfigError(
                f"The journal {self.path} is of run {self.meta.get('run_id')!r}, schema {self.meta.get('schema')!r}; this is "
                f"run {run_id!r}, schema {SCHEMA_VERSION}. Choose another run.id or run.dir, or the release that wrote it."
            )

    @property
    def run_uid(self) -> str:
        """Unique name of this run's journal."""
        return self.meta["run_uid"]

    # ---- writing ----

    def submit(self, records: Sequence[Record]) -> asyncio.Future[None]:
        """Queue ``records``; the future is done when they are durable. Order is kept."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put((records, future))
        return future

    def _write_loop(self) -> None:
        while (item := self._queue.get()) is not None:
            batch, stop = [item], False
            while not self._queue.empty():
                more = self._queue.get()
                if more is None:
                    stop = True
                    break
                batch.append(more)
            error = self._write(batch)
            for _, future in batch:
                if future is not None:
                    future.get_loop().call_soon_threadsafe(_resolve, future, error)
            if stop:
                return

    def _write(self, batch: list[_Item]) -> ForebayError | None:
        if self.failure is not None:
            return self.failure
        try:
            self._db.execute("BEGIN")
            for records, _ in batch:
                for record in records:
                    self._db.execute(STATEMENTS[record.kind], [_plain(value) for value in record.values])
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self.failure = ForebayError(
                f"The journal {self.path} can't be written: {error}. Nothing after the last acknowledgement was kept; free "
                "space or mend the disk, then start the coordinator again."
            )
        return self.failure

    def close(self) -> None:
        """Write what is queued and close."""
        self._queue.put(None)
        self._thread.join()
        self._db.close()
        self._lock.close()

    # ---- reading ----

    def load(self) -> PoolState:
        """The pool as of the last durable record. Call before the first ``submit``."""
        state = PoolState()
        state.committed = self._one("SELECT COALESCE(MAX(step), 0) FROM steps WHERE committed_at IS NOT NULL")
        state.num_draws = self._one("SELECT COALESCE(MAX(draw) + 1, 0) FROM groups")
        state.next_group_id = self._one("SELECT COALESCE(MAX(group_id) + 1, 0) FROM groups")
        if "ledger" in self.meta:
            state.ledger = Ledger.model_validate_json(self.meta["ledger"])
        marks = ",".join("?" * len(LIVE))
        state.groups = self._groups(f"status IN ({marks})", [str(status) for status in LIVE])
        for row in self._db.execute(
            "SELECT steps.step, samples.segments FROM steps JOIN groups ON groups.step = steps.step JOIN samples USING (group_id) "
            "WHERE samples.lost = 0"
        ):
            age = row[0] - 1 - min(version for version, _ in json.loads(row[1]))
            state.staleness_counts[age] = state.staleness_counts.get(age, 0) + 1
        return state

    def batch(self, step: int) -> list[Group]:
        """The groups of a step that was handed out before, for a learner that trains it again."""
        return list(self._groups("step = ?", [step]).values())

    def steps(self) -> list[tuple[int, float, dict[str, float]]]:
        """Committed steps: (step, seconds since the epoch, metrics)."""
        rows = self._db.execute(
            "SELECT step, committed_at, metrics FROM steps WHERE committed_at IS NOT NULL ORDER BY step"
        )
        return [(step, at, json.loads(metrics)) for step, at, metrics in rows]

    def _groups(self, where: str, values: list[Any]) -> dict[int, Group]:
        groups: dict[int, Group] = {}
        for row in self._db.execute(f"SELECT * FROM groups WHERE {where} ORDER BY group_id", values):
            group_id, draw, task_index, admitted_version, status, step, overtaken = row
            groups[group_id] = Group(group_id, draw, task_index, admitted_version, GroupStatus(status), step, overtaken)
        query = f"SELECT * FROM samples WHERE group_id IN (SELECT group_id FROM groups WHERE {where}) ORDER BY group_id, sample_index"
        for group_id, index, text, finish, segments, prompt, completion, logprobs, result, lost in self._db.execute(
            query, values
        ):
            groups[group_id].samples[index] = Sample(
                sample_index=index,
                text=text,
                finish_reason=finish,
                segments=[Segment(version=version, num_tokens=count) for version, count in json.loads(segments)],
                arrays={
                    "prompt_ids": np.frombuffer(prompt, dtype="<i4"),
                    "completion_ids": np.frombuffer(completion, dtype="<i4"),
                    "logprobs": np.frombuffer(logprobs, dtype="<f4"),
                },
                result=None if result is None else JudgeResult.model_validate_json(result),
                lost=bool(lost),
            )
        return groups

    def _one(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value


def _resolve(future: asyncio.Future[None], error: ForebayError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
