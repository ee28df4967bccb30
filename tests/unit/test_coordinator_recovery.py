"""What the coordinator does after its own restart, its own standstill, and the deaths of nodes: message by message."""

import pytest
from coordinator_desk import BROKEN, RIGHT, Desk, of

from protocol import messages as m
from services.coordinator.core.effects import ReadBatch


def reopen(desk, tmp_path, **changes):
    """The same run in the next life of the coordinator."""
    desk.write()
    desk.journal.close()
    return Desk(tmp_path, **changes)


def rejoin(desk, role, name, leases, life=1, settled_tokens=-1):
    hello = m.Hello(
        role=role,
        node_id=name,
        host="h",
        pid=life,
        capacity=2,
        holds=m.VersionTag(version=0) if role == "rollout" else None,
        run_uid=desk.journal.run_uid,
        open_leases=leases,
        settled_tokens=settled_tokens,
    )
    return desk.say(f"{name}#{life}", hello)


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("coordinator_desk.monotonic", lambda: now[0])
    return now


@pytest.fixture
def desks():
    """Whatever a test appends is closed."""
    made = []
    yield made
    pool = made[-1].core.pool
    pool.ledger.check(buffered=pool.buffered_tokens, live_groups=len(pool.groups))
    made[-1].journal.close()


def test_a_node_keeps_the_leases_that_it_holds_over_a_restart_of_the_coordinator(tmp_path, desks, clock):
    before = Desk(tmp_path)
    (_, first), (_, second) = of(m.GenerateLease, before.join("rollout", "gen"))
    before.sample("gen#1", first, 0)
    desk = reopen(before, tmp_path)
    desks.append(desk)
    held = [m.OpenLease(lease_id=lease.lease_id, group_id=lease.group_id) for lease in (first, second)]
    rejoin(desk, "rollout", "gen", held)
    beat = m.Heartbeat(capacity=2, lease_ids=[first.lease_id, second.lease_id], holds=m.VersionTag(version=0))
    [(_, ack)] = of(m.HeartbeatAck, desk.say("gen#1", beat))
    assert ack.lost_lease_ids == []
    clock[0] += 100
    assert of(m.GenerateLease, desk.join("rollout", "other")) == [], "nothing is generated twice"
    desk.sample("gen#1", first, 1)
    assert sorted(desk.samples_of(first.group_id)) == [0, 1]
    assert first.lease_id not in desk.core.members.leases


def test_work_that_nobody_claims_after_a_restart_is_given_out_when_its_node_must_be_dead(tmp_path, desks, clock):
    before = Desk(tmp_path)
    leases = of(m.GenerateLease, before.join("rollout", "gen"))
    before.sample("gen#1", leases[0][1], 0)
    desk = reopen(before, tmp_path)
    desks.append(desk)
    assert of(m.GenerateLease, desk.join("rollout", "other")) == []
    assert of(m.ScoreLease, desk.join("reward", "judge")) == []
    clock[0] += 20  # the one that had it may be silent so long
    beat = m.Heartbeat(capacity=2, holds=m.VersionTag(version=0))
    sent = desk.say("other#1", beat)
    assert [lease.sample_indices for _, lease in of(m.GenerateLease, sent)] == [[1], [0, 1]]
    assert [lease.sample_index for _, lease in of(m.ScoreLease, sent)] == [0]


def test_a_score_lease_is_kept_too_and_its_twins_wait_for_it(tmp_path, desks, clock):
    before = Desk(tmp_path)
    (_, lease), *_ = of(m.GenerateLease, before.join("rollout", "gen"))
    before.join("reward", "judge")
    [(_, score)] = of(m.ScoreLease, before.sample("gen#1", lease, 0, text="same"))
    before.sample("gen#1", lease, 1, text="same")
    desk = reopen(before, tmp_path)
    desks.append(desk)
    held = m.OpenLease(lease_id=score.lease_id, group_id=score.group_id, sample_index=0)
    rejoin(desk, "reward", "judge", [held])
    clock[0] += 16
    assert of(m.ScoreLease, desk.say("judge#1", m.Heartbeat(capacity=2, lease_ids=[score.lease_id]))) == []
    desk.score("judge#1", score, RIGHT)
    assert [s.result.verdict for s in desk.samples_of(score.group_id).values()] == ["accepted", "accepted"]


