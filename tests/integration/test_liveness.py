"""The liveness contract on real processes: what they wait for is said, no wait is for ever, and what stands still is named."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time

from loop_harness import ROOT, Role, Run

from protocol.codec import peek
from tests.faults.proxy import body_of
from tests.polling import block_until


def error_of(role):
    """The paragraph that a role ended with."""
    return role.log.read_text().rpartition("error: ")[2]


def steps_of(run):
    """A run's checkpoints, by their step."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run.run_dir / "checkpoints").glob("step-*"))


def test_a_healthy_run_shows_its_waits_each_with_a_limit_and_never_a_circle(tmp_path):
    changes = {"coordinator.max_steps": 1000, "rollout.fake.tokens_per_s": 40, "learner.fake_step_s": 0.3}
    with Run(tmp_path, changes) as run:
        roles = run.start_all("a", "b")
        missing = {
            ("coordinator", "a"),
            ("coordinator", "b"),
            ("coordinator", "learner"),
            ("judge", "coordinator"),
            ("learner", "coordinator"),
        }

        def all_were_there(status):
            assert status["cycles"] == []
            assert all(wait["limit_key"] and wait["deadline_s"] > 0 for wait in status["waits"])
            missing.difference_update((wait["who"], wait["on"]) for wait in status["waits"])
            return not missing and status["version"] >= 10

        run.wait_until(all_were_there)
        as_json = run.forebay("waits", "--address", run.address, "--json")
        run.assert_all_exit(as_json)
        text = as_json.log.read_text()
        assert set(json.loads(text)) == {"waits", "cycles"}

        def table_has_a_wait_for_work():  # between two waits nobody may be in one
            table = run.forebay("waits", "--address", run.address)  # goes on in the same log
            run.assert_all_exit(table)
            printed = table.log.read_text()[len(text) :]
            assert "Run loop: running" in printed
            return "run.idle_timeout_s" in printed

        block_until(table_has_a_wait_for_work)
        run.assert_all_exit(run.stop(), *roles.values())


def test_a_node_that_gets_no_work_for_too_long_ends_with_the_wait_and_its_limit(tmp_path):
    with Run(tmp_path, {"run.idle_timeout_s": 2}) as run:
        coordinator, rollout = run.start("coordinator"), run.start("rollout")
        assert rollout.exit_code() == 5
        assert "for leases from coordinator" in error_of(rollout)
        assert "run.idle_timeout_s" in error_of(rollout)
        report = json.loads(next((run.run_dir / "reports").glob("rollout-*.json")).read_text())
        assert report["error"].startswith("Waited ")
        run.assert_all_exit(run.stop(), coordinator)


def test_a_step_that_takes_too_long_fails_the_run_with_learner_step_and_limit(tmp_path):
    with Run(tmp_path, {"coordinator.step_timeout_s": 2, "learner.fake_step_s": 8}) as run:
        roles = run.start_all()
        assert roles["coordinator"].exit_code() == 5
        words = error_of(roles["coordinator"])
        assert "The learner learner was given the batch of step 1" in words
        assert "coordinator.step_timeout_s = 2" in words
        assert "for the commit of step 1 from learner" in words, "all waits are in it"
        run.assert_all_exit(roles["judge"], roles["a"], roles["learner"])


def test_a_training_thread_that_nothing_can_interrupt_is_ended_with_the_wait_it_sits_in(tmp_path):
    with Run(tmp_path, proxied=True) as run:
        coordinator = run.start("coordinator")
        argv = [sys.executable, str(ROOT / "tests/integration/blocked_learner.py"), str(run.config_path)]
        stuck = Role("stuck", ["env", f"PYTHONPATH={ROOT}", *argv], tmp_path / "stuck.log")
        run.roles.append(stuck)
        assert stuck.exit_code() == 5
        said = [
            body_of(seen)["waits"] for seen in run.proxy.seen if seen.kind == "heartbeat" and seen.node_id == "stuck"
        ]
        assert any(wait["on"] == "rank 1" for waits in said for wait in waits), "the coordinator did not hear of it"
        assert "for the work of step 1 from rank 1" in error_of(stuck)
        assert "learner.wait_timeout_s" in error_of(stuck)
        report = json.loads(next((run.run_dir / "reports").glob("stuck-*.json")).read_text())
        main_thread = next(stack for name, stack in report["threads"].items() if name.startswith("MainThread"))
        assert "the_collective" in main_thread
        coordinator.signal(signal.SIGTERM)
        run.assert_all_exit(coordinator, code=143)


def world_of(run, *, num_ranks):
    """The learner as a world of ``num_ranks`` processes."""
    words = ["--config", str(run.config_path), "--node-id", "learner", "--ranks", str(num_ranks)]
    return run.spawn("learner", [sys.executable, "-m", "services.learner", *words])


def test_the_ranks_of_a_learner_survive_a_batch_that_takes_longer_than_their_limit(tmp_path):
    changes = {"learner.wait_timeout_s": 12, "coordinator.max_steps": 1, "coordinator.no_progress_timeout_s": 1000}
    with Run(tmp_path, changes, proxied=True) as run:
        batch = run.proxy.add("hold", "batch", count=None)
        roles = [run.start("coordinator"), run.start("reward"), run.start("rollout"), world_of(run, num_ranks=2)]
        batch.wait()
        time.sleep(2 * 12 + 1)
        run.proxy.release(batch)
        run.assert_all_exit(*roles)
        summary = run.assert_finished()
        assert summary["steps"][0]["time/wait_batch_s"] > 2 * 12, "or this shows nothing"


