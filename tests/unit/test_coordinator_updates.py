"""Weight updates as the coordinator decides them, message by message: rounds, groups, who failed, what may be lost."""

import pytest
from coordinator_desk import V1, Desk, monotonic, of

from protocol import messages as m


@pytest.fixture
def desk(tmp_path):
    desk = Desk(tmp_path)
    yield desk
    desk.close()


def begin_update(desk, *nodes, only_fenced=False):
    request = m.WeightUpdateRequest(tag=V1, stores=["h:1"], only_fenced=only_fenced)
    plans = of(m.WeightUpdatePlan, desk.say("learner#1", request))
    assert {to for to, _ in plans} == {"learner#1", *(f"{node}#1" for node in nodes)}
    return plans[0][1]


@pytest.fixture
def trio(desk):
    desk.join("learner", "learner")
    for node in ("a", "b"):
        desk.join("rollout", node)
    return desk


def finish_update(desk, plan, *nodes):
    asked, sent = {}, []
    for identity in (*(f"{node}#1" for node in nodes), "learner#1"):
        assert of(m.TransferStart, sent) == []
        sent = desk.say(identity, m.WeightUpdateReady(update_id=plan.update_id))
        asked[identity] = desk.seq
    goes = {
        to: re for (to, message), re in zip(sent, desk.answers_to, strict=True) if isinstance(message, m.TransferStart)
    }
    assert goes == asked, "a go is the answer to each one's ready, so that it comes again when it is lost"
    for node in nodes:
        desk.say(f"{node}#1", m.WeightsLoaded(update_id=plan.update_id, receive_s=0, pause_s=0))
    return of(
        m.WeightUpdateResult, desk.say("learner#1", m.TransferDone(update_id=plan.update_id, num_bytes=1, send_s=0))
    )


def test_members_keep_their_groups_from_one_update_to_the_next(trio):
    first = begin_update(trio, "a", "b")
    assert len(finish_update(trio, first, "a", "b")) == 1
    second = begin_update(trio, "a", "b")
    assert second.update_id != first.update_id
    assert second.group_key == first.group_key


def test_a_group_key_is_never_used_again_after_a_failure(trio):
    keys = [begin_update(trio, "a", "b")]
    trio.say("learner#1", m.WeightUpdateFailed(update_id=keys[0].update_id, error="boom"))
    keys.append(begin_update(trio, "a", "b"))
    trio.say("a#1", m.WeightUpdateFailed(update_id=keys[1].update_id, error="boom"))
    keys.append(begin_update(trio, "a", "b"))
    trio.join("learner", "learner", life=2)
    trio.join("learner", "learner", life=1)
    keys.append(begin_update(trio, "a", "b"))
    assert len({plan.group_key for plan in keys}) == 4


def test_a_failure_before_all_is_sent_ends_the_waits_of_learner_and_nodes(trio):
    plan = begin_update(trio, "a", "b")
    aborted = of(m.WeightUpdateAborted, trio.say("b#1", m.WeightUpdateFailed(update_id=plan.update_id, error="boom")))
    assert {to for to, _ in aborted} == {"learner#1", "a#1", "b#1"}
    assert all("b: boom" in message.reason for _, message in aborted)


def test_a_node_that_fails_twice_is_left_out_of_this_publication_and_asked_again_for_the_next(trio):
    for _ in range(2):
        plan = begin_update(trio, "a", "b")
        trio.say("b#1", m.WeightUpdateFailed(update_id=plan.update_id, error="boom"))
    [(_, result)] = finish_update(trio, begin_update(trio, "a"), "a")
    assert result.acked == ["a"]
    begin_update(trio, "a", "b")


def test_a_node_that_restarts_within_an_update_ends_the_round(trio):
    begin_update(trio, "a", "b")
    aborted = of(m.WeightUpdateAborted, trio.join("rollout", "b", life=2))
    assert {to for to, _ in aborted} == {"learner#1", "a#1"}


@pytest.mark.parametrize("who", ["learner", "a"])
def test_a_ready_that_is_said_twice_gets_its_go_twice(trio, who):
    plan = begin_update(trio, "a", "b")
    for node in ("a", "b", "learner"):
        trio.say(f"{node}#1", m.WeightUpdateReady(update_id=plan.update_id))
    assert [
        to for to, _ in of(m.TransferStart, trio.say(f"{who}#1", m.WeightUpdateReady(update_id=plan.update_id)))
    ] == [f"{who}#1"]


def test_a_node_that_is_not_ready_is_sent_its_plan_again_for_it_may_be_lost(trio):
    plan = begin_update(trio, "a", "b")
    trio.say("a#1", m.WeightUpdateReady(update_id=plan.update_id))
    updates, again_s = trio.core.updates, trio.core.config.node_timeout_s
    began = updates.current.started_at
    for later_s, expected in ((0.9, []), (1, ["b#1"]), (1.5, []), (2, ["b#1"])):
        updates.expire(began + later_s * again_s)
        sends = trio.core._effects.take().sends
        assert [send.identity.decode() for send in sends if send.message == plan] == expected
        assert len(sends) == len(expected)
    assert len(finish_update(trio, plan, "a", "b")) == 1


