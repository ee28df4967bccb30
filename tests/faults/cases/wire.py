"""Messages that are dropped, delayed, doubled, overtaken or damaged on their way, at each stage; and nodes that are cut off."""

from __future__ import annotations

import time
from typing import Any

from tests.faults.case import Body, Case, Scene
from tests.faults.proxy import Rule

# What travels at each stage: (kind, conditions). All of them are hit in one run, one after the other.
STAGE_MESSAGES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "join": [("hello", {}), ("welcome", {}), ("heartbeat", {"count": 5}), ("heartbeat_ack", {"count": 5})],
    "generate": [("generate_lease", {}), ("sample_result", {}), ("ack", {"re_kind": "sample_result"})],
    "judge": [("score_lease", {}), ("suite_request", {}), ("suite", {}), ("score_result", {}), ("ack", {"re_kind": "score_result"})],
    "train": [("batch_request", {}), ("batch", {}), ("step_committed", {}), ("ack", {"re_kind": "step_committed"})],
    "update": [
        ("weight_update_request", {}), ("weight_update_plan", {"node_id": "learner"}), ("weight_update_plan", {"node_id": "a"}), ("weight_update_ready", {"node_id": "learner"}),
        ("weight_update_ready", {"node_id": "a"}), ("transfer_start", {"node_id": "learner"}), ("transfer_start", {"node_id": "a"}), ("transfer_done", {}),
        ("weights_loaded", {}), ("weight_update_result", {}),
    ],
}  # fmt: skip
ARRAYS = ("sample_result", "suite", "batch")  # these come with array frames, which can be damaged, too
WORDS = {
    "drop": "lost",
    "delay": "0.7 s late",
    "duplicate": "sent twice",
    "reorder": "overtaken by later ones",
    "corrupt": "damaged",
}


def _on_the_way(action: str, stage: str) -> Body:
    """Every kind of message of a stage, once each (heartbeats: five), from the second step on; those of joining from the start."""

    def body(scene: Scene) -> None:
        if stage in ("join", "judge"):  # a suite is asked for once, at the beginning
            rules = _add_rules(scene, action, stage)
            roles = scene.run.start_all()
        else:
            scene.run.hold_commits(after=1)
            roles = scene.run.start_all()
            with scene.run.held_at(1):
                rules = _add_rules(scene, action, stage)
        scene.finish(*roles.values())
        hits = [at for rule in rules for at in rule.hits]
        missed = [f"{rule.kind} {rule.node_id}" for rule in rules if not rule.hits]
        assert not missed, f"no such message came by: {missed}"
        scene.inject(min(hits))

    return body


def _add_rules(scene: Scene, action: str, stage: str) -> list[Rule]:
    delay_s = 0.7 if action == "delay" else 0.0
    rules = [
        scene.proxy.add(action, kind, **{"delay_s": delay_s, **conditions})
        for kind, conditions in STAGE_MESSAGES[stage]
    ]
    if action == "corrupt":
        kinds = [kind for kind, _ in STAGE_MESSAGES[stage] if kind in ARRAYS]
        rules += [scene.proxy.add("shorten", kind) for kind in kinds if kind != "suite"]
    return rules


def _wire_case(action: str, stage: str) -> Case:
    kinds = list(dict.fromkeys(kind for kind, _ in STAGE_MESSAGES[stage]))
    changes = {"coordinator.max_steps": 8, "coordinator.generate_timeout_s": 3.0}
    return Case(
        f"{action}-{stage}",
        stage,
        f"{WORDS[action]}: {', '.join(kinds)}",
        _on_the_way(action, stage),
        changes=changes,
        noticed=action in ("drop", "corrupt"),
    )


def _chaos(scene: Scene) -> None:
    """Every message between everybody, with some probability."""
    scene.run.hold_commits(after=10)
    scene.run.hold_commits(after=1)
    roles = scene.run.start_all()
    with scene.run.held_at(1):
        rules = [scene.proxy.add(action, probability=0.03, count=None) for action in ("drop", "duplicate", "reorder")]
        rules.append(scene.proxy.add("delay", probability=0.05, count=None, delay_s=0.3))
        scene.inject()
    with scene.run.held_at(10):
        for rule in rules:  # so that the end can be told
            scene.proxy.release(rule)
    scene.finish(*roles.values())


def _cut_off(node_id: str, seconds: float) -> Body:
    """Nothing passes in either direction for ``seconds``, and what was sent is gone. The run does not end meanwhile."""

    def body(scene: Scene) -> None:
        last = scene.run.hold_commits(after=scene.run.config["coordinator"]["max_steps"] - 1)
        scene.run.hold_commits(after=2)
        roles = scene.run.start_all("a", "b")
        with scene.run.held_at(2):
            scene.inject()
            scene.proxy.cut(node_id)
        time.sleep(seconds)
        scene.proxy.heal(node_id)
        scene.proxy.release(last)
        scene.finish(*roles.values())

    return body


def _lost_shutdown(scene: Scene) -> None:
    """Its next heartbeat is answered with the news."""
    rule = scene.proxy.add("drop", "shutdown", node_id="judge", count=1)
    roles = scene.run.start_all()
    scene.inject(rule.wait())
    scene.finish(*roles.values())


LONG = {"coordinator.max_steps": 10, "learner.fake_step_s": 0.3}
CASES = [
    *(_wire_case(action, stage) for stage in STAGE_MESSAGES for action in WORDS),
    Case("chaos", "whole run", "a tenth of all messages is lost, doubled, late or overtaken, of all kinds", _chaos, changes={"coordinator.max_steps": 12, "coordinator.generate_timeout_s": 3.0, "run.weight_update_timeout_s": 30.0}, slow=True),
    Case("cut-off-rollout", "generate", "a rollout node is cut off for 4 s", _cut_off("a", 4), changes=LONG),
    Case("cut-off-reward", "judge", "the reward node is cut off for 4 s", _cut_off("judge", 4), changes=LONG),
    Case("cut-off-learner", "train", "the learner is cut off for 4 s", _cut_off("learner", 4), changes=LONG),
    Case("cut-off-all", "whole run", "the coordinator is cut off from all nodes for 4 s", _cut_off("", 4), changes=LONG),
    Case("lost-shutdown", "whole run", "a node is not reached by the word that the run has ended", _lost_shutdown, changes={"coordinator.max_steps": 2}, noticed=False),
]  # fmt: skip
