"""The judge: a completion and a suite in, a verdict and a reward out. Blocking; the service calls it from threads.

    completion --extract--> code --+--> candidate guest (worker A): compile, load, answer calls with values
                                   |           ^ calls, values
    suite --compile--> inline asserts, evaluated here, or
                       tests guest (worker B, no candidate code): proxies call through here

The order of decision is SANDBOX.md 1.5: infra, no code, compile error, security, output, memory, time, runtime error, wrong answer,
accepted. ``accepted`` needs at least one executed assert and one answered call, and no failure.
"""

from __future__ import annotations

import queue
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from protocol.suites import AssertSuite, Limits, TestSuite
from protocol.verdicts import JudgeResult, Verdict
from services.reward.config import RewardConfig
from services.reward.extraction import extract_code
from services.reward.sandbox import values
from services.reward.sandbox.pool import ISOLATION, Ended, Level, Session, Worker, WorkerDied, start_worker
from services.reward.suites import CompiledSuite, compiled, inline_scope

_LEVELS: tuple[Level, ...] = ("namespaces", "landlock")
_JOBS_PER_WORKER = 5000  # then a fresh one, so that nothing can pile up in it
_NUM_ATTEMPTS = 2  # of a judgement whose worker died, each on fresh workers
_TESTS_EXTRA_S = 10.0  # the tests' own process gets this on top of the candidate's limits
_TESTS_MEMORY_MIB = 512
_SELF_TEST = AssertSuite(
    kind="asserts", entry_point="probe", code="assert probe(20, 22) == 42", limits=Limits(cpu_s=10, wall_s=20)
)


@dataclass
class _Outcome:
    """What one run of a suite showed so far. ``failed`` is the first failure in the order of the suite."""

    num_passed: int = 0
    num_run: int = 0
    num_calls: int = 0
    failed: tuple[Verdict, str] | None = None
    finished: bool = False
    infra: str = ""
    compiled: bool = False

    def fail(self, verdict: Verdict, text: str) -> None:
        self.failed = self.failed or (verdict, text)


@dataclass
class _Slot:
    """Workers of one judgement at a time; started when first needed."""

    candidate: Worker | None = None
    tests: Worker | None = None


