"""kill -9 and SIGSTOP of each role at each stage, and of the whole run at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from tests.faults.case import Body, Case, Scene
from tests.faults.processes import Role, assert_gone, descendants

LONG = {"coordinator.max_steps": 12, "learner.fake_step_s": 0.3}
MORE = {"coordinator.max_steps": 8}
IDLE = {"learner.fake_step_s": 0.7, "coordinator.max_staleness": 1, "coordinator.bypass_window": 0}
# The moment of a stage: the message that has just been sent when the victim dies.
MOMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "while a group is generated": ("generate_lease", {"direction": "down"}),
    "while a completion is judged": ("score_lease", {"direction": "down"}),
    "when a batch is handed out": ("batch", {"direction": "down"}),
    "within a weight update": ("transfer_start", {"node_id": "a"}),
    "within the commit of a step": ("step_committed", {"direction": "up"}),
    "between a commit and its acknowledgement": ("ack", {"re_kind": "step_committed"}),
}


def _kill(victim: str, moment: str, *, check: Callable[[Scene, dict[str, Role], Role], None] | None = None) -> Body:
    kind, conditions = MOMENTS[moment]

    def body(scene: Scene) -> None:
        scene.run.hold_commits(after=2)
        roles = scene.run.start_all()
        scene.steps(1)
        children = descendants(roles[victim].pid)
        scene.kill_at(roles[victim], kind, after_step=2, **conditions)
        assert_gone(children, within_s=60)
        dead, roles[victim] = roles[victim], scene.run.again(roles[victim])
        scene.finish(*roles.values())
        if check:
            check(scene, roles, dead)

    return body


def _kill_idle(victim: str) -> Body:
    def body(scene: Scene) -> None:
        scene.run.hold_commits(after=1)
        roles = scene.run.start_all()
        with scene.run.held_at(1):
            scene.run.wait_until(_nobody_works)
            scene.inject()
            roles[victim].kill()
        roles[victim] = scene.run.again(roles[victim])
        scene.finish(*roles.values())

    return body


def _nobody_works(status: dict[str, Any]) -> bool:
    return status["groups"]["open"] == 0 and status["groups"]["ready"] > 0


def _one_of_two(role: str) -> Body:
    """The node is not started again: the other one takes its work."""

    def body(scene: Scene) -> None:
        scene.run.hold_commits(after=1)
        second = [scene.run.start("reward", "second")] if role == "reward" else []
        roles = scene.run.start_all(*(("a", "second") if role == "rollout" else ("a",)))
        victim = second.pop() if second else roles.pop("second")
        children = descendants(victim.pid)
        kind, other = ("generate_lease", "a") if role == "rollout" else ("score_lease", "judge")
        with scene.run.held_at(1):
            rule = scene.when_leased(kind, "second", other, victim.process.kill)
        scene.inject(rule.wait())
        victim.process.wait()
        assert_gone(children, within_s=60)
        scene.finish(*roles.values())

    return body


def _freeze(victim: str, silent_s: float, *, wait_for: str = "") -> Body:
    """SIGSTOP for ``silent_s``, then SIGCONT: the process goes on with what it had in mind, and the run has not ended meanwhile."""

    def body(scene: Scene) -> None:
        last = scene.run.hold_commits(after=scene.run.config["coordinator"]["max_steps"] - 1)
        scene.run.hold_commits(after=2)
        roles = scene.run.start_all("a", "b") if victim == "a" else scene.run.start_all()
        with scene.run.held_at(2):
            if wait_for:
                rule = scene.proxy.when(wait_for, lambda _: roles[victim].signal(signal.SIGSTOP), node_id=victim)
            else:
                scene.inject()
                roles[victim].signal(signal.SIGSTOP)
        if wait_for:
            scene.inject(rule.wait())
        time.sleep(silent_s)
        roles[victim].signal(signal.SIGCONT)
        scene.proxy.release(last)
        scene.finish(*roles.values())

    return body


def _freeze_for_good(scene: Scene) -> None:
    scene.run.hold_commits(after=2)
    roles = scene.run.start_all("a", "b")
    frozen = roles.pop("a")
    with scene.run.held_at(2):
        scene.inject()
        frozen.signal(signal.SIGSTOP)
    scene.finish(*roles.values())


def _learner_trains_again(scene: Scene, roles: dict[str, Role], dead: Role) -> None:
    assert scene.run.summary()["incarnation"] == 1
    resumed = roles["learner"].events("resumed")
    assert [event["step"] for event in resumed] == [2], "it did not go on from its checkpoint"


def _die_within_the_step(scene: Scene) -> None:
    roles = scene.run.start_all_but("learner")
    first = scene.run.start("learner", overrides=("learner.fake_die_at_step=4",))
    first.exit_code()
    scene.inject()
    roles["learner"] = scene.run.again_with(first, "learner.fake_die_at_step=0")
    scene.finish(*roles.values())
    assert [e["step"] for e in roles["learner"].events("resumed")] == [2]


def _learner_twice(scene: Scene) -> None:
    """The second one dies while it trains again what the first had trained: everything twice, and yet once."""
    scene.run.hold_commits(after=4)
    roles = scene.run.start_all()
    scene.kill_at(roles["learner"], "batch", after_step=4, direction="down")  # after 5, and the last checkpoint is of 4
    again = scene.proxy.when("batch", lambda _: roles["learner"].process.kill(), direction="down", skip=1)
    roles["learner"] = scene.run.again(roles["learner"])
    again.wait()
    roles["learner"].process.wait()
    roles["learner"] = scene.run.again(roles["learner"])
    scene.finish(*roles.values())


def _power_cut(moment: str) -> Body:
    kind, conditions = MOMENTS[moment]

    def body(scene: Scene) -> None:
        scene.run.hold_commits(after=3)
        scene.run.start_all()
        with scene.run.held_at(3):
            rule = scene.proxy.when(kind, lambda _: scene.run.signal_all(), **conditions)
        scene.inject(rule.wait())
        for role in scene.run.roles:
            role.process.wait()
        roles = scene.run.start_all()
        scene.finish(*roles.values())

    return body


def _resume_late(scene: Scene) -> None:
    """Cut at step 12, then 20 more: staleness and order must hold from the first step on (``evidence`` checks each)."""
    scene.run.hold_commits(after=12)
    scene.run.start_all("a", "b")
    with scene.run.held_at(12):
        scene.inject()
        scene.run.signal_all()
    for role in scene.run.roles:
        role.process.wait()
    roles = {name: scene.run.start(role, name) for role, name in _FLEET}
    scene.finish(*roles.values())
    assert max(map(int, scene.run.summary()["staleness_counts"])) <= scene.run.config["coordinator"]["max_staleness"]


_FLEET = (
    ("coordinator", "coordinator"),
    ("reward", "judge"),
    ("rollout", "a"),
    ("rollout", "b"),
    ("learner", "learner"),
)


def _restored_full_batch(scene: Scene) -> None:
    """A buffer that holds exactly one batch is restored; no admission follows until it is trained."""
    scene.run.start_all_but("learner")
    batch = scene.run.config["coordinator"]["groups_per_step"]
    scene.run.wait_until(lambda s: s["groups"] == {"open": 0, "ready": batch, "batched": 0})
    scene.inject()
    scene.run.signal_all()
    for role in scene.run.roles:
        role.process.wait()
    scene.finish(*scene.run.start_all().values())


def _terminate(victim: str, code: int) -> Body:
    """SIGTERM: an ordered end with its documented code; the work goes to another, and no attempt is counted."""

    def body(scene: Scene) -> None:
        role = {"a": "rollout", "judge": "reward"}.get(victim, victim)
        scene.run.hold_commits(after=2)
        roles = scene.run.start_all()
        kind = {"a": "generate_lease", "judge": "score_lease"}.get(victim, "batch")
        with scene.run.held_at(2):
            rule = scene.proxy.when(kind, lambda _: roles[victim].signal(signal.SIGTERM))
        scene.inject(rule.wait())
        scene.run.assert_all_exit(roles[victim], code=code)
        scene.detect()
        roles[victim] = scene.run.start(role, victim)
        scene.finish(*roles.values())
        assert scene.run.summary()["ledger"]["groups_failed"] == 0, "a cancellation was taken for a failure"

    return body


def _terminate_coordinator(scene: Scene) -> None:
    """The run stops in order: everybody leaves with 0, it says 143, and goes on later."""
    scene.run.hold_commits(after=2)
    roles = scene.run.start_all()
    with scene.run.held_at(2):
        scene.inject()
        roles["coordinator"].signal(signal.SIGTERM)
    scene.run.assert_all_exit(roles.pop("coordinator"), code=143)
    scene.run.assert_all_exit(*roles.values())
    scene.detect()
    scene.finish(*scene.run.start_all().values())


def _name(victim: str, moment: str) -> str:
    role = {"a": "rollout", "judge": "reward"}.get(victim, victim)
    return f"kill-{role}-{moment}".replace(" ", "-")


def _kill_case(victim: str, moment: str, stage: str, short: str, **extra: Any) -> Case:
    role = {"a": "rollout node", "judge": "reward node"}.get(victim, victim)
    check = extra.pop("check", None)
    return Case(
        _name(victim, short), stage, f"kill -9 of the {role} {moment}", _kill(victim, moment, check=check), **extra
    )


CASES = [
    Case("kill-rollout-idle", "generate", "kill -9 of the rollout node while it is idle", _kill_idle("a"), (54,), IDLE),
    _kill_case("a", "while a group is generated", "generate", "generating", covers=(54,)),
    Case("kill-one-of-two-rollouts", "generate", "kill -9 of one of two rollout nodes, for good", _one_of_two("rollout")),
    _kill_case("coordinator", "while a group is generated", "generate", "generating", covers=(54,)),
    Case("freeze-rollout", "generate", "a rollout node is frozen for 4 s while it generates, and goes on", _freeze("a", 4, wait_for="generate_lease"), (19,), LONG),
    Case("freeze-coordinator", "generate", "the coordinator is frozen for 5 s and goes on", _freeze("coordinator", 5), changes=MORE, noticed=False),
    Case("sigterm-rollout", "generate", "SIGTERM to a rollout node while it generates", _terminate("a", 143), (24,), {"coordinator.generate_attempts": 1}),
    Case("kill-reward-idle", "judge", "kill -9 of the reward node while it is idle", _kill_idle("judge"), (54,), IDLE),
    _kill_case("judge", "while a completion is judged", "judge", "judging", covers=(54,)),
    Case("kill-one-of-two-rewards", "judge", "kill -9 of one of two reward nodes, for good", _one_of_two("reward"), (54,)),
    _kill_case("coordinator", "while a completion is judged", "judge", "judging"),
    Case("freeze-reward", "judge", "the reward node is frozen for 5 s while it judges, and goes on", _freeze("judge", 5, wait_for="score_lease"), (51,)),
    Case("sigterm-reward", "judge", "SIGTERM to a reward node while it judges", _terminate("judge", 143), (24,), {"coordinator.score_attempts": 1}),
    _kill_case("learner", "when a batch is handed out", "train", "handed-out", covers=(30, 54), check=_learner_trains_again),
    Case("learner-dies-within-the-step", "train", "the learner dies in the optimizer step, after it got its batch", _die_within_the_step, (30,)),
    Case("kill-learner-while-it-trains-again", "train", "the learner's successor is killed, too, while it trains again", _learner_twice, (30,), MORE),
    _kill_case("coordinator", "when a batch is handed out", "train", "handed-out", covers=(30,)),
    Case("freeze-learner", "train", "the learner is frozen for 5 s with its batch, and goes on", _freeze("learner", 5, wait_for="batch")),
    Case("sigterm-learner", "train", "SIGTERM to the learner", _terminate("learner", 143), (24,)),
    _kill_case("learner", "within a weight update", "update", "updating"),
    _kill_case("a", "within a weight update", "update", "updating", covers=(9,)),
    _kill_case("coordinator", "within a weight update", "update", "updating"),
    Case("freeze-rollout-in-update", "update", "a rollout node is frozen within a weight update, for good", _freeze_for_good, (2,), {"run.weight_update_timeout_s": 300.0}),
    _kill_case("learner", "within the commit of a step", "commit", "committing"),
    _kill_case("coordinator", "within the commit of a step", "commit", "committing"),
    _kill_case("coordinator", "between a commit and its acknowledgement", "commit", "acknowledging"),
    Case("sigterm-coordinator", "whole run", "SIGTERM to the coordinator; the run is resumed", _terminate_coordinator),
    Case("power-cut-generating", "whole run", "all processes are killed at once while a group is generated", _power_cut("while a group is generated"), (54, 55)),
    Case("power-cut-updating", "whole run", "all processes are killed at once within a weight update", _power_cut("within a weight update"), (6, 55)),
    Case("power-cut-committing", "whole run", "all processes are killed at once within a commit", _power_cut("within the commit of a step"), (55,)),
    Case("resume-late", "whole run", "all processes are killed at once at step 12; 20 steps follow", _resume_late, (31, 55), {"coordinator.max_steps": 32, "learner.fake_step_s": 0.02, "rollout.fake.tokens_per_s": 1000.0}),
    Case(
        "restored-buffer-is-one-batch", "whole run", "all is killed when the buffer holds exactly one batch, and resumed", _restored_full_batch, (20,),
        {"coordinator.max_staleness": 0, "coordinator.bypass_window": 0, "coordinator.max_steps": 3}, noticed=False,
    ),
]  # fmt: skip
