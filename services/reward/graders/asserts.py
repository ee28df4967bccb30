"""Asserts: kinds ``asserts`` and ``check``. One process for all of a suite's asserts, as in the reference harnesses.

Plain ones are evaluated here over the values that the candidate's process sends; all others run in a second sandbox, without the
candidate's code, and their calls are carried to the candidate's process from here.
"""

from __future__ import annotations

import reprlib
from typing import Any

from protocol.suites import AssertSuite, CheckSuite, Limits
from protocol.verdicts import Verdict
from services.reward.functions import Functions
from services.reward.graded import Graded, limit_verdict
from services.reward.graders.assert_plans import REPLY, CompiledSuite, inline_scope
from services.reward.lab import Lab
from services.reward.sandbox import values
from services.reward.sandbox.control import Ended
from services.reward.sandbox.streams import Guest

_TESTS_EXTRA_S = 10.0  # the tests' own process gets this on top of the candidate's limits
_TESTS_MEMORY_MIB = 512
_TESTS_FLAVOUR = "full"


class _SuiteError(Exception):
    """An argument of the suite's own can't be sent."""


def grade_asserts(lab: Lab, suite: AssertSuite | CheckSuite, plan: CompiledSuite, code: str, graded: Graded) -> None:
    """All asserts against one process of the candidate's."""
    if plan.inline is None:
        lab.worker(_TESTS_FLAVOUR, "tests")  # before the candidate's clock starts
    functions = lab.functions(code, suite.limits, calls=plan.calls)
    run = _Run(functions, plan, graded)
    try:
        if functions.raised is not None:
            run.raised(functions.raised)
        elif functions.loaded and plan.inline is not None:
            run.inline()
        elif functions.loaded:
            run.remote(lab, suite.limits)
    except Ended:
        pass
    except values.ValueRefused as error:
        graded.add(Verdict.RUNTIME_ERROR, f"The program's answer can't be read: {error}")
    finally:
        report = functions.finish()
    graded.count(report)
    run.decide(report, suite.limits)


