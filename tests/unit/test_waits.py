"""Named waits: what they say while they are open, and when they expire."""

import asyncio

import pytest

from common.errors import WaitTimeout
from common.waits import Idle, Overdue, WaitTable

LIMIT = {"timeout_s": 60.0, "limit_key": "run.weight_update_timeout_s"}


def test_open_waits_are_listed_oldest_first_and_vanish_with_their_block():
    waits = WaitTable()
    with waits.named("leases", on="coordinator", **LIMIT):
        with waits.named("weights v3", on="learner", timeout_s=5, limit_key="run.weight_update_timeout_s"):
            assert [(wait.what, wait.on) for wait in waits.snapshot()] == [
                ("leases", "coordinator"),
                ("weights v3", "learner"),
            ]
            second = waits.snapshot()[1]
            assert second.deadline == second.since + 5
        assert [wait.what for wait in waits.snapshot()] == ["leases"]
    assert waits.snapshot() == []


@pytest.mark.parametrize("left_out", ["timeout_s", "limit_key"])
def test_a_wait_without_a_limit_can_not_be_written(left_out):
    waits = WaitTable()
    limit = {key: value for key, value in LIMIT.items() if key != left_out}
    with pytest.raises(TypeError, match=left_out):
        waits.named("x", on="y", **limit)


def test_a_wait_vanishes_when_its_block_raises():
    waits = WaitTable()
    with pytest.raises(ValueError, match="boom"), waits.named("x", on="y", **LIMIT):
        raise ValueError("boom")
    assert waits.snapshot() == []


def test_a_wait_that_nobody_ends_is_overdue_after_some_looks_past_its_deadline():
    waits = WaitTable()
    overdue = Overdue(waits)
    with waits.named("a plan", on="coordinator", timeout_s=0, limit_key="run.weight_update_timeout_s"):
        with waits.named("leases", on="coordinator", **LIMIT):
            looks = [overdue.look() for _ in range(Overdue.LOOKS)]
        assert looks[:-1] == [None] * (Overdue.LOOKS - 1)
        assert "for a plan from coordinator" in str(looks[-1])
        assert "run.weight_update_timeout_s" in str(looks[-1])
    assert overdue.look() is None


def test_a_late_wait_that_ends_between_two_looks_is_forgiven():
    waits = WaitTable()
    overdue = Overdue(waits)
    for _ in range(2 * Overdue.LOOKS):
        with waits.named("a plan", on="coordinator", timeout_s=0, limit_key="run.weight_update_timeout_s"):
            assert overdue.look() is None


def test_the_time_without_work_is_the_sum_of_all_its_parts(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("common.waits.time.monotonic", lambda: clock[0])
    waits = WaitTable()
    idle = Idle(waits, "leases", on="coordinator", **LIMIT)
    expected = 0.0
    for step in (1.5, 0.25, 4.0):
        idle.set(True)
        idle.set(True)
        clock[0] += step
        expected += step
        assert idle.total_s == expected, "the open part counts"
        assert [wait.what for wait in waits.snapshot()] == ["leases"]
        idle.set(False)
        clock[0] += 10
        assert idle.total_s == expected
    assert waits.snapshot() == []


async def test_a_wait_that_is_over_gives_its_result():
    waits = WaitTable()
    assert await waits.wait_for(asyncio.sleep(0, result=7), "a seven", on="the loop", **LIMIT) == 7
    assert waits.snapshot() == []


async def test_an_expired_wait_says_what_for_on_whom_and_which_limit():
    waits = WaitTable()
    forever = asyncio.get_running_loop().create_future()
    with pytest.raises(WaitTimeout, match=r"s for a plan from coordinator.*run\.weight_update_timeout_s"):
        await waits.wait_for(
            forever, "a plan", on="coordinator", timeout_s=0.01, limit_key="run.weight_update_timeout_s"
        )
    assert forever.cancelled()
    assert waits.snapshot() == []


async def test_a_cancelled_wait_is_cancelled_and_not_expired():
    waits = WaitTable()
    forever = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(waits.wait_for(forever, "x", on="y", **LIMIT))
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
        await waits.wait_for(event.wait(), "the event", on="the setter", **LIMIT)
