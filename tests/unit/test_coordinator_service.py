"""The coordinator's decisions, message by message, without a socket: what goes in and what is in the outbox after it."""

import re

import numpy as np
import pytest
from coordinator_desk import BROKEN, RIGHT, SUITE, Desk, of

from protocol import messages as m
from protocol.suites import hash_of, parse_suite
from protocol.verdicts import JudgeResult, Verdict


@pytest.fixture
def desk(tmp_path):
    desk = Desk(tmp_path)
    yield desk
    desk.close()


def test_a_sample_that_one_reward_node_failed_on_waits_for_another_that_is_busy(desk):
    leases = of(m.GenerateLease, desk.join("rollout", "gen"))
    desk.join("reward", "bad", capacity=1)
    desk.join("reward", "good", capacity=1)
    sent = [desk.sample("gen#1", leases[0][1], index) for index in (0, 1)]
    scores = [(to, lease) for each in sent for to, lease in of(m.ScoreLease, each)]
    busy = next(lease for to, lease in scores if to == "good#1")
    failed = next(lease for to, lease in scores if to == "bad#1")
    answer = m.ScoreResult(
        lease_id=failed.lease_id, group_id=failed.group_id, sample_index=failed.sample_index, result=BROKEN
    )
    assert of(m.ScoreLease, desk.say("bad#1", answer)) == []
    done = m.ScoreResult(
        lease_id=busy.lease_id,
        group_id=busy.group_id,
        sample_index=busy.sample_index,
        result=JudgeResult(verdict=Verdict.ACCEPTED, reward=1.0),
    )
    [(to, again)] = of(m.ScoreLease, desk.say("good#1", done))
    assert (to, again.group_id, again.sample_index) == ("good#1", failed.group_id, failed.sample_index)


def test_a_failure_of_the_judge_that_is_told_twice_counts_once(desk):
    (_, lease), *_ = of(m.GenerateLease, desk.join("rollout", "gen"))
    desk.join("reward", "judge", capacity=1)
    [(_, score)] = of(m.ScoreLease, desk.sample("gen#1", lease, 0))
    failure = m.ScoreResult(
        lease_id=score.lease_id, group_id=score.group_id, sample_index=score.sample_index, result=BROKEN
    )
    for _ in range(2):
        desk.say("judge#1", failure)
    assert desk.core.pool.groups[score.group_id].samples[score.sample_index].score_attempts == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"segments": []},
        {"segments": [m.Segment(version=0, num_tokens=2)]},
        {"logprobs": np.zeros(2, np.float32)},
        {"completion_ids": np.zeros(3, np.int64)},
        {"prompt_ids": np.zeros((2, 2), np.int32)},
    ],
)
def test_a_sample_that_could_not_be_trained_on_costs_its_lease_an_attempt_and_nothing_else(desk, changes):
    (_, lease), *_ = of(m.GenerateLease, desk.join("rollout", "gen"))
    sent = desk.sample("gen#1", lease, 0, **changes)
    assert [message.accepted for _, message in of(m.Ack, sent)] == [False]
    assert desk.core.state == "running"
    assert desk.core.pool.groups[lease.group_id].generate_attempts == 1
    assert lease.group_id in [again.group_id for _, again in of(m.GenerateLease, sent)]


def test_a_result_whose_acknowledgement_was_lost_is_counted_once(desk):
    (_, lease), *_ = of(m.GenerateLease, desk.join("rollout", "gen"))
    for _ in range(2):
        desk.seq = 10  # the second time it is the same request
        [(_, ack)] = of(m.Ack, desk.sample("gen#1", lease, 0))
        assert ack.accepted
    assert desk.core.pool.ledger.received == 3
    assert desk.core.members.nodes["gen"].counted_tokens == 3


def test_a_lease_whose_group_another_node_finished_is_over(desk):
    first = of(m.GenerateLease, desk.join("rollout", "slow"))
    lease = first[0][1]
    for index in (0, 1):  # as if it had been given to another node in between
        desk.sample("slow#1", lease.model_copy(update={"lease_id": "older"}), index, logprobs=np.ones(3, np.float32))
    node = desk.core.members.nodes["slow"]
    assert lease.lease_id in node.leases
    [(_, ack)] = of(m.Ack, desk.sample("slow#1", lease, 0))
    assert not ack.accepted
    assert lease.lease_id not in node.leases
    assert desk.core.pool.ledger.duplicate == 3


def test_a_hello_that_is_said_twice_changes_nothing(desk):
    leases = of(m.GenerateLease, desk.join("rollout", "gen"))
    again = desk.join("rollout", "gen")
    assert len(leases) == 2
    assert of(m.GenerateLease, again) == []
    assert len(of(m.Welcome, again)) == 1
    assert len(desk.core.members.nodes["gen"].leases) == 2


