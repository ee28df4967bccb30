"""The warm process as the suite sees it: which news belongs to which order, whenever they are read."""

import signal
import sys

import pytest

from tests.faults import warm

# One that tells of the first order late, with the end of what it started, and then of the second one; a third one is its end.
SLOW = """
import json, sys
def order(): return json.loads(sys.stdin.readline())["number"]
def tell(**news): print(json.dumps(news), flush=True)
first, second = order(), order()
tell(number=first, pid=101)
tell(pid=101, code=0)
tell(number=second, pid=102)
tell(pid=102, code=7)
third = order()
tell(number=third, pid=101)
"""


def test_a_role_is_the_one_that_was_ordered_though_an_earlier_order_was_given_up_and_its_end_is_kept(monkeypatch):
    nursery = warm.Nursery([sys.executable, "-c", SLOW])
    with monkeypatch.context() as impatient:
        impatient.setattr(warm, "START_S", 0.1)
        with pytest.raises(AssertionError, match="does not start roles any more"):
            nursery.start(["first"], "log", {})
    second = nursery.start(["second"], "log", {})
    assert second.pid == 102
    assert second.wait(60) == 7, "that it ended before anybody looked is no matter"
    assert second.poll() == 7
    third = nursery.start(["third"], "log", {})
    assert third.pid == 101
    assert third.wait(60) == -signal.SIGKILL, "not the code of the one before, and no wait for one whose parent is gone"
    with pytest.raises(AssertionError, match="does not start roles any more"):
        nursery.start(["fourth"], "log", {})
    nursery.close()
