"""One judge in a process of its own: ``python -m services.reward.judge_process FD CONFIG``, started by ``pool.py`` and ended with it.

Over FD (a socket) come requests, and each is answered before the next: JSON ``{"code", "suite", "definition"}``, where ``suite`` is the
suite's content hash and ``definition`` the suite itself when this process has not seen it (or has forgotten it: ``known`` in the
answer is false then, and it is asked again). The first message out is ``{"isolation"}`` or ``{"error"}``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import OrderedDict
from multiprocessing.connection import Connection

import common.logs
from common.errors import ConfigError
from common.lifecycle import die_with_parent
from protocol.suites import TestSuite, parse_suite
from services.reward.config import RewardConfig
from services.reward.judge import Judge

_KEPT_SUITES = 2048


def main() -> int:
    """Judge until the pool goes away: its exit code."""
    die_with_parent(signal.SIGKILL)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a Ctrl-C at the terminal is for the pool, which ends this one in order
    common.logs.setup("judge", level="info")
    link = Connection(int(sys.argv[1]))
    judge = Judge(RewardConfig.model_validate_json(sys.argv[2]), levels=tuple(sys.argv[3].split(",")))  # type: ignore[arg-type]
    try:
        judge.start()
    except ConfigError as error:
        link.send_bytes(json.dumps({"error": str(error)}).encode())
        return error.exit_code
    link.send_bytes(json.dumps({"isolation": judge.isolation, "pid": os.getpid()}).encode())
    suites: OrderedDict[str, TestSuite] = OrderedDict()
    try:
        while True:
            request = json.loads(link.recv_bytes())
            if request["definition"] is not None:
                suites[request["suite"]] = parse_suite(request["definition"])
                if len(suites) > _KEPT_SUITES:
                    suites.popitem(last=False)
            suite = suites.get(request["suite"])
            if suite is None:
                link.send_bytes(b"{}")
                continue
            suites.move_to_end(request["suite"])
            link.send_bytes(judge.judge_code(request["code"], suite).model_dump_json().encode())
    except (EOFError, OSError):  # the pool went away
        return 0
    finally:
        judge.close()


if __name__ == "__main__":
    sys.exit(main())