class Judge:
    """Judges completions, ``config.num_workers`` at a time. ``levels`` are the isolation levels to try, strongest first."""

    def __init__(self, config: RewardConfig, *, levels: tuple[Level, ...] = _LEVELS) -> None:
        self._config = config
        self._levels: tuple[Level, ...] = (*levels, "none") if config.unsafe else levels
        self._slots: queue.LifoQueue[_Slot] = queue.LifoQueue()
        self._all: list[_Slot] = []
        self._closed = False
        self.isolation = "none"
        self._num_oom_kills = _num_oom_kills()

    def start(self) -> None:
        """Start the workers and judge one known program.

        Raises:
            ConfigError: no isolation works on this node (and ``unsafe`` is off), or the interpreter does not run.
        """
        try:
            for _ in range(self._config.num_workers):
                slot = _Slot(candidate=start_worker(self._config.interpreter, self._levels))
                self._all.append(slot)
                self._slots.put(slot)
        except WorkerDied as error:
            self.close()
            raise ConfigError(
                f"No sandbox works on this node: {error}. Allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
                "kernel.apparmor_restrict_unprivileged_userns=0) or Landlock; or set reward.unsafe = true to judge without isolation."
            ) from None
        worker = self._all[0].candidate
        assert worker is not None
        self._levels = (worker.level,)  # a later worker must be as strong as the first
        self.isolation = ISOLATION[worker.level]
        probe = self.judge("```python\ndef probe(a, b):\n    return a + b\n```", _SELF_TEST)
        if probe.verdict is not Verdict.ACCEPTED:
            self.close()
            raise ConfigError(
                f"The sandbox's self-test failed: {probe.verdict} {probe.message}. Is reward.python a CPython >= 3.10?"
            )

    def close(self) -> None:
        """End all workers. Judgements in progress end as infra errors, and so does every later one. Safe to call twice."""
        self._closed = True
        for slot in self._all:
            for worker in (slot.candidate, slot.tests):
                if worker is not None:
                    worker.shut()
        mine = [self._slots.get() for _ in self._all]  # waits until no thread uses them
        for slot in mine:
            self._drop(slot)
            self._slots.put(slot)

    def check_suite(self, suite: TestSuite) -> None:
        """Can this suite be judged at all?

        Raises:
            ValueError: no; says why.
        """
        compiled(suite)

    def judge(self, completion: str, suite: TestSuite) -> JudgeResult:
        """The verdict on one completion; waits for a free slot. Never raises for anything in the completion."""
        assert self._all, "judge() before start()"
        try:
            plan = compiled(suite)
        except ValueError as error:
            return self._result(Verdict.INFRA_ERROR, str(error))
        early = self._before_running(completion, plan)
        if isinstance(early, JudgeResult):
            return early
        slot = self._slots.get()
        try:
            for _ in range(_NUM_ATTEMPTS):
                try:
                    return self._attempt(slot, early, plan, suite.limits)
                except WorkerDied as error:
                    reason = str(error)
                    self._drop(slot)
            return self._result(Verdict.INFRA_ERROR, reason, total=plan.num_asserts)
        finally:
            self._slots.put(slot)

    def _before_running(self, completion: str, plan: CompiledSuite) -> JudgeResult | str:
        """The code to run, or the verdict that needs no run."""
        limit = self._config.max_completion_kib
        if len(completion) > limit * 1024:
            text = f"The completion is longer than reward.max_completion_kib = {limit}."
            return self._result(Verdict.COMPILE_ERROR, text, total=plan.num_asserts)
        code = extract_code(completion, plan.entry_point)
        if code is None:
            return self._result(Verdict.NO_CODE, "No code in the completion.", total=plan.num_asserts)
        if "\0" in code:  # CPython's answer to it depends on the version
            return self._result(Verdict.COMPILE_ERROR, "The source holds a NUL byte.", total=plan.num_asserts)
        return code

    # --- one attempt on one slot ---

    def _attempt(self, slot: _Slot, code: str, plan: CompiledSuite, limits: Limits) -> JudgeResult:
        slot.candidate = self._ready(slot.candidate)
        session = slot.candidate.open("candidate", limits)
        outcome = _Outcome()
        stop_early = self._config.correctness == "all"
        try:
            _load(session, code, outcome)
            if outcome.failed is None and plan.inline is not None:
                _run_inline(session, plan, outcome, stop_early)
            elif outcome.failed is None:
                slot.tests = self._ready(slot.tests)
                _run_remote(session, slot.tests, plan, limits, outcome, stop_early)
        except Ended:
            pass
        except values.ValueRefused as error:
            outcome.fail(Verdict.RUNTIME_ERROR, f"The program's answer can't be read: {error}")
        finally:
            report = session.finish()
        return self._decide(plan, limits, outcome, report)

    def _ready(self, worker: Worker | None) -> Worker:
        if self._closed:
            raise WorkerDied("The judge is closed.")
        if worker is not None and worker.num_jobs < _JOBS_PER_WORKER:
            return worker
        if worker is not None:
            worker.close()
        return start_worker(self._config.interpreter, self._levels)

    def _drop(self, slot: _Slot) -> None:
        for worker in (slot.candidate, slot.tests):
            if worker is not None:
                worker.close()
        slot.candidate = slot.tests = None

    def _decide(self, plan: CompiledSuite, limits: Limits, outcome: _Outcome, report: dict[str, Any]) -> JudgeResult:
        verdict, text = _verdict(outcome, report, limits)
        if report["signal"] == signal.SIGKILL and not report["killed"] and _num_oom_kills() > self._num_oom_kills:
            self._num_oom_kills = _num_oom_kills()
            if report["memory_mib"] < 0.9 * limits.memory_mib:
                verdict, text = Verdict.INFRA_ERROR, "The node ran out of memory."
        total = max(plan.num_asserts, outcome.num_run)
        passed = outcome.num_passed
        fraction = (
            1.0 if verdict is Verdict.ACCEPTED else passed / total if self._config.correctness == "fraction" else 0.0
        )
        if verdict is Verdict.ACCEPTED:
            total = outcome.num_run
        return self._result(verdict, text, total=total, passed=passed, correctness=min(fraction, 1.0), report=report)

    def _result(
        self,
        verdict: Verdict,
        message: str,
        *,
        total: int = 0,
        passed: int = 0,
        correctness: float = 0.0,
        report: dict[str, Any] | None = None,
    ) -> JudgeResult:
        scored = verdict is not Verdict.INFRA_ERROR
        report = report or {}
        return JudgeResult(
            verdict=verdict,
            reward=self._config.weights.correctness * correctness if scored else None,
            parts={"correctness": correctness} if scored else {},
            tests_passed=passed,
            tests_total=total,
            cpu_s=report.get("cpu_s", 0.0),
            wall_s=report.get("wall_s", 0.0),
            memory_mib=report.get("memory_mib", 0.0),
            isolation=self.isolation,
            message=message.encode("utf-8", "backslashreplace").decode("utf-8")[:500],
        )