def test_a_node_that_comes_back_under_its_name_gives_up_what_it_had(desk):
    leases = of(m.GenerateLease, desk.join("rollout", "gen"))
    again = of(m.GenerateLease, desk.join("rollout", "gen", life=2))
    assert {lease.group_id for _, lease in again} == {lease.group_id for _, lease in leases}
    assert {to for to, _ in again} == {"gen#2"}


@pytest.mark.parametrize(("role", "second"), [("reward", "a"), ("learner", "b")])
def test_a_process_whose_place_another_took_does_not_take_it_back(desk, role, second):
    hello = m.Hello(role=role, node_id="a", host="h", pid=1, run_uid=desk.journal.run_uid)
    assert of(m.Welcome, desk.say("a#1", hello))
    assert of(m.Welcome, desk.join(role, second, life=2))
    assert desk.say("a#1", hello) == [], "not before it is known that the other lives"
    desk.say(f"{second}#2", m.Heartbeat(capacity=2))
    [(to, refused)] = of(m.Refused, desk.say("a#1", hello))
    assert to == "a#1"
    assert f"Process 2 on h has joined as {second!r} meanwhile" in refused.reason
    assert [node.process for node in desk.core.members.nodes.values()] == [f"{second}#2"]


def test_a_process_whose_place_went_to_one_that_is_dead_takes_it_back(desk):
    """The other's hello had waited for this coordinator longer than the other has lived."""
    hello = m.Hello(role="reward", node_id="a", host="h", pid=2, run_uid=desk.journal.run_uid)
    desk.join("reward", "a", life=2)
    desk.say("a#2", m.Heartbeat(capacity=2))
    desk.join("reward", "a", life=1)
    assert desk.say("a#2", hello) == []
    desk.tick(desk.core.members.nodes["a"].seen_at + 99)
    assert of(m.Welcome, desk.say("a#2", hello))
    assert [node.process for node in desk.core.members.nodes.values()] == ["a#2"]


def test_what_an_idle_node_generated_and_never_sent_is_written_off(desk):
    desk.join("rollout", "gen", capacity=0)
    for generated in (0, 100):
        desk.say("gen#1", m.Heartbeat(capacity=0, counters={"generated_tokens": generated}))
    assert desk.core.pool.ledger.failed == 100
    assert desk.core.members.nodes["gen"].tokens_in_flight == 0


# ---- suites by name ----


def test_a_lease_names_its_suite_and_the_suite_comes_when_it_is_asked_for(desk):
    (_, lease), *_ = of(m.GenerateLease, desk.join("rollout", "gen"))
    desk.join("reward", "judge")
    [(_, score)] = of(m.ScoreLease, desk.sample("gen#1", lease, 0))
    [(to, answer)] = of(m.Suite, desk.say("judge#1", m.SuiteRequest(suite_hash=score.suite_hash)))
    data = desk.arrays[0]["json_utf8"].tobytes()
    assert (to, answer.suite_hash) == ("judge#1", score.suite_hash)
    assert hash_of(data) == score.suite_hash
    assert parse_suite(data) == SUITE


@pytest.mark.parametrize(
    ("routed_experts", "reason"),
    [
        (None, "without routed_experts, but run.routing_replay = true"),
        (np.zeros((4, 2), np.uint8), r"routed_experts of uint8\[4, 2\], not uint8 or uint16 with 4 rows"),
        (np.zeros((5, 2, 2), np.uint8), "with 4 rows"),
        (np.zeros((4, 2, 2), np.int32), "routed_experts of int32"),
        (np.zeros((4, 3, 2), np.uint8), "another model"),
    ],
)
def test_a_sample_whose_routes_can_not_be_trained_with_is_refused(tmp_path, routed_experts, reason):
    desk = Desk(tmp_path, routing_replay=True)
    (_, lease), *_ = of(m.GenerateLease, desk.join("rollout", "gen"))
    good = np.zeros((4, 2, 2), np.uint8)
    assert of(m.Ack, desk.sample("gen#1", lease, 0, routed_experts=good))[0][1].accepted
    [(_, ack)] = of(
        m.Ack, desk.sample("gen#1", lease, 1, **({} if routed_experts is None else {"routed_experts": routed_experts}))
    )
    assert not ack.accepted
    assert re.search(reason, ack.reason), ack.reason
    desk.journal.close()


