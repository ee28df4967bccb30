"""Lines in from a file or a pipe, and lines out to a file that an interrupted run can go on with."""

from __future__ import annotations

import fcntl
import os
import queue
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from common.errors import ConfigError, ForebayError

_CHUNK = 1 << 20


class LineReader:
    """Lines without their ends, in a thread of its own, so that a slow producer does not hold up what is done. ``-`` is stdin.

    Raises:
        ConfigError: no such file.
    """

    def __init__(self, source: str, *, max_line_bytes: int, wake: Callable[[], None]) -> None:
        try:
            self._fd = 0 if source == "-" else os.open(source, os.O_RDONLY)
            self.num_bytes = os.fstat(self._fd).st_size if stat.S_ISREG(os.fstat(self._fd).st_mode) else None
            os.read(self._fd, 0)  # a folder can be opened, but not read
        except OSError as error:
            raise ConfigError(f"{source} can't be read: {error.strerror}.") from None
        self._max_line_bytes = max_line_bytes
        self._wake = wake
        self._queue: queue.Queue[tuple[int, bytes | None] | OSError | None] = queue.Queue(maxsize=16)
        self.ended = False
        self.num_bytes_taken = 0
        self._closed = threading.Event()
        threading.Thread(target=self._read, name="lines", daemon=True).start()

    def take(self) -> tuple[int, bytes | None] | None:
        """The next line with its number (None for its text: it was too long); None when there is none just now, or ``ended``.

        Raises:
            ForebayError: reading failed.
        """
        if self.ended:
            return None
        try:
            item = self._queue.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, OSError):
            raise ForebayError(f"The input can't be read on: {item.strerror}.")
        if item is None:
            self.ended = True
            return None
        self.num_bytes_taken += len(item[1] or b"") + 1
        return item

    def close(self) -> None:
        """No more lines are wanted. A read that waits for its producer is left to end with the process."""
        self._closed.set()

    def _read(self) -> None:
        try:
            for item in enumerate(self._lines(), start=1):
                self._put(item)
                if self._closed.is_set():
                    break
            self._put(None)
        except OSError as error:
            self._put(error)
        if self._fd:
            os.close(self._fd)

    def _put(self, item: tuple[int, bytes | None] | OSError | None) -> None:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.5)
            except queue.Full:
                continue
            return self._wake()

    def _lines(self) -> Iterator[bytes | None]:
        rest, too_long = bytearray(), False
        while chunk := os.read(self._fd, _CHUNK):
            start = 0
            while (end := chunk.find(b"\n", start)) >= 0:
                rest += chunk[start:end]
                yield None if too_long or len(rest) > self._max_line_bytes else bytes(rest)
                rest, too_long, start = bytearray(), False, end + 1
            rest += chunk[start:]
            if len(rest) > self._max_line_bytes:
                rest, too_long = bytearray(), True
        if rest or too_long:
            yield None if too_long else bytes(rest)


class LineWriter:
    """Lines to ``target``. A regular file is written as ``target.partial`` and renamed by ``finish``; ``-`` (stdout), pipes and devices
    are written as they come.

    Raises:
        ConfigError: it can't be opened, or another process is writing it.
    """

    def __init__(self, target: str) -> None:
        self._target = Path(target)
        self._partial: Path | None = None
        try:
            if target == "-":
                self._fd = os.dup(1)
            elif self._target.exists() and not self._target.is_file():
                self._fd = os.open(target, os.O_WRONLY)
            else:
                self._partial = self._target.with_name(self._target.name + ".partial")
                self._fd = os.open(self._partial, os.O_RDWR | os.O_CREAT, 0o666)
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"Another process is writing {self._partial}. Wait for it, or choose another --out."
            ) from None
        except OSError as error:
            raise ConfigError(f"{target} can't be written: {error.strerror}.") from None
        self._good = 0  # bytes of whole lines

    @property
    def name(self) -> str:
        """What is being written, for messages."""
        return "stdout" if self._target == Path("-") else str(self._partial or self._target)

    def earlier_lines(self) -> Iterator[bytes]:
        """Whole lines that an earlier run left. Go through all of them before the first ``write``."""
        if self._partial is None:
            return
        with self._partial.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):  # cut off in the middle
                    break
                self._good += len(line)
                yield line
        os.ftruncate(self._fd, self._good)
        os.lseek(self._fd, self._good, os.SEEK_SET)

    def write(self, lines: bytes) -> None:
        """Append whole lines.

        Raises:
            ForebayError: the disk is full, say; what was written before is kept.
        """
        view = memoryview(lines)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            hint = ""
            if self._partial is not None:
                os.ftruncate(self._fd, self._good)
                hint = " What was done before is kept in it: mend that, and the same command goes on from there."
            raise ForebayError(f"{self.name} can't be written: {error.strerror}.{hint}") from None
        self._good += len(lines)

    def finish(self) -> None:
        """All lines are there."""
        if self._partial is not None:
            os.fsync(self._fd)
            self._partial.rename(self._target)

    def close(self) -> None:
        """Whether finished or not."""
        os.close(self._fd)
