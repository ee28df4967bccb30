"""The judge: a completion and a suite in, a verdict and a reward out. Blocking, one at a time; ``pool.py`` has several side by side.

    completion --extract--> code --> grader of the suite's kind --> one result a test --> verdict --> parts --> reward
                                         |          ^
                                         v          | outputs and values
                                     sandboxes (lab.py), which never see an expected one

The order of decision: infra, no code, compile error, security, output, memory, time, runtime error, wrong answer,
accepted. ``accepted`` needs every test of the suite to have run and passed, and at least one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import entry_points, version
from typing import Any, Literal

import structlog

from protocol.suites import (
    AssertSuite,
    CallSuite,
    CheckerSuite,
    CheckSuite,
    CustomSuite,
    ReferenceSuite,
    StdinSuite,
    TestSuite,
)
from protocol.verdicts import JudgeResult, Verdict
from services.reward import rewards
from services.reward.config import RewardConfig
from services.reward.extraction import extract_code
from services.reward.graded import Graded
from services.reward.graders.assert_plans import compiled
from services.reward.graders.asserts import grade_asserts
from services.reward.graders.calls import Cases, grade_calls
from services.reward.graders.programs import grade_checker, grade_stdin
from services.reward.lab import LEVELS, Lab, Refused
from services.reward.sandbox.control import CannotStart, Level, WorkerDied

log = structlog.get_logger()
MAX_ATTEMPTS = 3  # of a judgement that a worker died of
_KEPT_TESTS = 1000  # results of single tests that a result carries
_MEASUREMENTS = 3  # runs whose fastest is a program's CPU time
_SOLUTION_AGE_S = 60.0  # a solution is measured again after this: the machine may be busier now
Grader = Callable[["Judge", CustomSuite, str, Graded], None]


class Judge:
    """``start``, then ``judge`` as often as you like, then ``close``. ``levels`` are the isolation levels to try, strongest first."""

    def __init__(self, config: RewardConfig, *, levels: tuple[Level, ...] = LEVELS) -> None:
        self.config = config
        self.lab = Lab(config, levels)
        self._cases = Cases()
        self._solutions: dict[str, tuple[float, float]] = {}  # CPU time of a suite's solution (s), and when measured
        self._version = f"forebay {version('forebay')}"

    @property
    def isolation(self) -> str:
        """What stands between a candidate and this machine."""
        return self.lab.isolation

    def start(self) -> None:
        """Start the first worker and test it. Raises as ``Lab.start`` does."""
        self.lab.start()

    def close(self) -> None:
        """End all workers. Safe to call twice."""
        self.lab.close()

    def judge(self, completion: str, suite: TestSuite) -> JudgeResult:
        """The verdict on one completion. Never raises for anything in the completion or the suite."""
        return self.judge_code(extract(completion, suite, self.config), suite)

    def judge_code(self, code: str | JudgeResult, suite: TestSuite) -> JudgeResult:
        """The verdict on code that was extracted; or on what ``extract`` gave instead of code."""
        if isinstance(code, JudgeResult):
            return self._stamped(code)
        graded = self._grade(code, suite, stop_early=self._mode(suite) == "all")
        verdict, message = graded.outcome()
        if verdict is Verdict.INFRA_ERROR:
            return self._stamped(_infra(message, retry=not graded.refused))
        parts = self._parts(code, suite, graded, verdict)
        weights = self.config.weights
        return JudgeResult(
            isolation=self.lab.isolation,
            judge=self._version,
            verdict=verdict,
            reward=rewards.combine(parts, weights),
            parts=parts,
            tests_passed=sum(test.verdict is Verdict.ACCEPTED for test in graded.tests),
            tests_total=max(graded.total, len(graded.tests)),
            cpu_s=graded.cpu_s,
            wall_s=graded.wall_s,
            memory_mib=graded.memory_mib,
            message=message.encode("utf-8", "backslashreplace").decode("utf-8")[:500],
            tests=tuple(graded.tests[:_KEPT_TESTS]),
            attempt=graded.attempt,
            repeatable=_repeatable(verdict, graded),
        )

    def _stamped(self, result: JudgeResult) -> JudgeResult:
        return result.model_copy(update={"isolation": self.lab.isolation, "judge": self._version})

    def _mode(self, suite: TestSuite) -> Literal["all", "fraction"]:
        return suite.correctness or self.config.correctness

    def _grade(self, code: str, suite: TestSuite, *, stop_early: bool) -> Graded:
        """One pass over the suite; failures of the judge's own become ``infra``. What a worker dies of is tried again on fresh ones."""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            graded = Graded(total=0, stop_early=stop_early, attempt=attempt)
            try:
                self._run_grader(code, suite, graded)
            except Refused as error:
                graded.infra, graded.refused = str(error), True
            except CannotStart as error:
                graded.infra = str(error)
                self.lab.drop()
            except WorkerDied as error:
                graded.infra = str(error)
                died = self.lab.drop()
                if died and attempt < MAX_ATTEMPTS:
                    log.warning("judgement_retried", attempt=attempt, reason=str(error))
                    continue
                if died:  # each of them had passed its self-test just before: it is the program's doing
                    log.error("sandbox_worker_killer", attempts=attempt, code=code[:2000])
                    graded.infra, graded.tests = "", []
                    graded.fail(Verdict.RUNTIME_ERROR, f"It took down its sandbox, {attempt} times out of {attempt}.")
            except Exception as error:  # a bug here must never look like a wrong answer, nor stop the node
                log.exception("judge_failed", kind=suite.kind)
                graded.infra = f"The judge failed: {type(error).__name__}: {error}"
                self.lab.drop()
            return graded
        raise AssertionError("unreachable")

    def _run_grader(self, code: str, suite: TestSuite, graded: Graded) -> None:
        match suite:
            case AssertSuite() | CheckSuite():
                try:
                    plan = compiled(suite)
                except ValueError as error:
                    raise Refused(str(error)) from None
                graded.total = plan.num_asserts
                grade_asserts(self.lab, suite, plan, code, graded)
            case CallSuite() | ReferenceSuite():
                cases = self._cases.of(suite, self.lab)
                graded.total = len(cases)
                grade_calls(self.lab, suite, cases, code, graded)
            case StdinSuite():
                graded.total = len(suite.cases)
                grade_stdin(self.lab, suite, code, graded)
            case CheckerSuite():
                graded.total = len(suite.cases)
                grade_checker(self.lab, suite, code, graded)
            case CustomSuite():
                _custom_grader(suite.grader, self.config)(self, suite, code, graded)

    # ---- parts of the reward ----

    def _parts(self, code: str, suite: TestSuite, graded: Graded, verdict: Verdict) -> dict[str, float]:
        scores = [] if graded.verdict else [test.score for test in graded.tests]
        parts = {"correctness": rewards.correctness(scores, max(graded.total, len(scores)), self._mode(suite))}
        if verdict is Verdict.ACCEPTED:
            parts["correctness"] = 1.0
        weights = self.config.weights
        if weights.readability and suite.language == "python":
            correct = parts["correctness"] > 0
            parts["readability"] = rewards.readability(self.lab.measure(code)) if correct else 0.0
        if weights.efficiency and suite.solution is not None:
            parts["efficiency"] = self._efficiency(code, suite, graded) if verdict is Verdict.ACCEPTED else 0.0
        return parts

    def _efficiency(self, code: str, suite: TestSuite, graded: Graded) -> float:
        """CPU time against the solution's, both measured on this judge; 0 where the solution does not pass."""
        runs = [graded.cpu_s] + [self._cpu_s(code, suite) for _ in range(_MEASUREMENTS - 1)]
        now = time.monotonic()
        measured, when = self._solutions.get(suite.content_hash, (0.0, -_SOLUTION_AGE_S))
        if now - when >= _SOLUTION_AGE_S:
            assert suite.solution is not None
            solution = extract_code(suite.solution, getattr(suite, "entry_point", ""), suite.language) or suite.solution
            measured = min(self._cpu_s(solution, suite) for _ in range(_MEASUREMENTS))
            self._solutions[suite.content_hash] = (measured, now)
        one_process = suite.kind in ("asserts", "check") or not getattr(suite, "fresh_process", True)
        return rewards.efficiency(min(runs), measured, self._baseline_s() * (1 if one_process else graded.total))

    def _cpu_s(self, code: str, suite: TestSuite) -> float:
        """Of one pass in fresh processes; infinite where it does not pass."""
        graded = self._grade(code, suite, stop_early=True)
        return graded.cpu_s if graded.outcome()[0] is Verdict.ACCEPTED else float("inf")

    def _baseline_s(self) -> float:
        """CPU time of a program that does nothing."""
        if "" not in self._solutions:
            suite = StdinSuite(kind="stdin", cases=({"output": ""},))  # type: ignore[arg-type]
            self._solutions[""] = (min(self._cpu_s("pass", suite) for _ in range(2 * _MEASUREMENTS)), 0.0)
        return self._solutions[""][0]


