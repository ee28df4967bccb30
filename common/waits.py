"""Named waits: every wait in every role says what for, on whom, since when and until when (DESIGN section 4)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from common.errors import WaitTimeout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    """One open wait. ``since`` and ``deadline`` are readings of ``time.monotonic``; no deadline: ended by its owner only."""

    what: str
    on: str
    since: float
    deadline: float | None
    limit_key: str


class WaitTable:
    """The open waits of one process. Used from one thread or event loop; ``snapshot`` may be read from any."""

    def __init__(self) -> None:
        self._open: dict[int, Wait] = {}
        self._next = 0

    @contextmanager
    def named(self, what: str, *, on: str, timeout_s: float | None = None, limit_key: str = "") -> Iterator[Wait]:
        """Registers a wait for the length of the block; ``limit_key`` is the config key that sets ``timeout_s``."""
        now = time.monotonic()
        wait = Wait(what, on, now, None if timeout_s is None else now + timeout_s, limit_key)
        self._next += 1
        key = self._next
        self._open[key] = wait
        try:
            yield wait
        finally:
            del self._open[key]

    async def wait_for(
        self, awaitable: Awaitable[T], what: str, *, on: str, timeout_s: float | None, limit_key: str = ""
    ) -> T:
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


def expired(wait: Wait) -> WaitTimeout:
    """The error for a wait that passed its deadline."""
    age_s = time.monotonic() - wait.since
    limit = f" The limit is {wait.limit_key} in the config." if wait.limit_key else ""
    return WaitTimeout(f"Waited {age_s:.1f} s for {wait.what} from {wait.on}, and it did not come.{limit}")