def test_the_end_of_a_round_is_told_to_the_learner_until_it_says_something(trio):
    """It may sit in a broadcast that nothing else ends before its limit."""
    updates, again_s = trio.core.updates, trio.core.config.node_timeout_s

    def told_at(now):
        updates.expire(now)
        return [
            (send.identity.decode(), send.message.update_id)
            for send in trio.core._effects.take().sends
            if isinstance(send.message, m.WeightUpdateAborted)
        ]

    plan = begin_update(trio, "a", "b")
    trio.say("b#1", m.WeightUpdateFailed(update_id=plan.update_id, error="boom"))
    ended = updates._abort_sent_at
    assert told_at(ended + 0.9 * again_s) == []
    assert told_at(ended + again_s) == [("learner#1", plan.update_id)]
    assert told_at(ended + 1.5 * again_s) == []
    trio.say("learner#1", m.WeightUpdateReady(update_id=plan.update_id))  # answered: it is over
    assert told_at(ended + 9 * again_s) == []

    plan = begin_update(trio, "a", "b")
    trio.core.membership.drop(trio.core.members.learner, "was silent", monotonic(), died=True)
    trio.core._effects.take()
    trio.say("learner#1", m.Hello(role="learner", node_id="learner", host="h", pid=1, run_uid=trio.journal.run_uid))
    assert told_at(updates._abort_sent_at + again_s) == [("learner#1", plan.update_id)]
    begin_update(trio, "a", "b")
    assert told_at(updates._abort_sent_at + again_s) == []


def test_a_heartbeat_that_a_later_word_has_overtaken_changes_nothing(trio):
    plan = begin_update(trio, "a", "b")
    beat = m.Heartbeat(capacity=2, holds=m.VersionTag(version=0))
    trio.seq += 1  # the heartbeat's, which is late
    late = trio.seq
    finish_update(trio, plan, "a", "b")
    node = trio.core.members.nodes["a"]
    for newest in (trio.seq, trio.seq + 1):
        trio.seq = late - 1
        assert trio.say("a#1", beat) == []
        assert node.holds == V1
        trio.seq = newest
        trio.say("a#1", beat.model_copy(update={"capacity": 0, "holds": V1}))
        assert (node.holds, node.capacity) == (V1, 0)


def test_answers_to_an_update_that_is_over_change_nothing(trio):
    plan = begin_update(trio, "a", "b")
    trio.say("a#1", m.WeightUpdateFailed(update_id=plan.update_id, error="boom"))
    current = begin_update(trio, "a", "b")
    for message in (
        m.WeightUpdateReady(update_id=plan.update_id),
        m.WeightUpdateFailed(update_id=plan.update_id, error="late"),
    ):
        [(to, aborted)] = trio.say("b#1", message)
        assert isinstance(aborted, m.WeightUpdateAborted)
        assert (to, aborted.update_id) == ("b#1", plan.update_id)
    assert len(finish_update(trio, current, "a", "b")) == 1


def test_sync_ids_never_repeat_over_a_restart_of_the_coordinator(tmp_path):
    ids = []
    for _ in range(2):
        desk = Desk(tmp_path)
        desk.join("learner", "learner")
        desk.join("rollout", "a")
        ids.append(begin_update(desk, "a").update_id)
        desk.write()
        desk.journal.close()
    assert ids[0] < ids[1]


def test_a_node_that_just_failed_is_not_asked_again_at_once(trio, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("coordinator_desk.monotonic", lambda: clock[0])
    trio.core.pool.version = 1
    for name in ("a", "b"):
        node = trio.core.members.nodes[name]
        node.failed_at = 1000.0
    assert not trio.core.updates.wanted(trio.core.pool.version, clock[0])
    clock[0] += 6
    assert trio.core.updates.wanted(trio.core.pool.version, clock[0])


@pytest.mark.parametrize("store", ["127.0.0.1:9", "localhost:9", "[::1]:9"])
def test_weights_that_are_offered_where_another_machine_can_not_reach_them_are_refused_with_the_remedy(trio, store):
    assert of(m.WeightUpdatePlan, trio.say("learner#1", m.WeightUpdateRequest(tag=V1, stores=[store]))), (
        "all are on one machine"
    )
    trio.join("rollout", "far", host="elsewhere")
    [(to, refused)] = of(m.Refused, trio.say("learner#1", m.WeightUpdateRequest(tag=V1, stores=["10.0.0.1:9", store])))
    assert to == "learner#1"
    assert (
        f"offers its weights at {store}, which rollout nodes on elsewhere can't reach. Set learner.host"
        in refused.reason
    )
    for other in ("10.0.0.1:9", "node7:9"):  # the coordinator's own answer to a name is not the other machines'
        assert of(m.WeightUpdatePlan, trio.say("learner#1", m.WeightUpdateRequest(tag=V1, stores=[other])))
