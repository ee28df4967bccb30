"""The whole loop with the fake engine and policy, through the real transport, journal, sandbox, broadcast and processes.

``Run.assert_finished`` is the common end: all steps once, the ledger closed, and a weight that follows from the journal.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from loop_harness import (
    SAME,
    Run,
    descendants,
    is_alive,
    processes_of,
    task_line,
)


def assert_gone(pids, within_s):
    deadline = time.monotonic() + within_s
    while (alive := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive


def test_roles_that_start_before_the_coordinator_join_it_and_the_run_ends_with_0_everywhere(tmp_path):
    with Run(tmp_path) as run:
        roles = [run.start(role) for role in ("rollout", "reward", "learner")]
        time.sleep(2)
        roles.append(run.start("coordinator"))
        run.assert_all_exit(*roles)
        summary = run.assert_finished()
        assert summary["num_syncs"] == 5
        assert max(int(age) for age in summary["staleness_counts"]) <= 2
        assert summary["ledger"]["in_flight"] == 0


def test_nodes_that_join_work_and_leave_while_the_run_goes_on(tmp_path):
    with Run(tmp_path, {"coordinator.max_steps": 1000}) as run:
        roles = run.start_all()
        run.wait_for_step(1)
        guests = [run.start("rollout", "guest"), run.start("reward", "guest-judge")]
        names = {"guest", "guest-judge"}
        run.wait_until(lambda s: names <= {n["node_id"] for n in s["nodes"] if sum(n["counters"].values())})
        for guest in guests:
            guest.signal(signal.SIGTERM)
        run.assert_all_exit(*guests, code=143)
        run.wait_for_step(run.status()["version"] + 2)
        run.assert_all_exit(run.forebay("stop", "--address", run.address), *roles.values())
        run.assert_stopped()


def test_killed_rollout_and_reward_nodes_take_nothing_with_them(tmp_path):
    changes = {"coordinator.max_steps": 10, "learner.fake_step_s": 0.2, "rollout.fake.tokens_per_s": 40}
    with Run(tmp_path, changes) as run:
        second = run.start("reward", "judge-2")
        roles = run.start_all("a", "b")
        run.wait_until(lambda s: any(n["node_id"] == "a" and n["leases"] and n["counters"] for n in s["nodes"]))
        sandboxes = descendants(second.process.pid)
        roles.pop("a").signal(signal.SIGKILL)
        second.signal(signal.SIGKILL)
        second.exit_code()
        assert_gone(sandboxes, within_s=15)
        run.assert_all_exit(*roles.values())
        run.assert_finished()


def test_a_killed_coordinator_is_joined_again_by_its_nodes(tmp_path):
    with Run(tmp_path, {"coordinator.max_steps": 10, "learner.fake_step_s": 0.2}) as run:
        roles = run.start_all()
        for step in (2, 5):
            run.wait_for_step(step)
            roles["coordinator"].signal(signal.SIGKILL)
            roles["coordinator"].exit_code()
            roles["coordinator"] = run.start("coordinator")
        run.assert_all_exit(*roles.values())
        run.assert_finished()


def test_a_killed_learner_trains_the_same_batches_again(tmp_path):
    with Run(
        tmp_path, {"coordinator.max_steps": 9, "learner.fake_step_s": 0.3, "learner.checkpoint_interval_steps": 4}
    ) as run:
        roles = run.start_all()
        run.wait_for_step(6)
        roles["learner"].signal(signal.SIGKILL)
        roles["learner"].exit_code()
        roles["learner"] = run.start("learner", "learner-2")
        run.assert_all_exit(*roles.values())
        summary = run.assert_finished()
        assert summary["incarnation"] == 1
        assert [event["step"] for event in roles["learner"].events("resumed")] == [4]


def test_a_learner_killed_within_a_weight_update_holds_nobody_up(tmp_path):
    with Run(tmp_path, {"coordinator.max_steps": 6}) as run:
        roles = run.start_all("a", "b")
        run.wait_for_step(2)
        roles["a"].signal(signal.SIGSTOP)  # so that the next update can't end
        run.wait_until(lambda s: any(n["node_id"] == "a" and n["seen_s_ago"] > 1 for n in s["nodes"]))
        roles["learner"].signal(signal.SIGKILL)
        roles["a"].signal(signal.SIGCONT)
        roles["learner"].exit_code()
        roles["learner"] = run.start("learner")
        run.assert_all_exit(*roles.values())
        run.assert_finished()


def test_a_frozen_rollout_node_is_left_out_of_the_update_within_seconds(tmp_path):
    with Run(tmp_path, {"coordinator.max_steps": 6, "run.sync_timeout_s": 300}) as run:
        roles = run.start_all("a", "b")
        run.wait_for_step(2)
        frozen = roles.pop("a")
        frozen.signal(signal.SIGSTOP)
        run.assert_all_exit(*roles.values())  # a minute at most, where the update's own limit is five
        run.assert_finished()


def test_a_node_that_fails_an_update_is_fenced_while_the_others_go_on(tmp_path):
    with Run(tmp_path, {"coordinator.max_steps": 6, "learner.fake_step_s": 0.3}) as run:
        bad = run.start("rollout", "bad", overrides=("rollout.fake.fail_update_at=3",))
        roles = run.start_all("a", "b")
        run.assert_all_exit(bad, *roles.values())
        summary = run.assert_finished()
        assert [row["sync/acked"] for row in summary["steps"]] == [3, 3, 2, 3, 3, 3], "it is back with the next version"
        assert [event["version"] for event in bad.events("weights_updated")] == ["v1", "v2", "v4", "v5", "v6"]


def test_when_every_node_fails_an_update_a_new_one_gets_the_weights_and_the_run_goes_on(tmp_path):
    changes = {
        "coordinator.max_steps": 4,
        "coordinator.max_staleness": 0,  # nothing is buffered that could hide the standstill
        "coordinator.bypass_window": 0,
        "rollout.fake.fail_update_at": 2,
    }
    with Run(tmp_path, changes) as run:
        roles = run.start_all("a", "b")
        run.wait_for_step(2)
        healthy = run.start("rollout", "healthy", overrides=("rollout.fake.fail_update_at=0",))
        run.assert_all_exit(healthy, *roles.values())
        summary = run.assert_finished()
        assert [row["sync/acked"] for row in summary["steps"]] == [2, 0, 3, 3]


def test_failing_generations_are_tried_again_and_given_up_after_some(tmp_path):
    with Run(tmp_path, {"rollout.fake.fail_every": 3, "coordinator.generate_attempts": 2}) as run:
        roles = run.start_all()
        run.assert_all_exit(*roles.values())
        run.assert_finished()


def test_generations_that_never_end_are_given_to_another_node(tmp_path):
    with Run(tmp_path, {"coordinator.max_steps": 3, "coordinator.generate_timeout_s": 1}) as run:
        stuck = run.start("rollout", "stuck", overrides=("rollout.fake.tokens_per_s=0.01",))
        roles = run.start_all()
        run.assert_all_exit(stuck, *roles.values())
        run.assert_finished()
        assert roles["coordinator"].events("lease_expired") or roles["coordinator"].events("lease_failed")


def test_a_run_in_which_nothing_happens_ends_with_the_reason(tmp_path):
    with Run(tmp_path, {"coordinator.no_progress_timeout_s": 2}) as run:
        coordinator, judge = run.start("coordinator"), run.start("reward")
        assert coordinator.exit_code() == 5
        assert "Live nodes: 0 rollout, 1 reward, 0 learner" in coordinator.log.read_text().partition("error: ")[2]
        run.assert_all_exit(judge)


def test_a_prompt_that_is_too_long_is_refused_once_and_its_place_filled(tmp_path):
    tasks = task_line("long", "x" * 100) + "".join(task_line(f"t{i}") for i in range(9))
    with Run(tmp_path, tasks=tasks) as run:
        roles = run.start_all()
        run.assert_all_exit(*roles.values())
        summary = run.assert_finished()
        assert summary["ledger"]["groups_failed"] >= 1
        failed = run.query("SELECT task_index FROM groups WHERE status = 'failed'")
        assert {index for (index,) in failed} == {0}
        draws = run.query("SELECT COUNT(*) FROM groups WHERE task_index = 0")[0][0]
        refusals = [event for event in roles["coordinator"].events("lease_failed") if event["permanent"]]
        assert len(refusals) <= draws, "nobody tries it again"


def test_data_that_ends_ends_the_run(tmp_path):
    tasks = "".join(task_line(f"t{i}") for i in range(7))
    with Run(tmp_path, {"coordinator.max_epochs": 1, "coordinator.max_steps": 50}, tasks=tasks) as run:
        roles = run.start_all()
        run.assert_all_exit(*roles.values())
        run.assert_finished(steps=4)  # the last one takes the one group that is left


def test_equal_rewards_are_refilled_some_times_and_then_trained_as_no_signal(tmp_path):
    changes = {
        "rollout.fake.completion": SAME,
        "coordinator.dynamic_sampling": True,
        "coordinator.max_filtered_per_step": 3,
        "coordinator.max_steps": 3,
    }
    with Run(tmp_path, changes) as run:
        roles = run.start_all()
        run.assert_all_exit(*roles.values())
        summary = run.assert_finished()
        assert 3 <= summary["ledger"]["groups_filtered"] <= 3 * 4
        assert [row["reward/no_signal_groups"] for row in summary["steps"]] == [1.0] * 3
        assert summary["verdicts_copied"] > 0, "one text is judged once in a group"


def test_staleness_0_is_synchronous(tmp_path):
    with Run(tmp_path, {"coordinator.max_staleness": 0, "coordinator.bypass_window": 0}) as run:
        roles = run.start_all()
        run.assert_all_exit(*roles.values())
        assert set(run.assert_finished()["staleness_counts"]) == {"0"}


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path):
    with Run(tmp_path, {"coordinator.max_steps": 12, "learner.fake_step_s": 0.3}) as run:
        up = run.forebay("up", str(run.config_path))
        run.wait_for_step(2)
        stop = run.forebay("stop", "--address", run.address)
        run.assert_all_exit(stop, up)
        run.run_dir = next((tmp_path / "runs").iterdir())
        run.config["run"]["id"] = run.run_dir.name
        summary = run.assert_stopped()
        assert not processes_of(tmp_path)
        again = run.forebay("up", "--resume", str(run.run_dir))
        run.wait_for_step(summary["version"] + 1)
        coordinator = [pid for pid, command in processes_of(tmp_path) if "services.coordinator" in command]
        os.kill(coordinator[0], signal.SIGKILL)  # ``up`` starts it again
        run.assert_all_exit(again)
        run.assert_finished()


@pytest.mark.parametrize(("signum", "code", "within_s"), [(signal.SIGINT, 130, 15), (signal.SIGKILL, -9, 15)])
def test_no_process_outlives_forebay_up(tmp_path, signum, code, within_s):
    with Run(tmp_path, {"coordinator.max_steps": 1000}) as run:
        up = run.forebay("up", str(run.config_path))
        run.wait_for_step(1)
        pids = descendants(up.process.pid)
        assert len(pids) >= 4
        up.signal(signum)
        assert up.exit_code(within_s) == code
        assert_gone(pids, within_s)
        assert not processes_of(tmp_path)
