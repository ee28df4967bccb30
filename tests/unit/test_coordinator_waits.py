"""What the coordinator says that the run waits for, state by state, without a socket; and when it gives up on a step."""

import time

import pytest
from coordinator_desk import V1, Desk, of

from protocol import messages as m
from services.coordinator.core import waits
from services.coordinator.status import build_status

NO_PROGRESS = "coordinator.no_progress_timeout_s"


@pytest.fixture
def desk(tmp_path):
    desk = Desk(tmp_path)
    yield desk
    desk.journal.close()


def rows_of(desk, *, later_s=0.0):
    rows = waits.coordinator_waits(desk.core, time.monotonic() + later_s)
    return {(row.who, row.what, row.on): row for row in rows}


def train(desk):
    """Get a batch to the learner ``learn``: two completions, two verdicts, a request."""
    (_, lease), *_ = of(m.GenerateLease, desk.join("rollout", "gen", capacity=1))
    desk.join("reward", "judge")
    desk.join("learner", "learn")
    for index in (0, 1):
        for to, score in of(m.ScoreLease, desk.sample("gen#1", lease, index)):
            desk.score(to, score, RIGHT)
    [(_, batch)] = of(m.Batch, desk.say("learn#1", m.BatchRequest(step=1)))
    return batch


RIGHT = m.JudgeResult(verdict="accepted", reward=1.0)


def test_roles_that_nobody_has_are_waited_for(desk):
    rows = rows_of(desk)
    assert {what for _, what, _ in rows} == {f"a {role} node to join" for role in ("rollout", "reward", "learner")}
    assert all(row.limit_key == NO_PROGRESS for row in rows.values())
    [row] = [row for (_, _, on), row in rows_of(desk, later_s=5000).items() if on == "learner"]
    assert row.age_s == pytest.approx(5000, abs=60)


def test_leases_are_waits_on_their_nodes_as_old_as_the_oldest(desk):
    leases = of(m.GenerateLease, desk.join("rollout", "gen"))
    [row] = [row for (_, _, on), row in rows_of(desk, later_s=7000).items() if on == "gen"]
    assert row.what == f"samples of {len(leases)} groups"
    assert row.age_s == pytest.approx(7000, abs=60)
    assert (row.deadline_s, row.limit_key) == (300, "coordinator.generate_timeout_s")
    desk.join("reward", "judge", capacity=1)
    desk.sample("gen#1", leases[0][1], 0)
    [row] = [row for (_, _, on), row in rows_of(desk).items() if on == "judge"]
    assert (row.what, row.limit_key) == ("verdicts of 1 samples", "coordinator.score_timeout_s")


def test_a_batch_is_waited_for_until_its_commit_or_the_end_of_its_learner(desk):
    train(desk)
    assert ("coordinator", "the commit of step 1", "learn") in rows_of(desk)
    desk.say("learn#1", m.StepCommitted(step=1, metrics={}))
    assert not [what for _, what, _ in rows_of(desk) if what.startswith("the commit")]


def test_a_learner_that_dies_with_a_batch_is_waited_for_and_not_its_step(desk):
    train(desk)
    desk.say("learn#1", m.Goodbye())
    whats = {what for _, what, _ in rows_of(desk)}
    assert "a learner node to join" in whats
    assert "the commit of step 1" not in whats


def test_a_step_past_its_limit_is_an_error_with_all_of_it(desk):
    train(desk)
    since = desk.core.steps.handed_out.since
    assert waits.step_overdue(desk.core, since + 3599) is None
    error = str(waits.step_overdue(desk.core, since + 3601))
    assert "The learner learn was given the batch of step 1 3601 s ago" in error
    assert "coordinator.step_timeout_s = 3600" in error
    assert "for the commit of step 1 from learn" in error


def test_nothing_else_happens_while_the_learner_trains_and_that_is_no_standstill(desk):
    train(desk)
    coordinator = desk.core
    for later_s, state in ((1000, "running"), (3700, "failed")):
        now = time.monotonic() + later_s
        for node in coordinator.members.nodes.values():
            node.seen_at = now
        desk.tick(now)
        assert coordinator.state == state
    assert "coordinator.step_timeout_s" in coordinator.end_reason


def test_engines_without_valid_weights_wait_for_the_learner_and_the_coordinator_for_them(desk):
    train(desk)
    desk.say("learn#1", m.StepCommitted(step=1, metrics={}))
    rows = rows_of(desk)
    assert ("gen", "weights v1", "learner") in rows
    assert ("coordinator", "an engine with weights v1", "gen") in rows
    learner = waits.WaitRow("learn", "the batch of step 2", "coordinator", 60, 7200, "run.idle_timeout_s", True)
    later = list(rows_of(desk, later_s=30).values())
    assert waits.cycles(desk.core, [*later, learner]) == [["coordinator", "gen", "learn", "coordinator"]]


def test_an_update_under_way_is_a_wait_on_whom_it_misses_and_no_circle(desk):
    train(desk)
    sent = desk.say("learn#1", m.WeightUpdateRequest(tag=V1, stores=["h:1"]))
    plan = of(m.WeightUpdatePlan, sent)[0][1]
    [row] = [row for (_, what, on), row in rows_of(desk).items() if what.startswith("weights v1")]
    assert (row.on, row.limit_key) == ("gen", "run.weight_update_timeout_s")
    desk.say("gen#1", m.WeightUpdateReady(update_id=plan.update_id))
    [row] = [row for (_, what, on), row in rows_of(desk).items() if what.startswith("weights v1")]
    assert row.on == "learner"
    assert waits.cycles(desk.core, list(rows_of(desk, later_s=60).values())) == []


def test_the_status_has_reported_waits_as_old_as_they_are_now(desk):
    desk.join("reward", "judge")
    beat = m.Heartbeat(
        capacity=1,
        waits=[m.WaitInfo(what="leases", on="coordinator", age_s=5, deadline_s=7200, limit_key="run.idle_timeout_s")],
        loop_lag_ms=3,
        loop_lag_max_ms=9,
        blocked_at="f in x.py:1 for 2.0 s",
    )
    desk.say("judge#1", beat)
    desk.core.members.nodes["judge"].seen_at -= 2
    status = build_status(desk)
    [wait] = [wait for wait in status["waits"] if wait["who"] == "judge"]
    assert wait["age_s"] == pytest.approx(7, abs=1)
    assert wait["known_s_ago"] == pytest.approx(2, abs=1)
    assert status["nodes"][0]["blocked_at"] == "f in x.py:1 for 2.0 s"
    assert (status["nodes"][0]["loop_lag_ms"], status["nodes"][0]["loop_lag_max_ms"]) == (3, 9)


def test_a_standstill_says_all_waits_and_circles(desk):
    desk.join("reward", "judge")
    assert waits.standstill(desk.core, time.monotonic() + 899) is None
    text = str(waits.standstill(desk.core, time.monotonic() + 901))
    assert "coordinator waits 0 s of 900 s (coordinator.no_progress_timeout_s) for a rollout node to join" in text
