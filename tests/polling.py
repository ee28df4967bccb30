"""Waiting for what another task, thread or process does. The limit is for what never comes; no test passes by it."""

import asyncio
import time

LIMIT_S = 60.0


async def until(is_so):
    """The event loop runs meanwhile."""
    async with asyncio.timeout(LIMIT_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def block_until(is_so):
    """The same without an event loop."""
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, "never so"
        time.sleep(0.01)
