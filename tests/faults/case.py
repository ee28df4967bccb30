"""A case: one fault in one run, what must come of it, and what did."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import evidence
from tests.faults.harness import Run
from tests.faults.processes import Role, seconds
from tests.faults.proxy import Proxy, Rule, Seen

# Short limits, so that a fault is over in seconds. A node_timeout_s below 2 s would take a busy machine's pauses for deaths.
LIMITS: dict[str, Any] = {
    "coordinator.node_timeout_s": 2.0,
    "coordinator.generate_timeout_s": 5.0,
    "coordinator.score_timeout_s": 8.0,
    "coordinator.no_progress_timeout_s": 25.0,
    "coordinator.leave_timeout_s": 5.0,
    "coordinator.max_steps": 6,
    "run.weight_update_timeout_s": 6.0,
    "run.join_timeout_s": 25.0,
    "learner.fake_step_s": 0.1,
    "rollout.fake.tokens_per_s": 200.0,
}
# Events by which the system says that something is wrong, or has been. ``node_left`` counts unless the node said goodbye.
SIGNS = {
    "rejoined", "lease_expired", "lease_failed", "weight_update_aborted", "weight_update_failed", "message_refused", "node_refused",
    "sample_refused", "run_failed", "resumed", "not_judged", "judgement_retried", "publish_again", "nodes_did_not_leave",
    "frame_refused", "disk_full", "checkpoint_failed", "disk_has_space_again", "stood_still",
}  # fmt: skip


class NotRun(Exception):
    """This machine can't have the fault; the text says why."""


