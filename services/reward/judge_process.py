"""One judge in a process of its own: ``python -m services.reward.judge_process FD CONFIG LEVELS``, started by ``pool.py`` and ended with it.

Over FD (a socket) come batches of requests, JSON ``[{"code", "suite", "definition"}, ...]``, where ``suite`` is the suite's content hash
and ``definition`` the suite itself the first time. Each is answered by one or more lists of results, in order. The first message
out is ``{"isolation"}`` or ``{"error"}``.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import OrderedDict
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

import common.logs
from common.errors import ConfigError
from common.lifecycle import die_with_parent
from protocol.suites import TestSuite, parse_suite
from services.reward.config import RewardConfig
from services.reward.judge import Judge

_FLUSH_S = 0.005  # answers are held back for no longer than this, so that quick ones travel together
_KEPT_BYTES = 256 << 20  # of suites

T = TypeVar("T")


class RecentlyUsed(Generic[T]):
    """The suites that a judge process holds, bounded by the size of their JSON. The pool keeps one too, of names, and so knows what the
    process has: both see the same uses in the same order."""

    def __init__(self, max_bytes: int = _KEPT_BYTES) -> None:
        self._items: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self._max_bytes, self._bytes = max_bytes, 0

    def get(self, name: str) -> T | None:
        """What is kept under ``name``, which then counts as just used."""
        if name not in self._items:
            return None
        self._items.move_to_end(name)
        return self._items[name][0]

    def put(self, name: str, item: T, size: int) -> None:
        """Keep ``item`` of ``size`` bytes, and forget what was used longest ago; never ``item`` itself."""
        self._items[name] = item, size
        self._bytes += size
        while self._bytes > self._max_bytes and len(self._items) > 1:
            self._bytes -= self._items.popitem(last=False)[1][1]


def main() -> int:
    """Judge until the pool goes away: its exit code."""
    die_with_parent(signal.SIGKILL)
    common.logs.setup("judge", level="info")
    link = Connection(int(sys.argv[1]))
    judge = Judge(RewardConfig.model_validate_json(sys.argv[2]), levels=tuple(sys.argv[3].split(",")))  # type: ignore[arg-type]
    try:
        judge.start()
    except ConfigError as error:
        link.send_bytes(json.dumps({"error": str(error)}).encode())
        return error.exit_code
    suites: RecentlyUsed[TestSuite] = RecentlyUsed()
    try:
        link.send_bytes(json.dumps({"isolation": judge.isolation}).encode())
        while True:
            answers: list[bytes] = []
            flushed_s = time.monotonic()
            for request in json.loads(link.recv_bytes()):
                if request["definition"] is not None:
                    definition = request["definition"]
                    suites.put(request["suite"], parse_suite(definition), len(definition))
                suite = suites.get(request["suite"])
                assert suite is not None, "the pool sends each suite once"
                answers.append(judge.judge_code(request["code"], suite).model_dump_json().encode())
                if time.monotonic() - flushed_s > _FLUSH_S:
                    _flush(link, answers)
                    flushed_s = time.monotonic()
            _flush(link, answers)
    except (EOFError, OSError):  # the pool went away
        return 0
    finally:
        judge.close()


def _flush(link: Connection, answers: list[bytes]) -> None:
    if answers:
        link.send_bytes(b"[" + b",".join(answers) + b"]")
        answers.clear()


if __name__ == "__main__":
    sys.exit(main())
