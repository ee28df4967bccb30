"""Signs of life of a learner's ranks: what each is at, so that whoever waits for another in a collective can say for whom, and for what.

    training thread --Progress--> a thread on each rank, once a second --a store of rank 0's--> rank 0: who is behind
                                                                       <--what rank 0 makes of it, and of a failure--

The training thread pays one assignment for each part of its work; there is no further collective. Where a rank is in torch's own calls is seen
from outside, on its stack. ``behind`` is the rule; all else carries it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from common.waits import WaitTable

BEAT_S = 1.0
SILENT_S = 5.0  # without a sign: the process is suspended, gone, or cut off
STILL_S = 2.0  # at the same work: long enough to ask who is behind
MAX_NAMED = 5  # ranks in one sentence
LIMIT_KEY = "learner.wait_timeout_s"
_WRAPPERS = ("c10d_logger.py", "contextlib.py")


class Progress:
    """What the training thread is at: a phase, which all ranks enter in the same order, and a part of it, which is the rank's own."""

    def __init__(self) -> None:
        self.now: tuple[int, str, str, float] = (0, "the start", "", time.monotonic())

    def phase(self, name: str) -> None:
        """A new phase begins, such as ``train step 7``."""
        self.now = (self.now[0] + 1, name, "", time.monotonic())

    def part(self, name: str) -> None:
        """Within it, such as ``forward of micro-batch 3 of 8``."""
        self.now = (self.now[0], self.now[1], name, time.monotonic())


@dataclass(frozen=True)
class Sign:
    """What one rank said of itself. ``phase``: its number, as all ranks count. ``since_s``: at this part for so long, then.

    ``collective``: whether its training thread was in a call of torch.distributed. ``age_s``: of the sign, as its reader knows it.
    """

    rank: int
    phase: int
    doing: str
    place: str
    collective: bool
    since_s: float
    host: str
    pid: int
    age_s: float = field(default=0.0)

    @property
    def text(self) -> str:
        """One line for people."""
        who = f"rank {self.rank} (pid {self.pid} on {self.host})"
        if self.age_s > SILENT_S:
            return f"{who} gives no sign since {self.age_s:.0f} s, when it was at {self.doing}, in {self.place}"
        return f"{who} is at {self.doing} since {self.since_s + self.age_s:.0f} s, in {self.place}"


