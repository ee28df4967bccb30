"""The journal: one SQLite database that holds everything a restarted coordinator needs.

One thread owns the connection and writes whatever is queued in one transaction, so a hundred acknowledgements cost one sync.
WAL mode with ``synchronous=FULL``: a committed transaction survives kill -9 and a power cut (https://sqlite.org/pragma.html). A full disk
is waited out. Rows are only ever added and marked, and deleted when no replay can ask for them; a journal that can't be used is
refused as it lies there, for it may be mended.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import queue
import shutil
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from common.errors import ConfigError, ForebayError, InvariantError
from services.coordinator.core.effects import Record
from services.coordinator.core.groups import Group
from services.coordinator.core.pool import PoolState
from services.coordinator.schema import SCHEMA, SCHEMA_VERSION, STATEMENTS, load_groups, load_state, row_of, write

log = structlog.get_logger()

SPACE_POLL_S = 0.5  # between two tries to write to a full disk

Step = tuple[int, float, dict[str, float]]
_Item = tuple[Sequence[Record], asyncio.Future[None] | None]


class Journal:
    """Open or create the journal of a run. ``fixed`` are settings that the run was begun with and can't change.

    Raises:
        ConfigError: the file is of another run, of another schema, of other settings, is damaged, or is in use by another
            coordinator; or its folder can't be made. Nothing in it was changed.
    """

    def __init__(
        self, path: Path, *, run_id: str, fixed: Mapping[str, Any] | None = None, disk_timeout_s: float = 600.0
    ) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = path.with_suffix(".lock").open("w")  # SQLite's own exclusive mode would shut out readers, too
        except OSError as error:
            raise ConfigError(
                f"The run's folder {path.parent} can't be written: {error.strerror}. Choose another with --set run.dir=DIR."
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(f"Another coordinator has the journal {path} open. Stop it first.") from None
        try:
            with self._reading():
                self.state = PoolState()
                is_new = not path.exists() or not path.stat().st_size
                if not is_new:  # nothing is written to it before it is known to be ours and whole
                    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
                        self.meta = self._check(db, run_id, dict(fixed or {}))
                        self.state = load_state(db, self.meta)
                self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=2.0)
                self._db.execute("PRAGMA page_size = 16384")  # a sample of a thousand tokens fits into one
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA wal_autocheckpoint = 2000")  # pages: 32 MB
                self._db.execute("PRAGMA synchronous = FULL")
                # KiB: what one transaction changes stays in memory until it ends.
                self._db.execute("PRAGMA cache_size = -32768")
                # Debian's default would overwrite each deleted sample, and sync that.
                self._db.execute("PRAGMA secure_delete = OFF")
                if is_new:
                    self.meta = self._create(run_id, dict(fixed or {}))
        except ConfigError:
            self._lock.close()
            raise
        self._disk_timeout_s = disk_timeout_s
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._closing = False
        self.full_since: float | None = None  # of time.monotonic, while the disk is full
        self.failure: ForebayError | None = None
        self._thread = threading.Thread(target=self._write_loop, name="journal", daemon=True)
        self._thread.start()

    def _create(self, run_id: str, fixed: dict[str, Any]) -> dict[str, str]:
        meta = {
            "schema": str(SCHEMA_VERSION),
            "run_id": run_id,
            "run_uid": uuid.uuid4().hex,
            "fixed": json.dumps(fixed),
        }
        self._db.executescript(f"BEGIN; {SCHEMA} COMMIT;")
        self._db.execute("BEGIN")
        self._db.executemany(STATEMENTS["meta"], meta.items())
        self._db.execute("COMMIT")
        return meta

    def _check(self, db: sqlite3.Connection, run_id: str, fixed: dict[str, Any]) -> dict[str, str]:
        has_meta = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone()
        meta = dict(db.execute("SELECT key, value FROM meta").fetchall()) if has_meta else {}
        if meta.get("schema") != str(SCHEMA_VERSION) or meta.get("run_id") != run_id:
            raise ConfigError(
                f"The journal {self.path} is of run {meta.get('run_id')!r}, schema {meta.get('schema')!r}; this is "
                f"run {run_id!r}, schema {SCHEMA_VERSION}. Choose another run.id or run.dir, or the release that wrote it."
            )
        begun_with = json.loads(meta["fixed"])
        if changed := [key for key in fixed if key in begun_with and begun_with[key] != fixed[key]]:
            listing = "; ".join(f"{key} was {begun_with[key]!r} and is {fixed[key]!r} now" for key in changed)
            raise ConfigError(
                f"The run of {self.path} was begun with other settings: {listing}. Put them back, or start a new run."
            )
        return meta

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """
        Raises:
            ConfigError: what is read is damaged.
        """
        try:
            yield
        except sqlite3.OperationalError as error:
            if _disk_is_full(error, self.path.parent):
                raise ConfigError(
                    f"The journal {self.path} can't be opened: the disk is full. Free some space."
                ) from None
            raise ConfigError(
                f"The journal {self.path} can't be used: {error}. Nothing in it was changed. Restore it from a copy, or start a new "
                "run with another run.id."
            ) from None
        except (sqlite3.DatabaseError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"The journal {self.path} is damaged and can't be used: {error}. Nothing in it was changed. Restore it from a copy; "
                f"or keep what can be read (sqlite3 {self.path} .recover) and start a new run with another run.id from the newest "
                "checkpoint or export."
            ) from None

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
        """One transaction. Tried again while the disk is full, for ``disk_timeout_s`` at most."""
        if self.failure is not None:
            return self.failure
        by_kind: dict[str, list[tuple[Any, ...]]] = {kind: [] for kind in STATEMENTS}
        try:
            for records, _ in batch:
                for record in records:
                    by_kind[record.kind].append(row_of(record))
        except (
            Exception
        ) as error:  # a record that is none is a bug of ours: this thread lives on to say so to whoever waits
            self.failure = InvariantError(f"A record can't be written to the journal: {type(error).__name__}: {error}.")
            return self.failure
        self.full_since = None
        while True:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                for kind, rows in by_kind.items():
                    if rows:
                        write(self._db, kind, rows)
                self._db.execute("COMMIT")
                if self.full_since is not None:
                    log.warning("disk_has_space_again", after_s=round(time.monotonic() - self.full_since, 1))
                    self.full_since = None
                return None
            except sqlite3.Error as error:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                if not self._wait_for_space(error):
                    self.failure = ForebayError(
                        f"The journal {self.path} can't be written: {error}. Nothing after the last acknowledgement was kept; free "
                        "space or mend the disk, then start the coordinator again."
                    )
                    return self.failure

    def _wait_for_space(self, error: sqlite3.Error) -> bool:
        """Whether to try again."""
        if not _disk_is_full(error, self.path.parent) or self._closing:
            return False
        if self.full_since is None:
            self.full_since = time.monotonic()
            log.error(
                "disk_full", path=str(self.path), waits_s=self._disk_timeout_s, limit="coordinator.disk_timeout_s"
            )
        time.sleep(SPACE_POLL_S)
        return time.monotonic() - self.full_since < self._disk_timeout_s

    def close(self) -> None:
        """Write what is queued and close. A full disk isn't waited for any more."""
        self._closing = True
        self._queue.put(None)
        self._thread.join()
        self._db.close()
        self._lock.close()

    # ---- reading ----

    def batch(self, step: int) -> list[Group]:
        """The groups of a step that was handed out before, for a learner that trains it again. For any thread.

        Raises:
            ConfigError: what is read is damaged.
        """
        with self._reading(), contextlib.closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)) as db:
            return list(load_groups(db, "step = ?", [step]).values())

    def steps(self, *, first: int, last: int) -> tuple[list[Step], list[Step]]:
        """The ``first`` and the ``last`` committed steps, in order: (step, seconds since the epoch, metrics).

        Raises:
            ConfigError: what is read is damaged.
        """
        query = "SELECT step, committed_at, metrics FROM steps WHERE committed_at IS NOT NULL ORDER BY step"
        with self._reading():
            oldest = [(step, at, json.loads(m)) for step, at, m in self._db.execute(f"{query} LIMIT ?", [first])]
            newest = [(step, at, json.loads(m)) for step, at, m in self._db.execute(f"{query} DESC LIMIT ?", [last])]
        return oldest, newest[::-1]


def _disk_is_full(error: sqlite3.Error, folder: Path) -> bool:
    """Some failures for want of space (a sync, a quota, the shared-memory file) SQLite calls I/O errors, and keeps the reason."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and shutil.disk_usage(folder).free < 2**20)


def _resolve(future: asyncio.Future[None], error: ForebayError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
