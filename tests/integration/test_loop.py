"""The whole loop with the fake engine and policy, through the real transport, journal, sandbox, broadcast and processes.

``Run.assert_finished`` is the common end: all steps once, the ledger closed, and a weight that follows from the journal. What faults do
to it is in ``tests/faults`` (``test_faults.py``).
"""

from __future__ import annotations

import os
import signal
import time

from loop_harness import Run, assert_gone, assert_none_of, descendants, processes_of

from services.journal_reader import read_journal


def test_roles_that_start_before_the_coordinator_join_it_and_the_run_ends_with_0_everywhere(tmp_path):
    with Run(tmp_path) as run:
        roles = [run.start(role) for role in ("rollout", "reward", "learner")]
        time.sleep(2)
        roles.append(run.start("coordinator"))
        run.assert_all_exit(*roles)
        summary = run.assert_finished()
        assert summary["num_weight_updates"] == 5
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
        run.wait_for_step(run.now()["version"] + 2)
        run.assert_all_exit(run.stop(), *roles.values())
        run.assert_stopped()


def test_staleness_0_is_synchronous(tmp_path):
    with Run(tmp_path, {"coordinator.max_staleness": 0, "coordinator.bypass_window": 0}) as run:
        roles = run.start_all()
        run.assert_all_exit(*roles.values())
        assert set(run.assert_finished()["staleness_counts"]) == {"0"}


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path):
    with Run(tmp_path, {"coordinator.max_steps": 8, "run.routing_replay": True}, proxied=True) as run:
        run.hold_commits(after=2)
        up = run.forebay("up", str(run.config_path))
        with run.held_at(2):
            run.stop_now()
        run.assert_all_exit(up)
        run.run_dir = next((tmp_path / "runs").iterdir())
        run.config["run"]["id"] = run.run_dir.name
        summary = run.assert_stopped()
        assert_none_of(tmp_path, within_s=60)
        run.hold_commits(after=summary["version"] + 1)
        again = run.forebay("up", "--resume", str(run.run_dir))
        with run.held_at(summary["version"] + 1):
            coordinator = [pid for pid, command in processes_of(tmp_path) if "services.coordinator" in command]
            os.kill(coordinator[0], signal.SIGKILL)  # ``up`` starts it again
        run.assert_all_exit(again)
        run.assert_finished()
        steps = read_journal(run.journal).steps
        assert [step["train/routing_replayed_share"] for step in steps] == [1.0] * 8


def test_no_process_outlives_forebay_up(tmp_path):
    with Run(tmp_path, {"coordinator.max_steps": 1000}) as run:
        up = run.forebay("up", str(run.config_path))
        run.wait_for_step(1)
        pids = descendants(up.process.pid)
        assert len(pids) >= 4
        again = run.forebay("up", "--resume", str(next(tmp_path.glob("**/journal.sqlite")).parent))
        assert again.exit_code() == 2
        text = again.log.read_text()  # of both
        assert "Address already in use" in text
        assert text.count("Coordinator is up") == 1, (
            "the one that answers is not its own, and no second roles are started"
        )
        assert up.process.poll() is None
        up.signal(signal.SIGINT)
        assert up.exit_code() == 130
        assert_gone(pids, within_s=60)
        assert_none_of(tmp_path, within_s=60)
