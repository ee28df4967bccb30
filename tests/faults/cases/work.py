"""Work that can't be done, never ends, or is worth nothing: generations, prompts, judges, rewards, data; and updates that fail."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter

from tests.faults.case import Body, Case, Scene
from tests.faults.harness import SAME, task_line, task_lines
from tests.faults.interleave import lost_wakeups
from tests.faults.processes import assert_gone, command_of, descendants, seconds
from tests.faults.proxy import Seen, body_of

BAD = "the bad one"  # in the prompt that has the fault
SLEEPY = "```python\nimport time\ndef f(x):\n    if x == 99: time.sleep(10**9)\n    return x + ({sample}) % 2\n```"
SLEEPS = json.dumps({"task_id": "bad", "prompt": BAD, "tests": {"kind": "asserts", "entry_point": "f", "code": "assert f(99) == 99", "limits": {"wall_s": 1.0}}}) + "\n"  # fmt: skip
FAILS = "assert f(3) == 'no program passes this'"


def _tasks_with_bad_one(count: int = 7) -> str:
    return task_line("bad", f"Write f(x), {BAD}.") + task_lines(count)


def _leases(scene: Scene, task_id: str) -> list[Seen]:
    """Generate leases of a task, as they passed the proxy."""
    return [seen for seen in scene.proxy.seen if seen.kind == "generate_lease" and body_of(seen)["task_id"] == task_id]


# ---- generation ----


def _all_producers_die(scene: Scene) -> None:
    scene.run.hold_commits(after=2)
    roles = scene.run.start_all()
    scene.kill_at(roles.pop("a"), "generate_lease", after_step=2)
    scene.end(roles.pop("coordinator"), 5, says="0 rollout")
    scene.finish(*roles.values())


def _generator_always_raises(scene: Scene) -> None:
    roles = scene.run.start_all_but("a")
    scene.run.wait_for_nodes("judge", "learner")
    rule = scene.proxy.when("lease_failed", lambda _: None)
    roles["a"] = scene.run.start("rollout", "a")
    scene.inject(rule.wait())
    scene.end(roles.pop("coordinator"), 9, says="told to fail")
    scene.finish(*roles.values())


def _generator_sometimes_raises(scene: Scene) -> None:
    rule = scene.proxy.when("lease_failed", lambda _: None)
    roles = scene.run.start_all()
    scene.finish(*roles.values())
    scene.inject(rule.hits[0])


def _never_ends(scene: Scene) -> None:
    """The coordinator is killed while the generation hangs; its successor must know how often it was tried."""
    last = scene.run.hold_commits(after=scene.run.config["coordinator"]["max_steps"] - 1)
    roles = scene.run.start_all()
    scene.inject(_first_lease_of_bad(scene))
    scene.run.wait_until(
        lambda s: roles["coordinator"].events("lease_expired") or roles["coordinator"].events("lease_failed")
    )
    roles["coordinator"].kill()
    roles["coordinator"] = scene.run.again(roles["coordinator"])
    scene.proxy.release(last)
    scene.finish(*roles.values())
    tried = Counter(body_of(seen)["group_id"] for seen in _leases(scene, "bad"))
    limits = scene.run.config["coordinator"]
    most = limits["task_attempts"] + 1  # one more may have been started before the last of them failed
    assert len(tried) <= most, f"the task was tried in {len(tried)} groups"
    most = limits["generate_attempts"] + 1  # the try that the coordinator's death cut short is not counted
    assert max(tried.values()) <= most, f"tries by group: {dict(tried)}"


def _first_lease_of_bad(scene: Scene) -> float:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if leased := _leases(scene, "bad"):
            return leased[0].at
        time.sleep(0.05)
    raise AssertionError("the bad task was never given out")


def _too_long(scene: Scene) -> None:
    """Refused once, replaced, and not tried again by the coordinator's successor."""
    scene.run.hold_commits(after=2)
    roles = scene.run.start_all()
    scene.inject(_first_lease_of_bad(scene))
    with scene.run.held_at(2):
        roles["coordinator"].kill()
    roles["coordinator"] = scene.run.again(roles["coordinator"])
    scene.finish(*roles.values())
    leased = _leases(scene, "bad")
    assert len(leased) == 1, f"it was tried {len(leased)} times"
    assert scene.run.summary()["ledger"]["groups_failed"] >= 1


