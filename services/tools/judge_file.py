"""``forebay reward --once IN.jsonl --out OUT.jsonl``: judge a file of completions without a run. ``public_format.py`` has the format.

    lines in (a thread) -> window, in input order: {at most 4 jobs a worker in the judge's hands, the rest done} -> lines out

Memory is bounded by the window, whatever the length of the input. Output is in input order, so a line count says how far an interrupted
run came: what is done stands in ``OUT.partial``, and the same command goes on from there (after kill -9, too). On SIGINT or SIGTERM
no new line is taken and the jobs in hand are finished, so nothing is judged twice.

Exit codes: 0 all lines have a verdict; 8 some lines have none (``infra_error``: they were refused, or the judge failed; the message says
which); 130 or 143 stopped by a signal; else as in ``common/errors.py``.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from common.errors import EXIT_NOT_JUDGED, ConfigError
from protocol.verdicts import JudgeResult, Verdict
from services.reward.config import RewardConfig
from services.reward.lines import LineReader, LineWriter
from services.reward.pool import JudgePool
from services.reward.public_format import MAX_LINE_BYTES, Id, LineRefused, format_line, id_of, parse_line, refusal

_JOBS_PER_WORKER = 4
_WINDOW = 1024  # lines between the oldest that is not done and the youngest that is in hand
_STOP_S = 60.0  # after a signal: for the jobs in hand
_REPORT_S = 5.0


def main(config: RewardConfig, source: str, target: str) -> int:
    """Judge all lines of ``source`` into ``target``; ``-`` is stdin or stdout. Returns the exit code.

    Raises:
        ConfigError: input or output can't be opened, or ``target.partial`` is of another input.
        ForebayError: reading or writing failed on the way.
    """
    if (
        "-" not in (source, target)
        and Path(target).exists()
        and Path(source).exists()
        and Path(source).samefile(target)
    ):
        raise ConfigError(f"--once and --out are the same file, {source}.")
    wake = threading.Event()
    with (
        closing(LineReader(source, max_line_bytes=MAX_LINE_BYTES, wake=wake.set)) as reader,
        closing(LineWriter(target)) as writer,
        closing(JudgePool(config)) as pool,
        _signals() as signals,
    ):
        pool.start()
        once = Once(
            pool, reader, writer, wake, max_in_hand=min(_JOBS_PER_WORKER * config.num_workers, config.max_queue)
        )
        with _progress(once):
            complete = once.run(signals)
        if complete:
            writer.finish()
        once.print_summary(target if complete else writer.name)
        if not complete:
            return 128 + signals[0]
        return EXIT_NOT_JUDGED if once.verdicts[Verdict.INFRA_ERROR] else 0


@dataclass(slots=True)
class _Entry:
    line_id: Id = None
    result: JudgeResult | None = None


class Once:
    """The pump between ``reader``, ``pool`` and ``writer``."""

    def __init__(
        self, pool: JudgePool, reader: LineReader, writer: LineWriter, wake: threading.Event, *, max_in_hand: int
    ) -> None:
        self._pool, self._reader, self._writer, self._wake = pool, reader, writer, wake
        self._max_in_hand = max_in_hand
        self._in_hand = 0
        self._window: deque[_Entry] = deque()
        self._finished: queue.SimpleQueue[tuple[_Entry, JudgeResult]] = queue.SimpleQueue()
        self._earlier: Iterator[bytes] | None = writer.earlier_lines()
        self.verdicts: Counter[Verdict] = Counter()
        self.num_earlier = 0
        self.began_at = time.monotonic()

    @property
    def num_done(self) -> int:
        """Lines with an answer, those of earlier runs included."""
        return self.verdicts.total()

    @property
    def rate(self) -> float:
        """Lines a second in this run."""
        return (self.num_done - self.num_earlier) / max(time.monotonic() - self.began_at, 1e-3)

    @property
    def share_read(self) -> float | None:
        """Of the input, if that has a length."""
        total = self._reader.num_bytes
        return None if not total else min(1.0, self._reader.num_bytes_taken / total)

    def run(self, signals: list[int]) -> bool:
        """Until all lines are answered: True. Or until the jobs in hand are, once ``signals`` holds one: then False."""
        deadline = float("inf")
        while True:
            if not signals:
                self._take_lines(signals)
            elif deadline == float("inf"):
                deadline = time.monotonic() + _STOP_S
            self._collect(stopping=bool(signals))
            self._write_what_is_in_order()
            if signals and (self._in_hand == 0 or time.monotonic() > deadline):
                return False
            if self._reader.ended and not self._window:
                self._check_nothing_is_left_over()
                return True
            if not self._finished.qsize():
                self._wake.wait(0.2)  # signals only set a mark: they are seen here at the latest
                self._wake.clear()

    def _take_lines(self, signals: list[int]) -> None:
        while self._in_hand < self._max_in_hand and len(self._window) < _WINDOW and not signals:
            if (item := self._reader.take()) is None:
                return
            number, line = item
            if line is not None and not line.strip():
                continue
            if self._was_done(number, line):
                continue
            entry = _Entry()
            self._window.append(entry)
            try:
                if line is None:
                    raise LineRefused(None, f"the line: longer than {MAX_LINE_BYTES >> 20} MiB")
                entry.line_id, completion, suite = parse_line(line)
            except LineRefused as error:
                entry.line_id, entry.result = error.line_id, refusal(f"{error} (line {number})")
                continue
            self._in_hand += 1
            future = self._pool.submit(completion, suite)
            future.add_done_callback(lambda done, entry=entry: self._on_done(entry, done))  # type: ignore[misc]

    def _on_done(self, entry: _Entry, future: Future[JudgeResult]) -> None:
        """In a thread of the pool."""
        result = refusal("the judge was closed") if future.cancelled() else future.result()
        self._finished.put((entry, result))
        self._wake.set()

    def _collect(self, *, stopping: bool) -> None:
        while not self._finished.empty():
            entry, result = self._finished.get()
            self._in_hand -= 1
            if not (
                stopping and result.verdict is Verdict.INFRA_ERROR
            ):  # Ctrl-C reaches workers, too: for the next run
                entry.result = result

    def _write_what_is_in_order(self) -> None:
        lines = []
        while self._window and (result := self._window[0].result) is not None:
            lines.append(format_line(self._window.popleft().line_id, result))
            self.verdicts[result.verdict] += 1
        if lines:
            self._writer.write(b"".join(lines))

    def _was_done(self, number: int, line: bytes | None) -> bool:
        """Whether an earlier run has answered this line."""
        earlier = next(self._earlier, None) if self._earlier is not None else None
        if earlier is None:
            self._earlier = None
            return False
        try:
            answer = json.loads(earlier)
            verdict, line_id = Verdict(answer["verdict"]), answer["id"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"Line {self.num_earlier + 1} of {self._writer.name} is no answer. Delete the file to begin anew."
            ) from None
        if line_id != (wanted := None if line is None else id_of(line)):
            raise ConfigError(
                f"{self._writer.name} is of another input: its answer {self.num_earlier + 1} is for id {line_id!r}, but line "
                f"{number} of the input has {wanted!r}. Delete it to begin anew, or choose another --out."
            )
        self.verdicts[verdict] += 1
        self.num_earlier += 1
        return True

    def _check_nothing_is_left_over(self) -> None:
        if self._earlier is not None and next(self._earlier, None) is not None:
            raise ConfigError(
                f"{self._writer.name} has more answers than the input has lines ({self.num_earlier}), so it is of another input. "
                "Delete it to begin anew, or choose another --out."
            )

    def print_summary(self, where: str) -> None:
        """Counts and speed, on stderr."""
        table = Table()
        for name in ("verdict", "lines", "share"):
            table.add_column(name, justify="left" if name == "verdict" else "right")
        for verdict in Verdict:
            if count := self.verdicts[verdict]:
                table.add_row(str(verdict), f"{count:,}", f"{count / self.num_done:.1%}")
        new = self.num_done - self.num_earlier
        earlier = f"; {self.num_earlier:,} were done before" if self.num_earlier else ""
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(table)
        console.print(
            f"{new:,} lines in {time.monotonic() - self.began_at:.1f} s: {self.rate:,.1f} a second, isolation "
            f"{self._pool.isolation}{earlier}. All {self.num_done:,} verdicts are in {where}"
        )


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The list that SIGINT and SIGTERM come into. A second one ends the process at once."""
    came: list[int] = []

    def note(signum: int, _: FrameType | None) -> None:
        if came:
            os._exit(128 + signum)
        came.append(signum)

    before = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def _progress(once: Once) -> Iterator[None]:
    """A bar for people at a terminal, a line every few seconds for others."""
    over = threading.Event()
    show = _bar if sys.stderr.isatty() else _report
    thread = threading.Thread(target=show, args=(once, over), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _text(once: Once) -> str:
    failed = once.verdicts[Verdict.INFRA_ERROR]
    return f"{once.num_done:,} judged, {once.rate:,.0f} a second" + (f", {failed:,} infra errors" if failed else "")


def _report(once: Once, over: threading.Event) -> None:
    while not over.wait(_REPORT_S):
        share = "" if once.share_read is None else f", {once.share_read:.0%} of the input read"
        print(_text(once) + share, file=sys.stderr, flush=True)


def _bar(once: Once, over: threading.Event) -> None:
    with Progress(
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task("", total=None if once.share_read is None else 1.0)
        while not over.wait(0.25):
            progress.update(task, description=_text(once), completed=once.share_read or 0.0)