# --- the steps of an attempt ---


def _load(session: Session, code: str, outcome: _Outcome) -> None:
    """Compile and load in the guest."""
    reply = values.unpack(session.exchange(values.pack(code)))
    if reply != ["compiled"]:
        outcome.fail(Verdict.COMPILE_ERROR, _raised_text(reply))
        return
    outcome.compiled = True
    reply = values.unpack(session.exchange(values.pack("load")))
    if reply != ["loaded"]:
        _fail_raised(outcome, _raised_text(reply))


def _raised_text(reply: Any) -> str:
    if isinstance(reply, list) and len(reply) == 3 and isinstance(reply[1], str) and isinstance(reply[2], str):
        return f"{reply[1][:80]}: {reply[2][:300]}"
    raise values.ValueRefused("Not a reply.")


def _fail_raised(outcome: _Outcome, text: str) -> None:
    outcome.fail(Verdict.MEMORY_LIMIT if text.startswith("MemoryError") else Verdict.RUNTIME_ERROR, text)


def _run_inline(session: Session, plan: CompiledSuite, outcome: _Outcome, stop_early: bool) -> None:
    """Evaluate each assert here, over values that came from the guest."""

    def proxy(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            encoder = values.Encoder()
            try:
                frame = values.pack(["call", name, encoder.encode(args), encoder.encode(kwargs), False])
            except values.ValueRefused as error:
                raise _SuiteError(str(error)) from None
            body = session.exchange(frame)
            outcome.num_calls += 1
            return values.read_reply(body, values.Decoder())[0]

        return call

    assert plan.inline is not None
    scope = inline_scope(plan, {name: proxy(name) for name in plan.names})
    for code in plan.inline:
        outcome.num_run += 1
        try:
            if eval(code, scope):  # the suite's expression, of allowed nodes and names only
                outcome.num_passed += 1
            else:
                outcome.fail(Verdict.WRONG_ANSWER, f"Test {outcome.num_run} failed.")
        except values.CandidateRaised as raised:
            _fail_raised(outcome, str(raised))
        except _SuiteError as error:
            outcome.infra = str(error)
            return
        except (Ended, WorkerDied, values.ValueRefused):
            raise
        except Exception as error:  # the value does not fit the test (len(None)): a failed test
            outcome.fail(Verdict.WRONG_ANSWER, f"Test {outcome.num_run} failed: {type(error).__name__}.")
        if stop_early and outcome.failed:
            return
    outcome.finished = True


class _SuiteError(Exception):
    """An argument of the suite's own can't be sent."""


def _run_remote(
    session: Session, worker: Worker, plan: CompiledSuite, limits: Limits, outcome: _Outcome, stop_early: bool
) -> None:
    """Run the tests in their own guest and carry its calls to the candidate's; frames pass as bytes, read only at their ends."""
    extra = limits.model_copy(
        update={
            "cpu_s": limits.cpu_s + _TESTS_EXTRA_S,
            "wall_s": limits.wall_limit_s + _TESTS_EXTRA_S,
            "memory_mib": max(limits.memory_mib, _TESTS_MEMORY_MIB),
        }
    )
    tests = worker.open("tests", extra)
    job = {"names": plan.names, "entry_point": plan.entry_point, "kind": plan.kind, "source": plan.source}
    ended = False
    try:
        frame = values.pack(job)
        while True:
            body = tests.exchange(frame)
            message = values.unpack(body)
            frame = b""
            if message[0] == "call":
                try:
                    answer = session.exchange(len(body).to_bytes(4, "big") + body)
                except Ended:
                    ended = True
                    raise
                outcome.num_calls += 1
                frame = len(answer).to_bytes(4, "big") + answer
            elif _note(message, outcome) or (stop_early and outcome.failed):
                return
    except Ended:
        if ended:
            raise
        outcome.infra = "The tests' own process passed its limits or died."
    finally:
        tests.finish()


def _note(message: list[Any], outcome: _Outcome) -> bool:
    """Count one message of the tests; ``True`` when they are done."""
    what, kind, text = message
    if what == "test":
        outcome.num_run += 1
        outcome.num_passed += kind == "ok"
    if kind == "raised":
        _fail_raised(outcome, text)
    elif kind == "refused":
        outcome.fail(Verdict.RUNTIME_ERROR, text)
    elif kind == "suite":
        outcome.infra = outcome.infra or f"The tests failed by themselves: {text}"
    elif kind != "ok":
        outcome.fail(Verdict.WRONG_ANSWER, text or f"Test {outcome.num_run} failed.")
    outcome.finished = what == "done"
    return outcome.finished or bool(outcome.infra)


def _num_oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since boot: tells that from a program that kills itself."""
    try:
        return int(Path("/proc/vmstat").read_text().partition("oom_kill ")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _verdict(outcome: _Outcome, report: dict[str, Any], limits: Limits) -> tuple[Verdict, str]:
    """SANDBOX.md 1.5, from the worker's report first and the guest's words last."""
    number, killed = report["signal"], report["killed"]
    if outcome.infra:
        return Verdict.INFRA_ERROR, outcome.infra
    if outcome.failed and outcome.failed[0] is Verdict.COMPILE_ERROR:
        return outcome.failed
    if number == signal.SIGSYS:
        return Verdict.SECURITY_VIOLATION, "Killed for a forbidden system call."
    if killed == "output":
        return Verdict.OUTPUT_LIMIT, f"More than {limits.output_kib} KiB of output."
    if killed in ("cpu", "wall"):
        return Verdict.TIME_LIMIT, f"The {killed} time limit passed."
    if number == signal.SIGXCPU:
        return Verdict.TIME_LIMIT, "The cpu time limit passed."
    if not killed and number == signal.SIGKILL and report["memory_mib"] >= 0.9 * limits.memory_mib:
        return Verdict.MEMORY_LIMIT, "Killed by the kernel, out of memory."
    if outcome.failed:
        return outcome.failed
    if outcome.finished and outcome.num_run and outcome.num_calls and outcome.num_passed == outcome.num_run:
        return Verdict.ACCEPTED, ""
    if outcome.finished:
        return Verdict.INFRA_ERROR, "The suite ran to its end without testing the candidate."
    if not outcome.compiled:
        return Verdict.COMPILE_ERROR, f"The compiler died (signal {number})."
    if number:
        return Verdict.RUNTIME_ERROR, f"Killed by signal {number}."
    if not killed and report["exit"] == 70:
        return Verdict.RUNTIME_ERROR, "The program's answering process failed."
    return Verdict.RUNTIME_ERROR, f"The program ended without an answer (exit code {report['exit']})."
