"""What the learner makes of words that come early, late, or instead of others."""

import asyncio
from types import SimpleNamespace

import pytest

from common.errors import PeerError
from protocol import messages as m
from services.learner.link import Link
from services.learner.service import Learner

PLAN = m.WeightUpdatePlan(
    update_id=4,
    tag=m.VersionTag(version=1),
    stores=["h:1"],
    members=[m.WeightUpdateMember(node_id="a", first_rank=1, num_workers=1)],
    world_size=2,
    group_key="k",
    timeout_s=9.0,
)


@pytest.mark.parametrize(("update_id", "called_off"), [(4, ["k"]), (3, [])])
async def test_an_update_that_is_called_off_before_its_plan_is_taken_up_is_called_off_all_the_same(
    monkeypatch, update_id, called_off
):
    keys = []
    monkeypatch.setattr("services.learner.link.abort_group", lambda stores, key, reason, timeout_s: keys.append(key))
    link = object.__new__(Link)
    link.run = SimpleNamespace(weight_update_timeout_s=9.0)
    link._channel, link._plan, link._aborted = SimpleNamespace(pushes=asyncio.Queue()), None, None
    link._stop, link._shutdown = asyncio.Event(), asyncio.Event()
    for push in (m.WeightUpdateAborted(update_id=update_id, reason="a died"), m.Shutdown(reason="")):
        link._channel.pushes.put_nowait(SimpleNamespace(message=push))
    watch = asyncio.create_task(link._watch_pushes())
    await link._shutdown.wait()  # so the first one was read, too
    await link._begin(PLAN)
    assert keys == called_off
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)


@pytest.mark.parametrize("run_stopped", [True, False])
def test_the_word_that_the_run_is_over_is_an_answer_to_the_learners_last_message(run_stopped):
    def lost(message, what):
        raise PeerError("no answer")

    learner = SimpleNamespace(
        _export=lambda name: name, _last_checkpoint=lambda: None, _ask=lost, _was_told=lambda what: run_stopped
    )
    if run_stopped:
        return Learner._finish(learner)
    with pytest.raises(PeerError, match="no answer"):
        Learner._finish(learner)