def test_routes_that_nobody_asked_for_are_refused(desk):
    (_, lease), *_ = of(m.GenerateLease, desk.join("rollout", "gen"))
    [(_, ack)] = of(m.Ack, desk.sample("gen#1", lease, 0, routed_experts=np.zeros((4, 2, 2), np.uint8)))
    assert ack.reason == "with routed_experts, but run.routing_replay = false"


def test_a_suite_that_no_lease_has_named_is_refused_without_ending_the_node(desk):
    desk.join("reward", "judge")
    [(_, refused)] = desk.say("judge#1", m.SuiteRequest(suite_hash="beef"))
    assert isinstance(refused, m.Refused)
    assert not refused.fatal
    assert "'beef'" in refused.reason


# ---- twins: the same text twice in a group ----


@pytest.fixture
def twins(tmp_path):
    """A group of 4 of which 0, 1 and 2 have one text; 0 is leased, 3 too."""
    desk = Desk(tmp_path, group_size=4)
    (_, desk.lease), *_ = of(m.GenerateLease, desk.join("rollout", "gen"))
    for name in ("a", "b"):
        desk.join("reward", name, capacity=3)
    sent = [desk.sample("gen#1", desk.lease, index, text="rare" if index == 3 else "same") for index in range(4)]
    desk.scores = [pair for each in sent for pair in of(m.ScoreLease, each)]
    yield desk
    desk.journal.close()


def test_a_text_is_judged_once_and_its_verdict_serves_the_group(twins):
    assert [lease.sample_index for _, lease in twins.scores] == [0, 3]
    to, lease = twins.scores[0]
    sent = twins.score(to, lease, RIGHT)
    assert of(m.ScoreLease, sent) == []
    samples = twins.samples_of(lease.group_id)
    assert [samples[index].result for index in range(4)] == [RIGHT, RIGHT, RIGHT, None]
    assert twins.core.leases.num_copied == 2
    assert twins.core.leases.verdicts["accepted"] == 3
    twins.score(*twins.scores[1], RIGHT)
    assert str(twins.core.pool.groups[lease.group_id].status) == "ready"


def test_a_twin_that_comes_after_the_verdict_takes_it_at_once(tmp_path):
    desk = Desk(tmp_path, group_size=3)
    (_, lease), *_ = of(m.GenerateLease, desk.join("rollout", "gen"))
    desk.join("reward", "judge")
    [pair] = of(m.ScoreLease, desk.sample("gen#1", lease, 0, text="same"))
    desk.score(*pair, RIGHT)
    assert of(m.ScoreLease, desk.sample("gen#1", lease, 2, text="same")) == []
    assert desk.samples_of(lease.group_id)[2].result == RIGHT
    desk.journal.close()


def test_a_text_whose_judge_failed_is_judged_under_the_next_sample_of_it(twins):
    to, lease = twins.scores[0]
    [(_, again)] = of(m.ScoreLease, twins.score(to, lease, BROKEN))
    assert (again.sample_index, again.completion) == (1, "same"), "the one that was held"
    twins.score("b#1", again, RIGHT)
    samples = twins.samples_of(lease.group_id)
    assert [samples[index].result for index in range(3)] == [RIGHT] * 3
    assert [samples[index].score_attempts for index in range(3)] == [1, 0, 0]


def test_a_text_whose_node_left_is_judged_on_another(twins):
    to, lease = twins.scores[0]
    [(other, again), *rest] = of(m.ScoreLease, twins.say(to, m.Goodbye(reason="drained")))
    assert other != to
    assert [again.completion, *(each.completion for _, each in rest)].count("same") == 1
    twins.score(other, again, RIGHT)
    assert all(twins.samples_of(lease.group_id)[index].result == RIGHT for index in range(3))


def test_twins_whose_lease_is_given_up_are_judged_all_the_same(twins):
    _, lease = twins.scores[0]
    for _ in range(twins.core.config.score_attempts * 3):
        open_leases = [
            (node, each)
            for node, each in twins.scores
            if each.completion == "same" and each.lease_id in twins.core.members.leases
        ]
        sent = [message for node, each in open_leases for message in twins.score(node, each, BROKEN)]
        twins.scores += of(m.ScoreLease, sent)
    assert all(twins.samples_of(lease.group_id)[index].lost for index in range(3))


def test_a_coordinator_that_starts_again_copies_what_was_judged_before(twins, tmp_path):
    _, lease = twins.scores[0]
    twins.score(*twins.scores[1], RIGHT)
    group = twins.core.pool.groups[lease.group_id]
    twins.core.pool.add_result(lease.group_id, 0, RIGHT)  # as if it died between this and the copies
    assert group.samples[1].result is None
    twins.write()
    twins.journal.close()
    again = Desk(tmp_path, group_size=4)
    again.core.leases._awaited.clear()
    assert of(m.ScoreLease, again.join("reward", "a")) == []
    assert str(again.core.pool.groups[lease.group_id].status) == "ready"
    assert again.core.leases.num_copied == 2
    again.journal.close()
    twins.journal = again.journal