def _poison(scene: Scene) -> None:
    """It kills every node that takes it; somebody starts the node again each time."""
    roles = scene.run.start_all()
    scene.inject(_first_lease_of_bad(scene))
    deaths = 0
    while roles["coordinator"].process.poll() is None:
        if roles["a"].process.poll() not in (None, 0):
            deaths += 1
            assert deaths <= 8, f"{deaths} nodes have died of it\n{roles['coordinator'].tail()}"
            roles["a"] = scene.run.again(roles["a"])
        time.sleep(0.05)
    scene.finish(*roles.values())
    limits = scene.run.config["coordinator"]
    assert 1 <= deaths <= limits["death_attempts"] * limits["task_attempts"]


def _engine_dies(scene: Scene) -> None:
    """The node lives on without its engine: it must end, and take no healthy task with it."""
    roles = scene.run.start_all_but("a")
    first = scene.run.start("rollout", "a", overrides=("rollout.fake.engine_dies_at=3",))
    assert first.exit_code() == 1
    scene.inject(seconds(first.events("engine_died")[0]))
    scene.detect()
    assert "told to die" in first.error()
    roles["a"] = scene.run.again_with(first, "rollout.fake.engine_dies_at=0")
    scene.finish(*roles.values())
    assert scene.run.summary()["ledger"]["groups_failed"] == 0


def _stuck_node(scene: Scene) -> None:
    """A node whose generations never end, beside one that is well."""
    rule = scene.proxy.when("generate_lease", lambda _: None, node_id="stuck")
    scene.run.start("rollout", "stuck", overrides=("rollout.fake.tokens_per_s=0.01",))
    roles = scene.run.start_all_but("a", "learner")
    scene.inject(rule.wait())
    roles |= {"a": scene.run.start("rollout", "a"), "learner": scene.run.start("learner")}
    scene.finish(*roles.values())


def _straggler(scene: Scene) -> None:
    """Others pass it within the window, and it goes on across the update that this makes possible."""
    roles = scene.run.start_all_but("a")
    scene.run.wait_for_nodes("judge", "learner")
    roles["a"] = scene.run.start("rollout", "a")
    scene.inject(_first_lease_of_bad(scene))
    scene.finish(*roles.values())
    versions = [
        len(body_of(seen)["segments"])
        for seen in scene.proxy.seen
        if seen.kind == "sample_result"
        and body_of(seen)["group_id"] in {body_of(lease)["group_id"] for lease in _leases(scene, "bad")}
    ]
    assert max(versions) > 1, "it did not go on across an update"
    overtaken = max(overtaken for (overtaken,) in scene.run.query("SELECT overtaken FROM groups"))
    assert 1 <= overtaken <= scene.run.config["coordinator"]["bypass_window"], f"overtaken {overtaken} times"


# ---- judging ----


def _sleeping_reward(scene: Scene) -> None:
    """They are ended at their limit, and the step comes with a reward of 0 for them."""
    roles = scene.run.start_all()
    scene.inject(_first_lease_of_bad(scene))
    scene.finish(*roles.values())
    rows = scene.run.query("SELECT result FROM results JOIN groups ON group_id = sample_id / 4096 WHERE task_index = 0")
    verdicts = Counter(json.loads(result)["verdict"] for (result,) in rows)
    assert set(verdicts) == {"time_limit"}, verdicts
    scene.detect(scene.injected_at)


