"""Named waits: what they say while they are open, and when they expire."""

import asyncio

import pytest

from common.errors import WaitTimeout
from common.waits import WaitTable


def test_open_waits_are_listed_oldest_first_and_vanish_with_their_block():
    waits = WaitTable()
    with waits.named("leases", on="coordinator"):
        with waits.named("weights v3", on="learner", timeout_s=5, limit_key="run.sync_timeout_s"):
            assert [(wait.what, wait.on) for wait in waits.snapshot()] == [
                ("leases", "coordinator"),
                ("weights v3", "learner"),
            ]
            first, second = waits.snapshot()
            assert first.deadline is None
            assert second.deadline == second.since + 5
        assert [wait.what for wait in waits.snapshot()] == ["leases"]
    assert waits.snapshot() == []


def test_a_wait_vanishes_when_its_block_raises():
    waits = WaitTable()
    with pytest.raises(ValueError, match="boom"), waits.named("x", on="y"):
        raise ValueError("boom")
    assert waits.snapshot() == []


async def test_a_wait_that_is_over_gives_its_result():
    waits = WaitTable()
    assert await waits.wait_for(asyncio.sleep(0, result=7), "a seven", on="the loop", timeout_s=60) == 7
    assert waits.snapshot() == []


async def test_an_expired_wait_says_what_for_on_whom_and_which_limit():
    waits = WaitTable()
    forever = asyncio.get_running_loop().create_future()
    with pytest.raises(WaitTimeout, match=r"s for a plan from coordinator.*run\.sync_timeout_s"):
        await waits.wait_for(forever, "a plan", on="coordinator", timeout_s=0.01, limit_key="run.sync_timeout_s")
    assert forever.cancelled()
    assert waits.snapshot() == []


async def test_a_cancelled_wait_is_cancelled_and_not_expired():
    waits = WaitTable()
    forever = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(waits.wait_for(forever, "x", on="y", timeout_s=60))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert waits.snapshot() == []


async def test_no_wake_up_is_lost_however_the_setter_and_the_waiter_interleave():
    waits = WaitTable()
    loop = asyncio.get_running_loop()
    for turn in range(1000):
        event = asyncio.Event()
        for _ in range(turn % 3):
            loop.call_soon(lambda: None)
        loop.call_soon(event.set)
        if turn % 2:
            await asyncio.sleep(0)
        await waits.wait_for(event.wait(), "the event", on="the setter", timeout_s=60)