def test_a_heartbeat_of_before_a_nodes_hello_changes_nothing(desk):
    desk.seq = 7
    desk.join("rollout", "a")
    desk.seq = 5
    assert desk.say("a#1", m.Heartbeat(capacity=0)) == []
    assert desk.core.members.nodes["a"].capacity == 2


def test_a_request_for_a_batch_that_is_late_is_not_taken_for_a_replay(desk):
    """Its samples may be gone, and the learner waits for those of another step."""
    desk.join("learner", "learner")
    desk.core.pool.version = 1
    late = desk.seq
    desk.seq += 1
    desk.say("learner#1", m.StepCommitted(step=1, metrics={}))
    desk.say("learner#1", m.BatchRequest(step=2))
    waiting = desk.core.steps._waiting
    desk.seq = late
    assert desk.say("learner#1", m.BatchRequest(step=1)) == []
    assert desk.core.steps._waiting == waiting
    assert desk.core.steps.handed_out is None


def test_a_learner_that_comes_back_may_be_at_a_step_until_it_asks_for_one(desk):
    """It was silent for a while, or the coordinator has restarted: a step that takes long must not be taken for a standstill."""
    back = m.Hello(role="learner", node_id="learner", host="h", pid=1, run_uid=desk.journal.run_uid)
    desk.say("learner#1", back)
    assert desk.core.steps.handed_out.step == 1
    desk.say("learner#1", m.BatchRequest(step=1))
    assert desk.core.steps.handed_out is None


def test_judgements_of_a_group_that_is_given_up_are_withdrawn(desk):
    (_, lease), (_, other) = of(m.GenerateLease, desk.join("rollout", "gen"))
    desk.join("reward", "judge", capacity=2)
    [(_, score)] = of(m.ScoreLease, desk.sample("gen#1", lease, 0))
    [(_, unrelated)] = of(m.ScoreLease, desk.sample("gen#1", other, 0))
    sent = desk.say("gen#1", m.LeaseFailed(lease_id=lease.lease_id, error="boom", permanent=True))
    assert [(to, cancel.lease_id) for to, cancel in of(m.CancelLease, sent)] == [("judge#1", score.lease_id)]
    assert desk.core.members.nodes["judge"].leases.keys() == {unrelated.lease_id}
    sent = desk.say("judge#1", m.LeaseCancelled(lease_id=score.lease_id, reason="withdrawn"))
    assert [ack.accepted for _, ack in of(m.Ack, sent)] == [True]


def test_a_lease_that_is_lost_on_the_way_is_sent_again_and_costs_no_attempt(desk):
    (_, lost), (_, held) = of(m.GenerateLease, desk.join("rollout", "gen"))
    group = desk.core.pool.groups[lost.group_id]
    node = desk.core.members.nodes["gen"]
    beat = m.Heartbeat(capacity=2, holds=m.VersionTag(version=0), lease_ids=[held.lease_id])
    assert of(m.GenerateLease, desk.say("gen#1", beat)) == [], "it may still be on its way"
    node.leases[lost.lease_id].sent_at -= 3.1 * desk.config.heartbeat_interval_s
    assert of(m.GenerateLease, desk.say("gen#1", beat)) == [("gen#1", lost)]
    assert of(m.GenerateLease, desk.say("gen#1", beat)) == [], "not with every heartbeat"
    assert (group.generate_attempts, group.deaths, lost.lease_id in node.leases) == (0, 0, True)


def test_nodes_that_are_silent_when_the_run_ends_are_told_when_they_come_back(desk):
    for role, name in (("rollout", "gen"), ("reward", "judge")):
        desk.join(role, name)
    desk.tick(desk.core.members.nodes["gen"].seen_at + desk.config.node_timeout_s + 1)
    assert not desk.core.members.nodes
    [(_, ack)] = of(m.Ack, desk.say("tool", m.StopRequest(reason="enough")))
    assert "gen, judge" in ack.reason
    assert not desk.core.all_left, "the coordinator stays for them, as long as leave_timeout_s"
    assert of(m.Shutdown, desk.say("gen#1", m.Heartbeat(capacity=2))) == [("gen#1", m.Shutdown(reason="enough"))]
    assert not desk.core.all_left
    [(_, refused)] = of(m.Refused, desk.join("reward", "judge", life=2))
    assert "has ended" in refused.reason
    assert desk.core.all_left
