"""A blocked event loop names its culprit; a process that stood still blames nobody. Real blockages, real signals."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import structlog.testing

from common.loop_watch import LoopWatch
from tests.polling import until

ROOT = Path(__file__).resolve().parents[2]


def the_culprit(seconds):
    time.sleep(seconds)


async def test_a_blocked_loop_is_reported_once_with_the_stack_of_who_blocks_it_and_for_how_long():
    watch = LoopWatch(ping_s=0.02, blocked_s=0.2)
    with structlog.testing.capture_logs() as events:
        watch.start()
        await asyncio.sleep(0.1)
        the_culprit(1.0)
        await until(
            lambda: [e for e in events if e["event"] == "loop_unblocked" and e["at"].startswith("the_culprit in ")]
        )
        watch.stop()
    ours = [
        event for event in events if event.get("at", "").startswith("the_culprit in ")
    ]  # a busy machine may hold it up as well
    blocked, unblocked = ours
    assert [blocked["event"], unblocked["event"]] == ["loop_blocked", "loop_unblocked"]
    assert "the_culprit(1.0)" in blocked["stack"]
    assert "time.sleep(seconds)" in blocked["stack"]
    assert 0.5 < unblocked["seconds"] < 20
    assert watch.blocked_at.startswith("the_culprit in tests/unit/test_loop_watch.py:")
    assert watch.max_lag_ms > 500


async def test_the_worst_lag_since_the_last_look_is_given_once():
    watch = LoopWatch(ping_s=0.01, blocked_s=60)
    watch.start()
    await asyncio.sleep(0.1)
    time.sleep(0.5)  # noqa: ASYNC251
    await until(lambda: watch.max_lag_ms > 300)
    assert watch.take_lag_ms() > 300
    assert watch.take_lag_ms() < watch.max_lag_ms
    watch.stop()
    assert watch.blocked_at == ""


async def test_a_loop_that_turns_is_not_reported():
    watch = LoopWatch(ping_s=0.01, blocked_s=5)
    with structlog.testing.capture_logs() as events:
        watch.start()
        for _ in range(50):
            await asyncio.sleep(0.01)
        watch.stop()
    assert [event for event in events if event["event"].startswith("loop_")] == []


def test_a_process_that_was_stopped_says_that_it_stood_still_and_blames_no_stack():
    script = (
        "import asyncio, common.logs, common.loop_watch as w\n"
        "common.logs.setup('x', json=True)\n"
        "async def main():\n"
        "    w.LoopWatch(ping_s=0.02, blocked_s=1.5).start()\n"
        "    print('ready', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(process.pid, signal.SIGCONT)
        while (event := json.loads(process.stderr.readline()))["seconds"] <= 2:  # shorter ones are the machine's own
            assert event["event"] == "process_stood_still"
        time.sleep(0.3)
        process.kill()
        rest = process.stderr.read()
    assert event["event"] == "process_stood_still"
    assert 2 < event["seconds"] < 30
    assert "loop_blocked" not in rest
