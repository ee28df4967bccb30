"""Named waits: every wait in every role says what for, on whom, since when and until when.

A wait without a deadline can't be written: ``timeout_s`` and the config key that sets it are part of every one. ``wait_for`` raises
when its time is up. Other waits are looked after by ``Overdue``, from a task or thread that does not itself wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from common.errors import WaitTimeout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    """One open wait. ``since`` and ``deadline`` are readings of ``time.monotonic``.

    ``on`` holds node ids and roles, separated by ", ". ``onward``: whoever it is on must first get something from others, so the
    wait may be part of a circle; one that is over as soon as its peer answers, or in which both sides meet, is not.
    """

    what: str
    on: str
    since: float
    deadline: float
    limit_key: str
    onward: bool = False


class WaitTable:
    """The open waits of one process. Any thread may open, close and read them."""

    def __init__(self) -> None:
        self._open: dict[int, Wait] = {}
        self._keys = itertools.count()

    @contextmanager
    def named(self, what: str, *, on: str, timeout_s: float, limit_key: str, onward: bool = False) -> Iterator[Wait]:
        """Registers a wait for the length of the block; ``limit_key`` is the config key that sets ``timeout_s``."""
        now = time.monotonic()
        wait = Wait(what, on, now, now + timeout_s, limit_key, onward)
        key = next(self._keys)
        self._open[key] = wait
        try:
            yield wait
        finally:
            del self._open[key]

    async def wait_for(self, awaitable: Awaitable[T], what: str, *, on: str, timeout_s: float, limit_key: str) -> T:
        """``awaitable``'s result, as a named wait.

        Raises:
            WaitTimeout: not done within ``timeout_s``; the awaitable is cancelled.
        """
        with self.named(what, on=on, timeout_s=timeout_s, limit_key=limit_key) as wait:
            try:
                async with asyncio.timeout(timeout_s):
                    return await awaitable
            except TimeoutError:
                raise expired(wait) from None

    def snapshot(self) -> list[Wait]:
        """The open waits, oldest first."""
        return sorted(self._open.copy().values(), key=lambda wait: wait.since)


class Overdue:
    """Tells which waits nobody ends: those that are past their deadline at ``LOOKS`` looks, one after the other.

    Looks and not seconds, so that a process that was suspended can first read what came in the meantime.
    """

    LOOKS = 3

    def __init__(self, waits: WaitTable) -> None:
        self._waits = waits
        self._seen: dict[Wait, int] = {}

    def look(self) -> WaitTimeout | None:
        """To be called once a heartbeat: the error of the oldest wait that is overdue for good, or None."""
        now = time.monotonic()
        late = [wait for wait in self._waits.snapshot() if now > wait.deadline]
        self._seen = {wait: self._seen.get(wait, 0) + 1 for wait in late}
        return next((expired(wait) for wait in late if self._seen[wait] >= self.LOOKS), None)


class Idle:
    """A node's wait for work: open while the node has none. ``total_s`` is all the time that it was, in seconds."""

    def __init__(self, waits: WaitTable, what: str, *, on: str, timeout_s: float, limit_key: str) -> None:
        self._new: Callable[[], contextlib.AbstractContextManager[Wait]] = functools.partial(
            waits.named, what, on=on, timeout_s=timeout_s, limit_key=limit_key
        )
        self._open = contextlib.ExitStack()
        self._since: float | None = None
        self._sum_s = 0.0

    def set(self, idle: bool) -> None:
        """Whether there is no work at hand. Saying so again changes nothing."""
        if idle and self._since is None:
            self._since = self._open.enter_context(self._new()).since
        elif not idle and self._since is not None:
            self._sum_s, self._since = self.total_s, None
            self._open.close()

    @property
    def total_s(self) -> float:
        """Seconds without work so far; never falls."""
        return self._sum_s + (0.0 if self._since is None else time.monotonic() - self._since)


def expired(wait: Wait) -> WaitTimeout:
    """The error for a wait that passed its deadline."""
    age_s = time.monotonic() - wait.since
    return WaitTimeout(
        f"Waited {age_s:.1f} s for {wait.what} from {wait.on}, and it did not come. The limit is {wait.limit_key} in the config."
    )