def test_a_claim_to_what_is_done_or_another_has_is_refused(tmp_path, desks, clock):
    before = Desk(tmp_path)
    (_, first), (_, second) = of(m.GenerateLease, before.join("rollout", "gen"))
    for index in (0, 1):
        before.sample("gen#1", first, index)
    desk = reopen(before, tmp_path)
    desks.append(desk)
    rejoin(desk, "rollout", "a", [m.OpenLease(lease_id="x", group_id=second.group_id)])
    claims = [("done", first.group_id), ("taken", second.group_id), ("unknown", 99)]
    rejoin(desk, "rollout", "b", [m.OpenLease(lease_id=name, group_id=group_id) for name, group_id in claims])
    beat = m.Heartbeat(capacity=2, lease_ids=["done", "taken", "unknown"], holds=m.VersionTag(version=0))
    [(_, ack)] = of(m.HeartbeatAck, desk.say("b#1", beat))
    assert ack.lost_lease_ids == ["done", "taken", "unknown"]


def test_a_request_that_comes_twice_is_answered_the_same_and_done_once(tmp_path, desks):
    desk = Desk(tmp_path)
    desks.append(desk)
    (_, lease), *_ = of(m.GenerateLease, desk.join("rollout", "gen"))
    answers = []
    for _ in range(3):
        desk.seq = 50
        failed = m.LeaseFailed(lease_id=lease.lease_id, error="boom", num_tokens=4)
        answers += of(m.Ack, desk.say("gen#1", failed))
    assert len(answers) == 3
    assert desk.core.pool.ledger.failed == 4
    assert desk.core.pool.groups[lease.group_id].generate_attempts == 1


def test_a_coordinator_that_stood_still_takes_nobody_for_dead(tmp_path, desks, clock):
    desk = Desk(tmp_path)
    desks.append(desk)
    (_, lease), *_ = of(m.GenerateLease, desk.join("rollout", "gen"))
    clock[0] += 1000
    desk.tick(clock[0], stalled_s=1000)
    assert lease.lease_id in desk.core.members.nodes["gen"].leases
    assert desk.core.state == "running"
    clock[0] += 20
    desk.tick(clock[0])
    assert "gen" not in desk.core.members.nodes


def die(desk, clock, *names):
    """These nodes fall silent, and the others don't."""
    clock[0] += 20
    for node in desk.core.members.nodes.values():
        if node.node_id not in names:
            node.seen_at = clock[0]
    return desk.tick(clock[0])


def test_a_prompt_that_kills_its_nodes_is_out_after_three_and_takes_no_neighbour_with_it(tmp_path, desks, clock):
    desk = Desk(tmp_path, max_staleness=3)
    desks.append(desk)
    held = of(m.GenerateLease, desk.join("rollout", "n0", capacity=3))
    poison, *neighbours = sorted(lease.group_id for _, lease in held)
    for life in (1, 2, 3):
        sent = die(desk, clock, f"n{life - 1}") + desk.join("rollout", f"n{life}", capacity=3)
        groups = [lease.group_id for _, lease in of(m.GenerateLease, sent)]
        if life == 1:
            assert set(groups) == {poison, *neighbours}
        elif life == 2:
            suspects = [group_id for group_id in groups if group_id in (poison, *neighbours)]
            assert suspects == [poison], "whom a second node died on goes alone"
    assert poison not in desk.core.pool.groups
    assert all(group_id in desk.core.pool.groups for group_id in neighbours)
    [reason] = [r["reason"] for r in events(desk, "group_failed")]
    assert "3 rollout nodes went away while they generated it" in reason
    assert "no heartbeat" in reason


def events(desk, kind):
    records = [record for record in desk.records if record.kind == "event"]
    return [record.values[1] for record in records if record.values[0] == kind]


def test_a_sample_that_kills_its_judges_leaves_its_group(tmp_path, desks, clock):
    desk = Desk(tmp_path, group_size=3, min_group_size=2)
    desks.append(desk)
    (_, lease), *_ = of(m.GenerateLease, desk.join("rollout", "gen"))
    for index in range(3):
        desk.sample("gen#1", lease, index)
    group = desk.core.pool.groups[lease.group_id]
    desk.core.pool.add_result(group.group_id, 1, RIGHT)
    desk.core.pool.add_result(group.group_id, 2, RIGHT.model_copy(update={"reward": 0.0}))
    for life in (1, 2, 3):
        [(_, score)] = of(m.ScoreLease, desk.join("reward", f"judge-{life}"))
        assert score.sample_index == 0
        die(desk, clock, f"judge-{life}")
    assert group.samples[0].lost
    assert str(group.status) == "ready"
    assert group.rewards() == [1.0, 0.0]


def test_a_node_that_leaves_in_order_counts_against_nothing(tmp_path, desks):
    desk = Desk(tmp_path)
    desks.append(desk)
    (_, lease), *_ = of(m.GenerateLease, desk.join("rollout", "gen"))
    desk.say("gen#1", m.Goodbye(reason="drained"))
    assert desk.core.pool.groups[lease.group_id].deaths == 0


