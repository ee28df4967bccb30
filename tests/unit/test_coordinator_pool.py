"""The pool: events in, places, batches and a closed ledger out; and the journal that restores it."""

import numpy as np
import pytest

from common.errors import ConfigError, InvariantError
from protocol.verdicts import JudgeResult, Verdict
from protocol.versions import Segment
from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.admission import TaskCursor, task_order
from services.coordinator.core.batches import make_batch
from services.coordinator.core.effects import Effects
from services.coordinator.core.groups import GroupStatus, Sample
from services.coordinator.core.pool import Pool, PoolState
from services.coordinator.journal import Journal

GOOD = JudgeResult(verdict=Verdict.ACCEPTED, reward=1.0)
BAD = JudgeResult(verdict=Verdict.WRONG_ANSWER, reward=0.0)
BROKEN = JudgeResult(verdict=Verdict.INFRA_ERROR, message="no disk")


def make_config(**changes):
    values = {"tasks": "t.jsonl", "group_size": 2, "groups_per_step": 2, "max_steps": 10, "max_staleness": 1}
    return CoordinatorConfig(**{**values, **changes})


def make_pool(state=None, **changes):
    config = make_config(**changes)
    cursor = TaskCursor(5, seed=0, shuffle=True, max_epochs=config.max_epochs)
    return Pool(config, cursor, state or PoolState(), Effects())


def add(pool, group_id, index, version=0, tokens=3, finish_reason="stop"):
    arrays = {
        "prompt_ids": np.arange(2, dtype=np.int32),
        "completion_ids": np.arange(tokens, dtype=np.int32),
        "logprobs": np.full(tokens, -1.0, np.float32),
    }
    segments = [Segment(version=version, num_tokens=tokens)]
    return pool.add_sample(group_id, Sample(index, "x", finish_reason, segments, arrays))


def finish(pool, group_id, results=(GOOD, BAD), version=0):
    for index, result in enumerate(results):
        add(pool, group_id, index, version)
        pool.add_result(group_id, index, result)


def check(pool):
    pool.ledger.check(buffered=pool.buffered_tokens, live_groups=len(pool.groups))


def test_a_group_goes_from_admission_to_training():
    pool = make_pool()
    assert [group.group_id for group in pool.admit()] == [0, 1, 2, 3]  # (1 + 1 + 0) * 2
    assert pool.admit() == []
    finish(pool, 0)
    assert pool.take_batch(1) is None
    finish(pool, 1)
    assert [group.group_id for group in pool.take_batch(1)] == [0, 1]
    assert [group.group_id for group in pool.take_batch(1)] == [0, 1], "a fixed batch never changes"
    pool.commit(1, {})
    assert [group.group_id for group in pool.admit()] == [4, 5]
    assert pool.commit(1, {}) == [], "a repeated commit changes nothing"
    assert pool.ledger.trained == 12
    check(pool)


def test_the_batch_says_which_completions_ended_at_the_length_limit():
    pool = make_pool(groups_per_step=1)
    pool.admit()
    for index, reason in enumerate(("stop", "length")):
        add(pool, 0, index, finish_reason=reason)
        pool.add_result(0, index, (GOOD, BAD)[index])
    batch, _ = make_batch(1, pool.take_batch(1), replay=False)
    assert [sample.truncated for sample in batch.samples] == [False, True]


def test_the_second_result_of_a_sample_is_not_taken():
    pool = make_pool()
    pool.admit()
    assert add(pool, 0, 0)
    assert not add(pool, 0, 0)
    assert not add(pool, 99, 0)
    assert pool.ledger.received == 3
    check(pool)


def test_an_infra_error_is_tried_elsewhere_and_then_leaves_the_group():
    pool = make_pool(group_size=3, score_attempts=2)
    pool.admit()
    for index in range(3):
        add(pool, 0, index)
    assert pool.add_result(0, 0, BROKEN, node_id="a")
    assert pool.groups[0].samples[0].avoid_nodes == {"a"}
    assert not pool.add_result(0, 0, BROKEN, node_id="b")
    pool.add_result(0, 1, GOOD)
    pool.add_result(0, 2, BAD)
    assert pool.groups[0].status is GroupStatus.READY
    assert pool.groups[0].rewards() == [1.0, 0.0], "an infra error never becomes a reward"
    check(pool)


def test_a_group_with_too_few_judged_samples_gives_its_place_back():
    pool = make_pool(score_attempts=1)
    pool.admit()
    finish(pool, 0, (BROKEN, GOOD))
    assert 0 not in pool.groups
    assert [group.group_id for group in pool.admit()] == [4]
    assert pool.ledger.failed == 6
    check(pool)


