"""The suites of a reward node, by name: asked for once, checked, and kept while there is room."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from protocol.suites import TestSuite, hash_of, parse_suite

MAX_KEPT_BYTES = 256 << 20  # of JSON; what Python makes of it takes some times as much


class SuiteStore:
    """``fetch`` gets the JSON of a suite by name. Used from one event loop."""

    def __init__(self, fetch: Callable[[str], Awaitable[bytes]], *, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._fetch = fetch
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, tuple[TestSuite, int]] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._on_the_way: dict[str, asyncio.Task[TestSuite]] = {}

    async def get(self, suite_hash: str) -> TestSuite:
        """The suite; leases that want it at the same time make one request. A failure is not kept: the next one asks again.

        Raises:
            ValueError: what came is not the suite of that name. Also whatever ``fetch`` raises.
        """
        if suite_hash in self._kept:
            self._kept.move_to_end(suite_hash)
            return self._kept[suite_hash][0]
        task = self._on_the_way.get(suite_hash)
        if task is None:
            task = self._on_the_way[suite_hash] = asyncio.create_task(self._load(suite_hash))
            task.add_done_callback(lambda done: self._arrived(suite_hash, done))
        return await asyncio.shield(task)  # a lease that is given up takes the others' request not with it

    async def _load(self, suite_hash: str) -> TestSuite:
        data = await self._fetch(suite_hash)
        if hash_of(data) != suite_hash:
            raise ValueError(f"The coordinator sent another suite than {suite_hash}.")
        suite = await asyncio.to_thread(parse_suite, data)
        self._kept[suite_hash] = (suite, len(data))
        self._num_bytes += len(data)
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            self._num_bytes -= self._kept.popitem(last=False)[1][1]
        return suite

    def _arrived(self, suite_hash: str, task: asyncio.Task[TestSuite]) -> None:
        del self._on_the_way[suite_hash]
        if not task.cancelled():
            task.exception()  # those who wait get it; without anybody, asyncio must not print its trace

    async def close(self) -> None:
        """Give up the open requests."""
        tasks = list(self._on_the_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