def test_when_nothing_but_failures_comes_back_the_run_ends_and_says_why(tmp_path, desks):
    desk = Desk(tmp_path, generate_attempts=1, max_failed_in_a_row=3, task_attempts=9)
    desks.append(desk)
    sent = desk.join("rollout", "gen", capacity=1)
    for _ in range(3):
        [(_, lease)] = of(m.GenerateLease, sent)
        sent = desk.say("gen#1", m.LeaseFailed(lease_id=lease.lease_id, error="CUDA error: no device"))
    assert "The last 3 groups failed" in desk.core.pool.quarantine.give_up_reason
    assert "CUDA error: no device" in desk.core.pool.quarantine.give_up_reason


def test_when_every_task_is_out_the_run_ends_and_says_why(tmp_path, desks):
    desk = Desk(tmp_path)
    desks.append(desk)
    sent = desk.join("rollout", "gen", capacity=1)
    for _ in range(5):
        [(_, lease)] = of(m.GenerateLease, sent)
        sent = desk.say("gen#1", m.LeaseFailed(lease_id=lease.lease_id, error="too long", permanent=True))
    assert desk.core.pool.quarantine.give_up_reason == "All 5 tasks are quarantined. The last one: too long."


def test_a_judge_that_always_fails_on_a_task_puts_the_task_out_and_not_the_others(tmp_path, desks):
    desk = Desk(tmp_path, score_attempts=2, task_attempts=1)
    desks.append(desk)
    (_, lease), *_ = of(m.GenerateLease, desk.join("rollout", "gen"))
    task_index = desk.core.pool.groups[lease.group_id].task_index
    desk.join("reward", "judge", capacity=1)
    sent = [message for index in (0, 1) for message in desk.sample("gen#1", lease, index)]
    for _ in range(4):
        scores = of(m.ScoreLease, sent)
        sent = desk.score("judge#1", scores[0][1], BROKEN)
    assert list(desk.core.pool.quarantine.tasks) == [task_index]
    assert "no disk" in desk.core.pool.quarantine.tasks[task_index]


def test_a_learner_whose_batches_are_gone_is_told_to_bring_its_checkpoints(tmp_path, desks):
    desk = Desk(tmp_path)
    desks.append(desk)
    pool = desk.core.pool
    pool.version = 7
    pool._retention._steps.append((5, 10))  # what came before has been forgotten
    [(_, refused)] = of(m.Refused, desk.join("learner", "learner"))
    assert "newest checkpoint is of step 0, and the journal has batches from step 5 on" in refused.reason
    assert of(m.Welcome, rejoin(desk, "learner", "learner", [])), "one that is at work resumes from nothing"


def test_tokens_of_a_node_that_was_only_cut_off_are_counted_once(tmp_path, desks, clock):
    desk = Desk(tmp_path)
    desks.append(desk)
    (_, lease), *_ = of(m.GenerateLease, desk.join("rollout", "gen"))
    beat = m.Heartbeat(
        capacity=2,
        lease_ids=[lease.lease_id],
        holds=m.VersionTag(version=0),
        counters={"generated_tokens": 6.0},
    )
    desk.say("gen#1", beat)
    die(desk, clock, "gen")
    assert desk.core.pool.ledger.lost == 6
    rejoin(desk, "rollout", "gen", [])
    desk.say("gen#1", beat)
    for index in (0, 1):
        desk.sample("gen#1", lease, index)
    ledger, node = desk.core.pool.ledger, desk.core.members.nodes["gen"]
    assert (ledger.lost, ledger.received, node.tokens_in_flight) == (0, 6, 0)


def test_a_process_that_died_and_started_again_has_lost_what_it_had(tmp_path, desks, clock):
    desk = Desk(tmp_path)
    desks.append(desk)
    desk.join("rollout", "gen")
    counters = {"generated_tokens": 6.0}
    desk.say("gen#1", m.Heartbeat(capacity=2, holds=m.VersionTag(version=0), lease_ids=["x"], counters=counters))
    desk.join("rollout", "gen", life=2)
    assert desk.core.pool.ledger.lost == 6


def test_a_node_that_did_not_hear_of_the_end_is_told_again(tmp_path, desks):
    desk = Desk(tmp_path)
    desks.append(desk)
    desk.join("reward", "judge")
    assert of(m.Shutdown, desk.say("tool", m.StopRequest(reason="enough")))
    [(to, shutdown)] = of(m.Shutdown, desk.say("judge#1", m.Heartbeat(capacity=2)))
    assert (to, shutdown.reason) == ("judge#1", "enough")