def extract(completion: str, suite: TestSuite, config: RewardConfig) -> str | JudgeResult:
    """The code to run, or the result that needs no run. Linear in the completion; nothing is parsed."""
    if len(completion) > config.max_completion_kib * 1024:
        text = f"The completion is longer than reward.max_completion_kib = {config.max_completion_kib}."
        return _unrun(Verdict.COMPILE_ERROR, text)
    code = extract_code(completion, getattr(suite, "entry_point", ""), suite.language)
    if code is None:
        return _unrun(Verdict.NO_CODE, "No code in the completion.")
    if "\0" in code:  # CPython's answer to it depends on the version
        return _unrun(Verdict.COMPILE_ERROR, "The source holds a NUL byte.")
    return code


def _unrun(verdict: Verdict, message: str) -> JudgeResult:
    return JudgeResult(verdict=verdict, reward=0.0, parts={"correctness": 0.0}, message=message, repeatable=True)


def _infra(message: str, *, retry: bool) -> JudgeResult:
    message = message.encode("utf-8", "backslashreplace").decode("utf-8")[:500]
    return JudgeResult(verdict=Verdict.INFRA_ERROR, message=message, repeatable=not retry)


def _repeatable(verdict: Verdict, graded: Graded) -> bool:
    """Whether the same code would get the same verdict again, so that it may be kept."""
    if verdict in (Verdict.ACCEPTED, Verdict.WRONG_ANSWER, Verdict.COMPILE_ERROR, Verdict.NO_CODE):
        return all(test.verdict not in (Verdict.TIME_LIMIT, Verdict.MEMORY_LIMIT) for test in graded.tests)
    return verdict is Verdict.RUNTIME_ERROR and graded.runtime_is_deterministic


def _custom_grader(name: str, config: RewardConfig) -> Grader:
    if name not in config.graders:
        raise Refused(f"The grader {name!r} is not allowed on this node (reward.graders).")
    found = [entry for entry in entry_points(group="forebay.graders") if entry.name == name]
    if not found:
        raise Refused(
            f"The grader {name!r} is not installed: no entry point of that name in the group forebay.graders."
        )
    grader: Any = found[0].load()
    return grader