def _judge_process(signum: int) -> Body:
    """The process below a reward node that judges is killed, or frozen for good; a second node is there."""

    def body(scene: Scene) -> None:
        scene.run.hold_commits(after=1)
        second = scene.run.start("reward", "second")
        roles = scene.run.start_all()
        with scene.run.held_at(1):
            judges = {pid for pid in descendants(second.pid) if "judge_process" in command_of(pid)}
            assert len(judges) == 1
            rule = scene.when_leased("score_lease", "second", "judge", lambda: os.kill(min(judges), signum))
        scene.inject(rule.wait())
        scene.finish(second, *roles.values())
        assert_gone(judges, within_s=60)

    return body


def _never_judged(scene: Scene) -> None:
    """A grader that no node has: each judgement is an infrastructure error. Out after its attempts, and the run goes on."""
    scene.run.hold_commits(after=3)
    roles = scene.run.start_all()
    scene.inject(_first_lease_of_bad(scene))
    with scene.run.held_at(3):
        roles["coordinator"].kill()
    roles["coordinator"] = scene.run.again(roles["coordinator"])
    scene.finish(*roles.values())
    groups = {body_of(seen)["group_id"] for seen in _leases(scene, "bad")}
    drawn = scene.run.query("SELECT group_id, status FROM groups WHERE task_index = 0")
    assert all(status == "failed" for _, status in drawn), drawn
    assert len(groups) <= scene.run.config["coordinator"]["task_attempts"], (
        f"it was generated for {len(groups)} groups of the same task"
    )


# ---- data and signal ----


def _data_ends(scene: Scene) -> None:
    rule = scene.proxy.when("end_of_data", lambda _: None)
    roles = scene.run.start_all()
    scene.inject(rule.wait())
    scene.finish(*roles.values())
    assert len(scene.run.commits()) == 4, "the last step takes the one group that is left"
    scene.detect(scene.injected_at)


def _last_group_filtered(scene: Scene) -> None:
    roles = scene.run.start_all()
    scene.steps(1)
    scene.inject()
    scene.finish(*roles.values())
    statuses = dict(scene.run.query("SELECT task_index, status FROM groups"))
    assert [statuses[index] for index in range(4)] == ["trained"] * 4, statuses
    assert statuses[4] == "filtered", statuses


def _equal_rewards(scene: Scene) -> None:
    rule = scene.proxy.when("batch", lambda _: None)
    roles = scene.run.start_all()
    scene.inject(rule.wait())
    scene.finish(*roles.values())
    summary, shape = scene.run.summary(), scene.run.config
    tokens_of_group = shape["coordinator"]["group_size"] * shape["run"]["max_completion_tokens"]
    assert 3 <= summary["ledger"]["groups_filtered"] <= 3 * 4
    assert 0 < summary["ledger"]["filtered"] <= summary["ledger"]["groups_filtered"] * tokens_of_group, (
        "what it cost is in the ledger"
    )
    assert all(row["time/wait_batch_s"] > 0.0 for row in summary["steps"]), "and so is what the learner waited for it"
    assert [row["reward/no_signal_groups"] for row in summary["steps"]] == [1.0] * 3
    assert summary["verdicts_copied"] > 0, "one text is judged once in a group"


def _nothing_after_the_end(scene: Scene) -> None:
    """The last batch is handed out: no group is admitted beyond it, and all leave."""
    steps = scene.run.config["coordinator"]["max_steps"]
    rule = scene.proxy.when("batch", lambda _: None, skip=steps - 1)
    roles = scene.run.start_all()
    scene.inject(rule.wait())
    scene.finish(*roles.values())
    scene.recovered_at = time.time()
    [(groups,)] = scene.run.query("SELECT COUNT(*) FROM groups")
    assert groups == steps * scene.run.config["coordinator"]["groups_per_step"], f"{groups} groups were started"


def _interleavings(scene: Scene) -> None:
    scene.inject()
    lost = lost_wakeups(scene.run.folder, count=10_000, seed=1)
    assert lost == 0, f"{lost} of 10,000 requests for a batch were never answered"