def test_a_result_whose_acknowledgement_was_lost_in_a_cut_is_counted_once(tmp_path, desks, clock):
    """Also when its group has been trained meanwhile, so that nothing but the request itself tells that it came before."""
    desk = Desk(tmp_path, min_group_size=2)
    desks.append(desk)
    (_, lease), *_ = of(m.GenerateLease, desk.join("rollout", "gen"))
    desk.join("reward", "judge")
    sent = desk.sample("gen#1", lease, 0)
    desk.seq = 70
    sent += desk.sample("gen#1", lease, 1)
    for index, (_, score) in enumerate(of(m.ScoreLease, sent)):
        desk.score("judge#1", score, RIGHT.model_copy(update={"reward": float(index)}))
    die(desk, clock, "gen")
    pool = desk.core.pool
    assert pool.take_batch(1)
    pool.commit(1, {})
    rejoin(desk, "rollout", "gen", [])
    desk.seq = 70  # the request that was not answered, as it was
    [(_, ack)] = of(m.Ack, desk.sample("gen#1", lease, 1))
    node = desk.core.members.nodes["gen"]
    counters = {"generated_tokens": 6.0}
    desk.say("gen#1", m.Heartbeat(capacity=2, holds=m.VersionTag(version=1), counters=counters))
    assert (ack.accepted, pool.ledger.received, pool.ledger.duplicate, node.tokens_in_flight) == (True, 6, 0, 0)


@pytest.mark.parametrize("version", [-1, 2, 50])
def test_a_sample_of_weights_that_its_group_can_not_have_is_refused_when_it_comes(tmp_path, desks, version):
    """It would be in the journal, and stop the coordinator at the step that trains on it, at every start."""
    desk = Desk(tmp_path)
    desks.append(desk)
    (_, lease), *_ = of(m.GenerateLease, desk.join("rollout", "gen"))
    group = desk.core.pool.groups[lease.group_id]
    group.admitted_version = 1 if version < 0 else 0
    segments = [m.Segment(version=max(0, version), num_tokens=3)]
    [(_, ack)] = of(m.Ack, desk.sample("gen#1", lease, 0, segments=segments))
    assert not ack.accepted
    assert "the newest is 1" in ack.reason
    assert group.samples == {}
    assert group.generate_attempts == 1


@pytest.mark.parametrize(("holds", "publish"), [(4, True), (5, True), (6, False)])
async def test_a_replay_takes_no_engine_back_to_older_weights(tmp_path, desks, holds, publish):
    """The step after the replayed ones was published before the learner died and never committed: it is published anew, and next."""
    desk = Desk(tmp_path)
    desks.append(desk)
    desk.core.pool.version = 5
    desk.join("rollout", "gen")
    desk.core.members.nodes["gen"].holds = m.VersionTag(version=holds)
    assert desk.core.steps._is_newest_held(5) is publish
    assert desk.core.steps._is_newest_held(4) is False


def test_a_replay_without_samples_ends_the_run_and_does_not_keep_the_learner_waiting(tmp_path, desks):
    desk = Desk(tmp_path)
    desks.append(desk)
    read = ReadBatch(b"learner#1", 1, 3)
    desk.core.batch_read(read, desk.journal.batch(3), 0.0)
    assert desk.core.state == "failed"
    assert "batch of step 3 can't be read again" in desk.core.end_reason


def test_tokens_whose_acknowledgement_a_crash_of_the_coordinator_took_away_are_counted_once(tmp_path, desks, clock):
    """They were written, the group was given up, and its samples are in no group that the next life could compare them with."""
    before = Desk(tmp_path)
    (_, lease), (_, other) = of(m.GenerateLease, before.join("rollout", "gen"))
    before.sample("gen#1", other, 0)  # heard of: 3 tokens are settled
    before.sample("gen#1", lease, 0)
    failed = m.LeaseFailed(lease_id=lease.lease_id, error="boom", permanent=True, num_tokens=4)
    before.say("gen#1", failed)
    assert lease.group_id not in before.core.pool.groups
    desk = reopen(before, tmp_path)
    desks.append(desk)
    ledger = desk.core.pool.ledger
    assert (ledger.received, ledger.failed) == (10, 7)
    held = [m.OpenLease(lease_id=each.lease_id, group_id=each.group_id) for each in (lease, other)]
    rejoin(desk, "rollout", "gen", held, settled_tokens=3)
    counters = {"generated_tokens": 13.0}
    beat = m.Heartbeat(
        capacity=2, lease_ids=[each.lease_id for each in held], holds=m.VersionTag(version=0), counters=counters
    )
    desk.say("gen#1", beat)
    node = desk.core.members.nodes["gen"]
    assert node.tokens_in_flight == 3, "of the completion that it has at hand"
    desk.sample("gen#1", lease, 0)
    desk.say("gen#1", failed)
    assert (ledger.received, ledger.failed, ledger.duplicate) == (10, 7, 0)
    desk.sample("gen#1", lease, 1)  # comes late for its group, and is new
    assert (ledger.received, ledger.duplicate, node.tokens_in_flight) == (13, 3, 0)