@dataclass(frozen=True)
class Word:
    """What rank 0 makes of the signs: ``on`` are the ranks that are behind, separated by ", ", and ``text`` says what they are at."""

    on: str = ""
    text: str = ""

    @staticmethod
    def of(late: Sequence[Sign]) -> Word:
        """``late``: from ``behind``."""
        named = late[:MAX_NAMED]
        return Word(", ".join(f"rank {sign.rank}" for sign in named), "; ".join(sign.text for sign in named))

    @property
    def encoded(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def decoded(data: bytes) -> Word:
        """The inverse."""
        return Word(**json.loads(data))


def behind(signs: Sequence[Sign]) -> list[Sign]:
    """Those that the others wait for; none, if that can't be told.

    Silent ranks come first. Else it is those in the earliest phase, and of them those that work while others sit in a collective.
    """
    if silent := [sign for sign in signs if sign.age_s > SILENT_S]:
        return silent
    first = min((sign.phase for sign in signs), default=0)
    late = [sign for sign in signs if sign.phase == first]
    working = [sign for sign in late if not sign.collective]
    found = working or late
    return found if len(found) < len(signs) else []


def whereabouts(frame: FrameType | None) -> tuple[str, bool]:
    """(the innermost function outside of torch on this stack, with file and line; whether it called torch.distributed)."""
    call, inside = "", False
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        where = path.as_posix()
        if "/torch/distributed/" in where:
            inside = True
            call = call if path.name in _WRAPPERS else frame.f_code.co_name
        elif "/torch/" not in where and path.name not in _WRAPPERS:
            at = f"{frame.f_code.co_name} ({path.name}:{frame.f_lineno})"
            return (f"{call} of {at}" if call else at), inside
        frame = frame.f_back
    return "no code of ours", inside


class Signs:
    """This rank's thread that gives signs and reads them. Rank 0 passes the store that it serves, the others one that they connected.

    On rank 0 ``waits`` has a wait on the ranks that are behind, from the moment they are. ``lose`` is called in the thread with the words of
    a rank that failed, or of rank 0's end, so that a rank which nothing else tells does not wait for its limit.
    """

    def __init__(
        self,
        store: Any,
        progress: Progress,
        waits: WaitTable,
        *,
        rank: int,
        size: int,
        timeout_s: float,
        lose: Callable[[str], None],
    ) -> None:
        self.rank, self.size, self._store, self._progress, self._timeout_s = rank, size, store, progress, timeout_s
        self._waits, self._open, self._lose = waits, contextlib.ExitStack(), lose
        self._waiting: tuple[tuple[int, ...], int] | None = None  # for which ranks, in which phase of ours
        self._heard: dict[int, tuple[bytes, float]] = {}  # rank 0: the last sign of each, and when it came
        self._word, self._word_at = Word(), time.monotonic()  # of rank 0 on who is behind
        self._beats = 0
        self._main = threading.main_thread().ident
        self._closed = threading.Event()
        self._voice = store.clone()  # of the training thread: this one may hang in the other, if rank 0 is suspended
        store.set(f"sign/{rank}", self._sign())
        if rank == 0:
            store.set("behind", Word().encoded)
            store.set("failed", "")
        self._thread = threading.Thread(target=self._run, name="signs", daemon=True)

    def start(self) -> None:
        """When the signs of all ranks are in the store."""
        self._thread.start()

    def close(self) -> None:
        """No more signs, and no more looking at others': this rank has left, or says itself why it ends."""
        self._closed.set()

    def tell_failed(self, error: BaseException) -> None:
        """The others hear within a second or two that this rank has failed, and why."""
        with contextlib.suppress(RuntimeError):  # rank 0 is gone, and with it the store
            self._voice.set("failed", f"rank {self.rank}: {str(error)[:500]}")

    @property
    def word(self) -> Word:
        """Who is behind, as far as this rank has heard."""
        silent_s = time.monotonic() - self._word_at
        if self.rank and silent_s > SILENT_S:
            return Word("rank 0", f"rank 0 gives no sign since {silent_s:.0f} s")
        return Word.of(behind(self._all())) if self.rank == 0 else self._word

    def _run(self) -> None:
        while not self._closed.wait(BEAT_S):
            try:
                self._store.set(f"sign/{self.rank}", self._sign())
                failed = self._store.get("failed").decode()
                if self.rank == 0:
                    self._look()
                else:
                    self._word, self._word_at = Word.decoded(self._store.get("behind")), time.monotonic()
            except RuntimeError as error:  # of torch's store
                failed = f"rank 0: its store is gone ({str(error).splitlines()[0][:200]})"
            if failed and not self._closed.is_set():
                self._lose(failed)
                return

    def _sign(self) -> bytes:
        phase, name, part, since = self._progress.now
        place, collective = whereabouts(sys._current_frames().get(self._main or 0))
        doing, self._beats = f"{name}, {part}" if part else name, self._beats + 1
        host = socket.gethostname()
        sign = Sign(self.rank, phase, doing, place, collective, time.monotonic() - since, host, os.getpid())
        return json.dumps(asdict(sign) | {"beat": self._beats}).encode()

    def _look(self) -> None:
        now, keys = time.monotonic(), [f"sign/{rank}" for rank in range(self.size)]
        for rank, data in enumerate(self._store.multi_get(keys)):
            if rank not in self._heard or self._heard[rank][0] != data:
                self._heard[rank] = data, now
        late = behind(self._all())
        self._store.set("behind", Word.of(late).encoded)
        phase, _, _, since = self._progress.now
        if not late or late[0].rank == 0 or (now - since < STILL_S and late[0].age_s <= SILENT_S):
            late = []
        waiting = (tuple(sign.rank for sign in late), phase) if late else None
        if waiting != self._waiting:
            self._waiting = waiting
            self._open.close()
            if late:
                last = ", ".join(sorted({sign.doing for sign in late[:MAX_NAMED]}))
                what = f"{self._progress.now[1]} (last sign: {last})"
                named = self._waits.named(what, on=Word.of(late).on, timeout_s=self._timeout_s, limit_key=LIMIT_KEY)
                self._open.enter_context(named)

    def _all(self) -> list[Sign]:
        now, found = time.monotonic(), []
        for data, at in list(self._heard.values()):
            fields = json.loads(data)
            del fields["beat"]
            found.append(Sign(**fields | {"age_s": now - at}))
        return found