# ---- weight updates that fail ----


def _one_node_fails(scene: Scene) -> None:
    bad = scene.run.start("rollout", "bad", overrides=("rollout.fake.fail_update_at=3",))
    rule = scene.proxy.when("weight_update_failed", lambda _: None)
    roles = scene.run.start_all("a", "b")
    scene.inject(rule.wait())
    scene.finish(bad, *roles.values())
    assert [row["weight_update/acked"] for row in scene.run.summary()["steps"]] == [3, 3, 2, 3, 3, 3], (
        "it is back with the next version"
    )
    assert [event["version"] for event in bad.events("weights_updated")] == ["v1", "v2", "v4", "v5", "v6"]


def _every_node_fails(scene: Scene) -> None:
    rule = scene.proxy.when("weight_update_failed", lambda _: None)
    roles = scene.run.start_all("a", "b")
    scene.inject(rule.wait())
    scene.steps(2)
    healthy = scene.run.start("rollout", "healthy", overrides=("rollout.fake.fail_update_at=0",))
    scene.finish(healthy, *roles.values())
    assert [row["weight_update/acked"] for row in scene.run.summary()["steps"]] == [2, 0, 3, 3]


def _slow_update(scene: Scene) -> None:
    """Updates take 0.5 s: nothing is sampled meanwhile, and every pause is in the books."""
    rule = scene.proxy.when("transfer_start", lambda _: None, node_id="a")
    roles = scene.run.start_all()
    scene.inject(rule.wait())
    scene.finish(*roles.values())
    said = {
        (seen.identity, seen.seq): seen for seen in scene.proxy.seen if seen.kind == "weights_loaded"
    }  # once, if sent again
    told = [body_of(seen)["pause_s"] for seen in said.values()]
    kept = [sync["pause_s"] for sync in scene.run.summary()["weight_updates"]]
    assert len(told) == scene.run.config["coordinator"]["max_steps"]
    assert abs(sum(told) - sum(kept)) < 1e-6, f"pauses of {told} s were told, {kept} s are kept"
    assert min(told) >= 0.5


def _old_weights(scene: Scene) -> None:
    """The engine says v3 and holds v2's weights: the alarm refuses the first batch that was made with them."""
    rule = scene.proxy.when("weights_loaded", lambda _: None, skip=2)
    roles = scene.run.start_all()
    scene.inject(rule.wait())
    learner = roles.pop("learner")
    scene.end(learner, 7, says="engine and trainer differ")
    scene.run.assert_all_exit(scene.run.stop(), *roles.values())