def test_equal_rewards_are_refilled_a_bounded_number_of_times():
    pool = make_pool(dynamic_sampling=True, max_filtered_per_step=2)
    pool.admit()
    finish(pool, 0, (GOOD, GOOD))
    finish(pool, 1, (BAD, BAD))
    assert pool.ledger.groups_filtered == 2
    finish(pool, 2, (BAD, BAD))
    assert pool.groups[2].status is GroupStatus.READY, "the third one goes on as it is: no signal, but no hang"
    check(pool)


def test_a_generation_that_always_fails_is_given_up():
    pool = make_pool(generate_attempts=2)
    pool.admit()
    assert pool.generation_failed(0, "boom", permanent=False)
    assert not pool.generation_failed(0, "boom", permanent=False)
    assert 0 not in pool.groups
    assert not pool.generation_failed(1, "too long", permanent=True)
    check(pool)


def test_a_success_between_failures_shows_that_it_is_not_the_system():
    pool = make_pool(generate_attempts=1, max_failed_in_a_row=2, task_attempts=9, max_staleness=4)
    pool.admit()
    for group_id in (0, 2, 4):
        pool.generation_failed(group_id, "boom")
        finish(pool, group_id + 1)
    assert pool.quarantine.give_up_reason == ""
    pool.generation_failed(6, "boom")
    pool.generation_failed(7, "boom")
    assert "The last 2 groups failed" in pool.quarantine.give_up_reason


def test_negative_staleness_is_an_error():
    pool = make_pool()
    pool.admit()
    finish(pool, 0, version=4)
    finish(pool, 1, version=4)
    with pytest.raises(InvariantError, match="negative staleness"):
        pool.take_batch(1)


def test_the_run_ends_with_its_data():
    pool = make_pool(max_epochs=1, max_staleness=2)
    assert len(pool.admit()) == 5
    assert not pool.finished
    for step in (1, 2):
        batch = sorted(pool.groups)[:2]
        for group_id in batch:
            finish(pool, group_id, version=step - 1)
        pool.take_batch(step)
        pool.commit(step, {})
        pool.admit()
    assert not pool.finished, "one group is left"
    finish(pool, 4, version=2)
    assert [group.group_id for group in pool.take_batch(3)] == [4], "the last step takes what there is"
    pool.commit(3, {})
    assert pool.finished


def test_each_epoch_has_every_task_once_in_another_order():
    first, second = (task_order(50, epoch, seed=3, shuffle=True) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


async def test_a_restarted_pool_equals_the_one_that_died(tmp_path):
    journal = Journal(tmp_path / "journal.sqlite", run_id="r")
    pool = make_pool(journal.state)
    pool.admit()
    finish(pool, 0)
    finish(pool, 1, (GOOD, BROKEN))
    add(pool, 2, 0)
    batch = [group.group_id for group in pool.take_batch(1)] if pool.take_batch(1) else None
    pool.flush()
    await journal.submit(pool._effects.take().records)
    journal.close()
    again = Journal(tmp_path / "journal.sqlite", run_id="r")
    copy = make_pool(again.state)
    assert copy.ledger == pool.ledger
    assert copy.num_draws == pool.num_draws
    assert {i: (g.status, g.step, sorted(g.samples)) for i, g in copy.groups.items()} == {
        i: (g.status, g.step, sorted(g.samples)) for i, g in pool.groups.items()
    }
    assert copy.groups[0].samples[0].arrays["logprobs"].tolist() == [-1.0] * 3
    assert (batch is None) == (copy.take_batch(1) is None)
    again.close()


async def test_a_journal_of_another_run_or_a_damaged_one_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "journal.sqlite"
    journal = Journal(path, run_id="r")
    with pytest.raises(ConfigError, match="Another coordinator"):
        Journal(path, run_id="r")
    journal.close()
    with pytest.raises(ConfigError, match="of run 'r'"):
        Journal(path, run_id="other")
    path.write_bytes(b"not a database, but somebody's bytes" * 100)
    with pytest.raises(ConfigError, match="damaged"):
        Journal(path, run_id="r")
    assert path.read_bytes().startswith(b"not a database")


async def test_a_task_that_is_out_stays_out_when_an_older_group_of_it_succeeds_after_all(tmp_path):
    journal = Journal(tmp_path / "journal.sqlite", run_id="r")
    config = make_config(task_attempts=1)
    pool = Pool(config, TaskCursor(2, seed=0, shuffle=False, max_epochs=0), journal.state, Effects())
    pool.admit()  # groups 0 and 2 are of task 0
    pool.generation_failed(2, "boom", permanent=True)
    finish(pool, 0)
    assert list(pool.quarantine.tasks) == [0]
    pool.flush()
    await journal.submit(pool._effects.take().records)
    journal.close()
    again = Journal(tmp_path / "journal.sqlite", run_id="r")
    assert list(again.state.quarantined) == [0]
    again.close()