def test_a_rank_that_stands_still_within_a_step_ends_its_world_with_the_wait_and_what_it_was_at(tmp_path):
    changes = {
        "learner.wait_timeout_s": 15,
        "learner.fake_step_s": 2,
        "coordinator.max_steps": 1000,
        "coordinator.no_progress_timeout_s": 1000,  # the ranks are interpreters, which take their time to start
    }
    with Run(tmp_path, changes) as run:
        roles = [run.start("coordinator"), run.start("reward"), run.start("rollout")]
        learner = world_of(run, num_ranks=2)
        run.wait_for_step(1)
        second = next(pid for pid in children_of(learner.process.pid) if rank_of(pid) == "1")
        step = freeze_within_a_step(run, second)
        deadline = time.monotonic() + 120
        while "error: " not in learner.log.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(second, signal.SIGCONT)  # so that it need not be killed
        assert learner.exit_code() == 5, "not that of the rank which lost the other"
        words = one_line(learner.log.read_text().partition("error: ")[2])
        assert f"for train step {step}" in words
        assert "from rank 1, and it did not come. The limit is learner.wait_timeout_s" in words
        assert f"rank 1 (pid {second} on " in words
        assert (since := re.search(r"gives no sign since (\d+)", words))
        assert int(since[1]) >= 10
        assert f"when it was at train step {step}" in words
        assert {path.name.rpartition("-")[0] for path in run.run_dir.glob("reports/*")} >= {"learner", "learner-rank1"}
        run.assert_all_exit(run.stop(), *roles)


def freeze_within_a_step(run, pid):
    """Suspend rank 1 while it trains, as the others see it; returns the step. Elsewhere it is let go, and suspended again later."""
    for _ in range(20):
        run.wait_until(lambda s: s["groups"]["batched"])
        os.kill(pid, signal.SIGSTOP)
        status = run.wait_until(lambda s: any(map(misses_rank_1, s["waits"])))
        what = next(wait["what"] for wait in status["waits"] if misses_rank_1(wait))
        if found := re.fullmatch(r"train step (\d+) \(last sign: train step \1\)", what):
            return int(found[1])
        os.kill(pid, signal.SIGCONT)
        time.sleep(1)
    raise AssertionError("it was never within a step")


def misses_rank_1(wait):
    """Whether it comes from the ranks' signs of life."""
    return wait["on"] == "rank 1" and "(last sign: " in wait["what"]


def one_line(text):
    """Without line breaks."""
    return " ".join(text.split())[:2000]


def children_of(pid):
    """Processes whose parent is ``pid``."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def rank_of(pid):
    """RANK in the environment of ``pid``."""
    with open(f"/proc/{pid}/environ") as file:
        return dict(entry.partition("=")[::2] for entry in file.read().split("\0")).get("RANK")


def test_a_step_whose_commit_comes_after_the_coordinators_end_is_discarded_and_trained_again(tmp_path):
    changes = {
        "learner.stop_timeout_s": 1,
        "coordinator.leave_timeout_s": 0.5,
        "coordinator.max_steps": 3,
    }
    with Run(tmp_path, changes, proxied=True) as run:
        too_late = run.proxy.add("drop", "step_committed", count=None, where=lambda seen: body_of(seen)["step"] == 2)
        roles = run.start_all()
        run.wait_until(lambda s: s["groups"]["batched"] and s["version"] == 1)
        run.stop_now()
        run.assert_all_exit(*roles.values())
        run.proxy.release(too_late)
        assert [event["step"] for event in roles["learner"].events("step_discarded")] == [2]
        assert run.summary()["version"] == 1
        assert 2 not in steps_of(run), "the coordinator would refuse a learner that is ahead of it"
        nodes = [run.start(role) for role in ("coordinator", "reward", "rollout")]
        # The two steps that are left need no verdict: the run could end without them.
        run.wait_for_nodes("reward", "rollout")
        run.assert_all_exit(*nodes, run.start("learner"))
        run.assert_finished()


def test_a_step_whose_commit_still_reaches_the_coordinator_is_kept_without_a_publication(tmp_path):
    def is_batch_2_or_the_end(seen):
        return seen.kind == "shutdown" or (seen.kind == "batch" and body_of(seen)["step"] == 2)

    changes = {"learner.fake_step_s": 2, "coordinator.leave_timeout_s": 60, "coordinator.max_steps": 1000}
    with Run(tmp_path, changes, proxied=True) as run:
        held = run.proxy.add("hold", node_id="learner", direction="down", count=None, where=is_batch_2_or_the_end)
        roles = run.start_all()
        held.wait()
        run.stop_now()
        run.wait_until(lambda _: any(peek(frames[0])["kind"] == "shutdown" for _, _, frames in held.held))
        run.proxy.release(held)  # both at once: it hears of the end while it trains
        run.assert_all_exit(*roles.values())
        summary = run.assert_stopped()
        assert summary["version"] == 2
        assert summary["num_weight_updates"] == 1, "no engine is left that would want the last one"


def test_a_process_that_stood_still_says_so_and_goes_on(tmp_path):
    with Run(tmp_path, {"coordinator.max_steps": 1000, "coordinator.node_timeout_s": 30}) as run:
        roles = run.start_all()
        run.wait_for_step(1)
        roles["judge"].signal(signal.SIGSTOP)
        time.sleep(2.5)
        roles["judge"].signal(signal.SIGCONT)
        run.wait_for_step(run.now()["version"] + 2)
        run.assert_all_exit(run.stop(), *roles.values())
        assert any(event["seconds"] > 2 for event in roles["judge"].events("process_stood_still"))
        assert not [event for event in roles["judge"].events("loop_unblocked") if event["seconds"] > 2]