ON_POLICY = {"coordinator.max_staleness": 0, "coordinator.bypass_window": 0}
CASES = [
    Case("all-producers-die", "generate", "the only rollout node dies and nobody starts it again: the run ends with 5 and the cause", _all_producers_die, (18,), {"coordinator.no_progress_timeout_s": 10.0}, ends="failed"),
    Case("generator-always-raises", "generate", "every generation fails: the run ends with an error and the cause", _generator_always_raises, (23,), {"rollout.fake.fail_every": 1}, ends="failed"),
    Case("generator-sometimes-raises", "generate", "every third generation fails", _generator_sometimes_raises, (23,), {"rollout.fake.fail_every": 3, "coordinator.generate_attempts": 2}),
    Case("generation-never-ends", "generate", "one prompt's generation never ends, not after a restart of the coordinator either", _never_ends, (19,), {"rollout.fake.never_ends_on": BAD, "coordinator.generate_timeout_s": 1.0, "coordinator.generate_attempts": 2, "coordinator.task_attempts": 2, "coordinator.shuffle": False, "learner.fake_step_s": 0.5, "coordinator.max_steps": 10}, _tasks_with_bad_one(3)),
    Case("prompt-too-long", "generate", "a prompt is longer than the context", _too_long, (21,), {"coordinator.shuffle": False}, task_line("bad", "x" * 100) + task_lines(3)),
    Case("poison-prompt", "generate", "a prompt kills every rollout node that takes it", _poison, (), {"coordinator.death_attempts": 3, "coordinator.task_attempts": 2, "rollout.fake.dies_on": BAD, "coordinator.shuffle": False}, _tasks_with_bad_one()),
    Case("engine-dies", "generate", "the engine below a rollout node dies, and every generation fails from then on", _engine_dies, (23,)),
    Case("stuck-rollout", "generate", "no generation of one of two nodes ever ends", _stuck_node, (19,), {"coordinator.generate_timeout_s": 1.0, "coordinator.max_steps": 3}),
    Case("straggler", "generate", "one prompt takes longer than a step of the others", _straggler, (25, 33), {"rollout.fake.slow_on": BAD, "coordinator.shuffle": False, "coordinator.generate_timeout_s": 60.0}, _tasks_with_bad_one(30), noticed=False),
    Case("reward-sleeps-for-ever", "judge", "the programs of one task sleep for ever when they are judged", _sleeping_reward, (51,), {"coordinator.shuffle": False, "rollout.fake.completion": SLEEPY}, SLEEPS + task_lines(20)),
    Case("kill-judge-process", "judge", "kill -9 of the process that judges, below a reward node", _judge_process(signal.SIGKILL), (54,)),
    Case("freeze-judge-process", "judge", "the process that judges is frozen for good, below one of two reward nodes", _judge_process(signal.SIGSTOP), (51,), {"coordinator.score_timeout_s": 1.5}),
    Case("task-never-judged", "judge", "every judgement of one task is an infrastructure error", _never_judged, (), {"coordinator.task_attempts": 2, "coordinator.shuffle": False}, json.dumps({"task_id": "bad", "prompt": BAD, "tests": {"kind": "custom", "grader": "no-such-grader"}}) + "\n" + task_lines(4)),
    Case("lost-wake-ups", "train", "10,000 random orders of a batch's arrival and the request for it", _interleavings, (22,), ends="", noticed=False),
    Case("one-node-fails-update", "update", "one of three engines fails a weight update", _one_node_fails, (14,), {"coordinator.node_timeout_s": 30.0, "run.weight_update_timeout_s": 60.0}),
    Case("every-node-fails-update", "update", "all engines fail a weight update", _every_node_fails, (9,), {**ON_POLICY, "coordinator.max_steps": 4, "rollout.fake.fail_update_at": 2}),
    Case("slow-update", "update", "each weight update takes half a second", _slow_update, (10, 34), {"rollout.fake.update_s": 0.5, "coordinator.max_steps": 4}, noticed=False),
    Case("old-weights", "update", "an engine says that it has the new weights and keeps the old", _old_weights, (12,), {**ON_POLICY, "rollout.fake.keep_weights_from": 3, "rollout.fake.logprobs_tell_weights": True, "learner.fake_gap_alarm": 0.002}, ends="stopped"),
    Case("data-ends", "data", "the tasks end in the middle of a step", _data_ends, (17,), {"coordinator.max_epochs": 1, "coordinator.max_steps": 50}, task_lines(7), all_steps=False),
    Case("last-group-filtered", "data", "the filter rejects the last group of the data", _last_group_filtered, (28,), {"coordinator.max_epochs": 1, "coordinator.max_steps": 50, "coordinator.dynamic_sampling": True, "coordinator.shuffle": False}, task_lines(4) + task_line("last", code=FAILS), all_steps=False, noticed=False),
    Case("equal-rewards", "data", "all rewards of every group are equal", _equal_rewards, (29, 32), {"rollout.fake.completion": SAME, "coordinator.dynamic_sampling": True, "coordinator.max_filtered_per_step": 3, "coordinator.max_steps": 3}, noticed=False),
    Case("nothing-after-the-end", "data", "the last batch is out: nothing is generated beyond it", _nothing_after_the_end, (27,), noticed=False),
]  # fmt: skip