class _Run:
    """One pass over the asserts."""

    def __init__(self, functions: Functions, plan: CompiledSuite, graded: Graded) -> None:
        self._functions, self._plan, self._graded = functions, plan, graded
        self._num_calls = 0
        self._replies: list[bytes] = []
        self._answers: list[Any] = []  # in the assert at hand
        self._finished = False

    def raised(self, text: str) -> None:
        """A test, or loading, ended in an exception of the candidate's."""
        memory = text.startswith("MemoryError")
        self._graded.add(Verdict.MEMORY_LIMIT if memory else Verdict.RUNTIME_ERROR, text)

    def decide(self, report: Any, limits: Limits) -> None:
        """Let the end of the candidate's process overrule what its answers said."""
        graded, functions = self._graded, self._functions
        if graded.infra:
            return
        if functions.compile_error is not None:
            graded.fail(Verdict.COMPILE_ERROR, functions.compile_error)
        elif over := limit_verdict(report, limits, overflow=functions.guest.overflow):
            graded.fail(*over)
        elif not functions.loaded and functions.raised is None and not graded.tests:
            if report.signal and report.signal != 9:
                graded.fail(Verdict.RUNTIME_ERROR, f"Killed by signal {report.signal} while it was loaded.")
            graded.fail(Verdict.RUNTIME_ERROR, f"The program ended while it was loaded (exit code {report.exit_code}).")
        elif not self._finished and not graded.over and all(t.verdict is Verdict.ACCEPTED for t in graded.tests):
            ended = f"signal {report.signal}" if report.signal else f"exit code {report.exit_code}"
            graded.add(Verdict.RUNTIME_ERROR, f"The program ended without an answer ({ended}).")
        elif self._finished and self._num_calls:
            graded.total = len(graded.tests)  # loops run an assert more than once, conditions less
        elif self._finished:
            graded.infra, graded.refused = "The suite ran to its end without testing the candidate.", True

    # ---- here ----

    def inline(self) -> None:
        """Evaluate each assert over values that came from the candidate's process."""
        graded, plan = self._graded, self._plan
        assert plan.inline is not None
        scope = inline_scope(plan, {name: self._proxy(name) for name in plan.names})
        scope[REPLY] = self._reply
        for test, text in zip(plan.inline, plan.texts, strict=True):
            self._answers.clear()
            try:
                passed = bool(eval(test, scope))  # the suite's expression, of allowed nodes and names only
                graded.add(*((Verdict.ACCEPTED, "") if passed else (Verdict.WRONG_ANSWER, self._said(text))))
            except values.CandidateRaised as raised:
                self.raised(str(raised))
            except _SuiteError as error:
                graded.infra, graded.refused = str(error), True
                return
            except (Ended, values.ValueRefused):
                raise
            except Exception as error:  # the value does not fit the test (len(None)): a failed test
                graded.add(Verdict.WRONG_ANSWER, f"{self._said(text)} ({type(error).__name__})")
            if graded.over:
                return
        self._finished = True

    def _reply(self, index: int) -> Any:
        """The value of one of the calls that were sent along with the code."""
        while len(self._replies) <= index:
            self._replies.append(self._functions.reply())
            self._num_calls += 1
        return self._noted(values.read_reply(self._replies[index], values.Decoder())[0])

    def _noted(self, value: Any) -> Any:
        self._answers.append(value)
        return value

    def _said(self, text: str) -> str:
        """A failed assert, and what the candidate answered in it."""
        return f"{text}: got {', '.join(reprlib.repr(value) for value in self._answers)}"

    def _proxy(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            encoder = values.Encoder()
            try:
                frame = values.dumps(["call", name, encoder.encode(args), encoder.encode(kwargs), []])
            except values.ValueRefused as error:
                raise _SuiteError(str(error)) from None
            body = self._functions.call(frame)
            self._num_calls += 1
            return self._noted(values.read_reply(body, values.Decoder())[0])

        return call

    # ---- in a sandbox of their own ----

    def remote(self, lab: Lab, limits: Limits) -> None:
        """Run the tests in their own guest and carry its calls to the candidate's; frames pass as bytes, read only at their ends."""
        extra = limits.model_copy(
            update={
                "cpu_s": limits.cpu_s + _TESTS_EXTRA_S,
                "wall_s": limits.wall_limit_s + _TESTS_EXTRA_S,
                "memory_mib": max(limits.memory_mib, _TESTS_MEMORY_MIB),
                "processes": 1,
            }
        )
        worker = lab.worker(_TESTS_FLAVOUR, "tests")
        tests = lab.start_guest(worker, lab.order("tests", extra), merge=True)
        try:
            self._carry(tests)
        finally:
            lab.finish(worker, tests)

    def _carry(self, tests: Guest) -> None:
        plan = self._plan
        job = {"names": plan.names, "entry_point": plan.entry_point, "kind": plan.kind, "source": plan.source}
        tests.send(values.dumps(job))
        while True:
            try:
                body = tests.receive()
            except Ended:
                if not self._num_calls:
                    self._graded.infra = "The tests' own process passed its limits or died."
                    return
                # Not the judge's failure, or a candidate could buy itself one by what it returns.
                self._graded.fail(Verdict.TIME_LIMIT, "The tests did not come to an end with these answers.")
                return
            message = values.unpack(body)
            if message[0] == "call":
                answer = self._functions.call(body)
                self._num_calls += 1
                tests.send(answer)
            elif self._note(message) or self._graded.over:
                return

    def _note(self, message: list[Any]) -> bool:
        """Count one message of the tests; ``True`` when they are done."""
        what, kind, text = message
        if kind == "raised":
            self.raised(text)
        elif kind == "refused":
            self._graded.add(Verdict.RUNTIME_ERROR, text)
        elif kind == "suite":
            self._graded.infra, self._graded.refused = f"The tests failed by themselves: {text}", True
        elif kind != "ok":
            self._graded.add(Verdict.WRONG_ANSWER, text)
        elif what == "test":
            self._graded.add(Verdict.ACCEPTED)
        self._finished = what == "done"
        return self._finished or bool(self._graded.infra)
