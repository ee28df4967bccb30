"""Whole programs on standard input and output: kinds ``stdin`` and ``checker``. One process a test; compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocol.suites import CheckerSuite, StdinSuite
from protocol.verdicts import Verdict
from services.reward.compare.text import text_problem
from services.reward.functions import Functions
from services.reward.graded import Graded, limit_verdict
from services.reward.lab import Execution, Lab
from services.reward.sandbox import values
from services.reward.sandbox.control import Ended

_CHECKER_EXTRA_S = 10.0  # a checker gets this on top of the candidate's limits
_CHECKER_MEMORY_MIB = 512
# No output makes a checker raise these.
_BUGS = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError")
_EXTRA_OUTPUT_BYTES = 64 << 10


def grade_stdin(lab: Lab, suite: StdinSuite, code: str, graded: Graded) -> None:
    """Compare each output with the expected one, here."""
    runner = _runner(lab, suite, code)
    for index, case in enumerate(suite.cases):
        wanted = len(case.output.encode("utf-8", "surrogatepass"))
        cap = max(suite.limits.output_kib * 1024, 2 * wanted + _EXTRA_OUTPUT_BYTES)
        run = runner(case.input, cap, index + 1 < len(suite.cases))
        if _failed_to_run(suite, run, graded):
            if graded.over:
                return
            continue
        problem = text_problem(run.stdout, case.output, suite.compare)
        graded.add(Verdict.WRONG_ANSWER if problem else Verdict.ACCEPTED, problem, report=run.report)
        if graded.over:
            return


def grade_checker(lab: Lab, suite: CheckerSuite, code: str, graded: Graded) -> None:
    """Let the suite's checker judge each output, in a sandbox of its own that holds no candidate."""
    runner = _runner(lab, suite, code)
    limits = suite.limits.model_copy(
        update={
            "cpu_s": (suite.limits.cpu_s + _CHECKER_EXTRA_S) * len(suite.cases),
            "wall_s": None,
            "memory_mib": max(suite.limits.memory_mib, _CHECKER_MEMORY_MIB),
        }
    )
    checker: Functions | None = None
    try:
        for index, case in enumerate(suite.cases):
            run = runner(case.input, suite.limits.output_kib * 1024, index + 1 < len(suite.cases))
            if not _failed_to_run(suite, run, graded):
                if checker is None:
                    checker = lab.functions(suite.checker, limits, use="tests")
                if not _check(checker, case.input or "", case.answer, run, graded):
                    checker.finish()
                    checker = None
            if graded.over:
                return
    finally:
        if checker is not None:
            checker.finish()


def _runner(lab: Lab, suite: Any, code: str) -> Callable[[str | None, int, bool], Execution]:
    """A function that runs ``code`` once: input, cap of each output (bytes), whether another run follows."""
    if suite.language != "python":
        toolchain = lab.toolchain(suite.language)
        return lambda text, cap, _more: lab.run_native(toolchain, code, suite.limits, _input(text), cap_bytes=cap)
    artifact = b""

    def run(text: str | None, cap: int, more: bool) -> Execution:
        nonlocal artifact
        execution = lab.run_python(code, artifact, suite.limits, _input(text), keep=more, cap_bytes=cap)
        artifact = artifact or execution.artifact
        return execution

    return run


def _input(text: str | None) -> bytes:
    return b"" if text is None else text.encode("utf-8", "surrogatepass")


def _failed_to_run(suite: Any, run: Execution, graded: Graded) -> bool:
    """Count a run that did not come to an output that can be judged."""
    if run.compile_error is not None:
        graded.count(run.report)
        graded.fail(Verdict.COMPILE_ERROR, run.compile_error)
        return True
    report = run.report
    if over := limit_verdict(report, suite.limits, overflow=run.overflow, stderr=run.stderr):
        graded.add(*over, report=report)
        return True
    said = run.stderr.decode("utf-8", "backslashreplace").strip().splitlines()
    last = f": {said[-1]}" if said else "."
    if report.signal:
        graded.add(Verdict.RUNTIME_ERROR, f"Killed by signal {report.signal}{last}", report=report)
        return True
    if report.exit_code and not suite.any_exit_code:
        graded.add(Verdict.RUNTIME_ERROR, f"Exit code {report.exit_code}{last}", report=report)
        return True
    return False


def _check(checker: Functions, given: str, answer: str, run: Execution, graded: Graded) -> bool:
    """One verdict of the checker; its own failure is the suite's. Whether it is there for the next."""
    if not checker.loaded:
        graded.refused = True
        graded.infra = f"The checker can't be loaded: {checker.compile_error or checker.raised or 'it ended'}."
        return True
    arguments = [given, run.stdout.decode("utf-8", "replace"), answer]
    try:
        frame = values.dumps(
            ["call", "check", values.Encoder().encode(tuple(arguments)), values.Encoder().encode({}), []]
        )
        score, _ = values.read_reply(checker.call(frame), values.Decoder())
    except values.CandidateRaised as raised:
        if raised.name in _BUGS:
            graded.infra, graded.refused = f"The checker failed by itself: {raised}", True
        else:
            graded.add(Verdict.WRONG_ANSWER, f"The checker raised {raised}", report=run.report)
        return True
    except values.ValueRefused as error:
        graded.add(Verdict.OUTPUT_LIMIT, f"Too much for the checker: {error}", report=run.report)
        return True
    except Ended:
        # Not the judge's failure, or a candidate could buy itself one; forebay data check finds checkers that are slow.
        graded.add(Verdict.WRONG_ANSWER, "The checker passed its limits on this output.", report=run.report)
        return False
    if isinstance(score, bool):
        score = float(score)
    if not isinstance(score, int | float) or not 0 <= score <= 1:
        graded.refused = True
        graded.infra = f"The checker returned {str(score)[:80]!r}: true, false or a number from 0 to 1 is wanted."
        return True
    passed = score == 1
    graded.add(
        Verdict.ACCEPTED if passed else Verdict.WRONG_ANSWER,
        "" if passed else f"The checker gave {score:g}.",
        score=float(score),
        report=run.report,
    )
    return True
