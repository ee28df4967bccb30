"""What survives a restart of the coordinator besides the data: the work that nodes have at hand, and what it cost."""

from __future__ import annotations

from loop_harness import Run, assert_none_of

from tests.faults.proxy import body_of


def test_work_at_hand_survives_a_restart_of_the_coordinator(tmp_path):
    """Nodes keep what they generate, deliver it to the next coordinator, and no token is lost, doubled or thrown away."""
    changes = {
        "coordinator.max_steps": 6,
        "rollout.fake.tokens_per_s": 20,  # 0.4 s for each completion
        "coordinator.node_timeout_s": 30,
        "coordinator.generate_timeout_s": 120,
    }
    with Run(tmp_path, changes, proxied=True) as run:

        def only_first(num_groups):
            """The results of the others don't arrive, so that the coordinator dies while they are at hand."""
            run.proxy.clear()
            run.proxy.add(
                "drop", "sample_result", count=None, where=lambda seen: body_of(seen)["group_id"] >= num_groups
            )

        only_first(2)
        roles = run.start_all("a", "b")
        for step in (1, 3):
            run.wait_for_step(step)
            run.wait_until(lambda s: sum(n["leases"] for n in s["nodes"] if n["role"] == "rollout") >= 2)
            roles["coordinator"].kill()
            only_first(6 if step == 1 else 12)
            roles["coordinator"] = run.start("coordinator")
        run.assert_all_exit(*roles.values())
        summary = run.assert_finished()
        ledger = summary["ledger"]
        assert {key: ledger[key] for key in ("failed", "lost", "duplicate", "in_flight")} == {
            "failed": 0,
            "lost": 0,
            "duplicate": 0,
            "in_flight": 0,
        }
        groups = 6 * run.config["coordinator"]["groups_per_step"]
        assert ledger["generated"] == groups * run.config["coordinator"]["group_size"] * 8
        assert all(role.events("rejoined") for role in (roles["a"], roles["b"]))


def test_a_replay_publishes_its_last_step_once_under_a_new_incarnation(tmp_path):
    changes = {"coordinator.max_steps": 9, "learner.checkpoint_interval_steps": 4}
    with Run(tmp_path, changes, proxied=True) as run:
        run.hold_commits(after=6)
        roles = run.start_all()
        with run.held_at(6):
            roles["learner"].kill()
            run.proxy.clear()  # what it had sent last is gone with it
        last = run.now()["version"]
        roles["learner"] = run.start("learner", "learner-2")
        run.assert_all_exit(*roles.values())
        run.assert_finished()
        versions = [event["version"] for event in roles["a"].events("weights_updated")]
        again = [int(name[1:-2]) for name in versions if name.endswith("/1")]
        # That step's commit may not have come.
        first = max(last, *(int(name[1:]) for name in versions if "/" not in name))
        assert again == list(range(first, 10)), "replayed ones before it stay with the learner, and none goes back"


def test_samples_that_no_checkpoint_needs_leave_the_journal(tmp_path):
    changes = {"coordinator.max_steps": 12, "coordinator.keep_trained_steps": 0, "learner.keep_checkpoints": 1}
    with Run(tmp_path, changes) as run:
        roles = run.start_all()
        run.assert_all_exit(*roles.values())
        assert run.summary()["state"] == "finished"
        [(first, last)] = run.query("SELECT MIN(sample_id) / 4096, MAX(sample_id) / 4096 FROM samples")
        oldest = dict(run.query("SELECT step, MIN(group_id) FROM groups GROUP BY step"))
        assert oldest[8] < first <= oldest[11] <= last, (
            "what the last checkpoints had trained is gone, the rest is there"
        )


def test_forebay_up_does_not_start_a_run_again_that_has_given_up(tmp_path):
    """Everybody was told to leave: a new coordinator would be alone, and wait for its limit once more."""
    with Run(
        tmp_path, {"coordinator.no_progress_timeout_s": 50, "up.reward_nodes": 0, "coordinator.score_timeout_s": 5}
    ) as run:
        up = run.forebay("up", str(run.config_path), "--set", "coordinator.no_progress_timeout_s=26")
        assert up.exit_code() == 5
        text = up.log.read_text()
        assert "coordinator ended with exit code 5: Nothing has happened for" in text
        assert "starting it again" not in text
        assert_none_of(tmp_path, within_s=60)


def test_a_run_that_is_done_goes_on_with_more_steps(tmp_path):
    with Run(tmp_path, {"coordinator.max_steps": 3}) as run:
        run.assert_all_exit(run.forebay("up", str(run.config_path)))
        run.run_dir = next((tmp_path / "runs").iterdir())
        run.config["run"]["id"] = run.run_dir.name
        again = run.forebay("up", "--resume", str(run.run_dir), "--set", "coordinator.max_steps=5")
        run.assert_all_exit(again)
        run.assert_finished(steps=5)
        shown = again.log.read_text().partition("Resuming run")[2]  # both lives write to this log
        news = [line for line in shown.splitlines() if line.startswith("step ")]
        assert [int(line.split()[1]) for line in news] == [4, 5], "steps of the first life were shown then"