class Scene:
    """What a case's body acts on: the run, its proxy, and the moments that are reported."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.injected_at: float | None = None
        self.detected_at: float | None = None
        self.recovered_at: float | None = None

    @property
    def proxy(self) -> Proxy:
        """Between nodes and coordinator."""
        assert self.run.proxy is not None
        return self.run.proxy

    def inject(self, at: float | None = None) -> None:
        """The fault happens now (or happened ``at``, in seconds since the epoch)."""
        self.injected_at = time.time() if at is None else at

    def detect(self, at: float | None = None) -> None:
        """The system has noticed, by something that is no log event: an exit code, a refusal."""
        self.detected_at = self.detected_at or at or time.time()

    def end(self, role: Role, code: int, *, says: str = "", timeout_s: float = 120) -> None:
        """The designed end: ``role`` ends with ``code`` and an error that holds ``says``."""
        got = role.exit_code(timeout_s)
        self.detect()
        self.recovered_at = time.time()
        assert got == code, f"{role.name} ended with {got}, not {code}\n{role.tail()}"
        assert says in role.error(), f"{role.name} did not say {says!r} but: {role.error()[:1000]}"

    def steps(self, count: int) -> None:
        """Until ``count`` steps are committed."""
        self.run.wait_for_step(count)

    def finish(self, *roles: Role) -> None:
        """All of ``roles`` end with 0, by themselves."""
        self.run.assert_all_exit(*roles)

    def kill_at(self, role: Role, kind: str, *, after_step: int, **conditions: Any) -> None:
        """``kill -9`` of ``role`` when the next message of ``kind`` comes by once ``after_step`` steps are committed, and wait until it is
        gone."""
        with self.run.held_at(after_step):
            rule = self.proxy.when(kind, lambda _: role.process.kill(), **conditions)
        self.inject(rule.wait())
        role.process.wait()

    def when_leased(self, kind: str, node_id: str, other: str, call: Callable[[], object]) -> Rule:
        """Call ``call`` with the next lease of ``kind`` for ``node_id``, of two nodes. It does get one: until then those for the ``other`` are
        held back, so that this one has the more room."""
        held = self.proxy.add("hold", kind, node_id=other, count=None)

        def hit(_: Seen) -> None:
            call()
            self.proxy.release(held)

        return self.proxy.when(kind, hit, node_id=node_id)

    def first_sign(self) -> float | None:
        """When the system noticed: the first log event of ``SIGNS`` of any role, or request that was sent again."""
        assert self.injected_at is not None
        found = [self.detected_at] if self.detected_at else []
        for role in {role.log: role for role in self.run.roles}.values():
            for event in evidence.log_events(role.log):
                if _is_sign(event) and seconds(event) >= self.injected_at - 0.005:
                    found.append(seconds(event))
                    break
        found += list(self._sent_again())[:1]
        return min(found, default=None)

    def _sent_again(self) -> Iterable[float]:
        requests: set[tuple[bytes, int]] = set()
        for seen in self.run.proxy.seen if self.run.proxy else ():
            if (
                seen.direction == "up" and seen.seq and seen.kind != "batch_request"
            ):  # that one waits as long as it takes
                key = (seen.identity, seen.seq)
                if key in requests and self.injected_at is not None and seen.at > self.injected_at:
                    yield seen.at
                requests.add(key)


def _is_sign(event: Mapping[str, Any]) -> bool:
    if event["event"] == "node_left":
        return event.get("reason", "") not in ("drained", "done", "left", "")
    return event["event"] in SIGNS


Body = Callable[[Scene], None]


@dataclass(frozen=True)
class Case:
    """One row of the suite. ``covers`` are numbers of the list of reported faults that the project keeps; ``ends`` is the state that
    the run must end in; with ``noticed`` some sign of the fault must be in a log or on the wire."""

    name: str
    stage: str
    fault: str
    body: Body
    covers: tuple[int, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    tasks: str | None = None
    ends: str = "finished"
    all_steps: bool = True  # of those that end as finished: False where the data ends before
    noticed: bool = True
    real: bool = False
    slow: bool = False  # over 20 s on two cores


@dataclass
class Result:
    """What came of a case. Times in seconds from the injection: ``detected_s`` until the first sign that the system noticed,
    ``recovered_s`` until the first step that was committed after that, or the designed end. None: nobody had to notice, or nothing
    was left to do."""

    case: Case
    passed: bool = False
    why: str = ""
    not_run: bool = False
    detected_s: float | None = None
    recovered_s: float | None = None
    lost: int = 0
    duplicated: int = 0
    wall_s: float = 0.0
    folder: Path | None = None  # its logs, if they were kept

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "name": self.case.name,
            "stage": self.case.stage,
            "fault": self.case.fault,
            "covers": list(self.case.covers),
            "result": "not run" if self.not_run else "passed" if self.passed else "failed",
            "why": self.why,
            "detected_after_s": self.detected_s,
            "recovered_after_s": self.recovered_s,
            "lost": self.lost,
            "duplicated": self.duplicated,
            "wall_s": round(self.wall_s, 2),
        }


def run_case(case: Case, folder: Path, *, seed: int = 0) -> Result:
    """Run one case in ``folder``, which keeps its logs and journal. Whatever goes wrong is in the result."""
    folder.mkdir(parents=True, exist_ok=True)
    result = Result(case, folder=folder)
    started = time.monotonic()
    try:
        # The fakes carry routed_experts as well, so that no fault may part them from their tokens.
        changes = {**LIMITS, "run.routing_replay": not case.real, **case.changes}
        with Run(folder, changes, tasks=case.tasks, proxied=True, seed=seed, warm=not case.real) as run:
            scene = Scene(run)
            case.body(scene)
            _judge(case, scene, result)
    except NotRun as reason:
        result.not_run, result.why = True, str(reason)
    except AssertionError as error:
        result.why = str(error) or f"an assertion without a text:\n{traceback.format_exc(limit=-1)}"
    except Exception as error:  # a case that breaks has failed, and the next one must run
        result.why = f"{type(error).__name__}: {error}"
    result.wall_s = time.monotonic() - started
    return result


def _judge(case: Case, scene: Scene, result: Result) -> None:
    """The end as it was to be, every account compared, and the times."""
    run = scene.run
    assert scene.injected_at is not None, "the case injected nothing"
    if not run.journal.exists():  # a case within this process
        result.recovered_s, result.passed = time.time() - scene.injected_at, True
        return
    for role in run.roles if not case.real else ():  # vLLM prints its own
        assert "\nTraceback (most" not in role.output(), f"{role.name} ended with a stack trace\n{role.tail()}"
    verdict = run.verdict(finished=case.ends == "finished" and case.all_steps)
    result.lost, result.duplicated = verdict.lost, verdict.duplicated
    sign = scene.first_sign()
    result.detected_s = None if sign is None else max(0.0, sign - scene.injected_at)
    noticed_at = max(scene.injected_at, sign or 0.0)
    recovered_at = scene.recovered_at or next((at for at in run.commits() if at > noticed_at), None)
    if recovered_at is not None:
        result.recovered_s = recovered_at - scene.injected_at
    if case.ends:
        state = run.summary()["state"]
        assert state == case.ends, f"the run ended as {state}: {run.summary()['end_reason']}"
    if case.ends == "finished" and case.all_steps:
        assert len(run.commits()) == run.config["coordinator"]["max_steps"]
    assert not verdict.problems, "\n".join(verdict.problems)
    assert not case.noticed or sign is not None, "nobody noticed: no log event and no repeated request"
    result.passed = True
