"""What a grader found: one result a test, and what is true of the whole; and what the limits say of a run. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from protocol.suites import Limits
from protocol.verdicts import TestResult, Verdict
from services.reward.sandbox.control import Report
from services.reward.sandbox.guest import EXIT_MEMORY

MAX_TIME_LIMITS = 3  # a program that was stopped this often has had its time: the tests that are left count as failed


@dataclass
class Graded:
    """Filled by a grader, in the order of the suite. ``total``: number of tests of the suite; what did not run counts as failed."""

    total: int
    stop_early: bool
    attempt: int = 1
    tests: list[TestResult] = field(default_factory=list)
    verdict: Verdict | None = None  # of the whole, where no single test has it (compile_error)
    message: str = ""
    infra: str = ""  # the judge's or the suite's own failure: no verdict on the candidate
    refused: bool = False  # ... that would come again on any other worker
    cpu_s: float = 0.0
    wall_s: float = 0.0
    memory_mib: float = 0.0
    runtime_is_deterministic: bool = True  # a runtime_error that came by an exception, not by a signal
    _num_time_limits: int = 0

    def add(self, verdict: Verdict, message: str = "", *, score: float = 0.0, report: Report | None = None) -> None:
        """One more test, with the report of its run if it had one of its own."""
        score = 1.0 if verdict is Verdict.ACCEPTED else score
        self._num_time_limits += verdict is Verdict.TIME_LIMIT
        message = message.encode("utf-8", "backslashreplace").decode("utf-8")[:500]
        if report is None:
            self.tests.append(TestResult(verdict=verdict, score=score, message=message))
            return
        self.count(report)
        self.tests.append(
            TestResult(
                verdict=verdict,
                score=score,
                message=message,
                cpu_s=report.cpu_s,
                wall_s=report.wall_s,
                memory_mib=report.memory_mib,
            )
        )

    def count(self, report: Report) -> None:
        """What a run used."""
        self.cpu_s += report.cpu_s
        self.wall_s += report.wall_s
        self.memory_mib = max(self.memory_mib, report.memory_mib)
        if report.killed not in ("", "judge") or (report.signal and not report.killed):
            self.runtime_is_deterministic = False

    @property
    def over(self) -> bool:
        """Whether more tests would change nothing, or cost more than they are worth."""
        if self.infra or self.verdict:
            return True
        last = self.tests[-1].verdict if self.tests else Verdict.ACCEPTED
        if self.stop_early and last is not Verdict.ACCEPTED:
            return True
        return self._num_time_limits >= MAX_TIME_LIMITS

    def fail(self, verdict: Verdict, message: str) -> None:
        """The whole fails: nothing (more) can be tested."""
        self.verdict, self.message = self.verdict or verdict, self.message or message

    def outcome(self) -> tuple[Verdict, str]:
        """The verdict on the whole: the first failure in the order of the suite."""
        if self.infra:
            return Verdict.INFRA_ERROR, self.infra
        if self.verdict:
            return self.verdict, self.message
        for number, test in enumerate(self.tests, start=1):
            if test.verdict is not Verdict.ACCEPTED:
                return test.verdict, f"Test {number}: {test.message}" if test.message else f"Test {number} failed."
        if not self.tests or len(self.tests) < self.total:
            return Verdict.INFRA_ERROR, "The suite ran to its end without testing the candidate."
        return Verdict.ACCEPTED, ""


def limit_verdict(report: Report, limits: Limits, *, overflow: bool, stderr: bytes = b"") -> tuple[Verdict, str] | None:
    """What the limits say of a run, in the order of README.md: security, output, memory, time; ``None``: it kept them."""
    if report.signal == signal.SIGSYS:
        return Verdict.SECURITY_VIOLATION, "Killed for a forbidden system call."
    if overflow:
        return Verdict.OUTPUT_LIMIT, "More output than the limit."
    if report.killed == "memory" or report.exit_code == EXIT_MEMORY:
        return Verdict.MEMORY_LIMIT, f"More memory than {limits.memory_mib} MiB."
    if report.signal == signal.SIGKILL and not report.killed and report.memory_mib >= 0.9 * limits.memory_mib:
        return Verdict.MEMORY_LIMIT, "Killed by the kernel, out of memory."
    if report.signal in (signal.SIGABRT, signal.SIGSEGV) and (
        b"std::bad_alloc" in stderr[-4096:] or b"heap out of memory" in stderr[-8192:]
    ):
        return Verdict.MEMORY_LIMIT, f"More memory than {limits.memory_mib} MiB."
    if report.killed in ("cpu", "wall"):
        return Verdict.TIME_LIMIT, f"The {report.killed} time limit passed."
    if report.signal == signal.SIGXCPU:
        return Verdict.TIME_LIMIT, "The cpu time limit passed."
    if report.killed == "processes":
        return Verdict.RUNTIME_ERROR, f"More processes than {limits.processes}."
    return None
