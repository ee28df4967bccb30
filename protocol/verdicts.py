"""Verdicts: what the judge says of one completion. Data, never an exception."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Verdict(StrEnum):
    """The outcome of judging one completion.

    ``INFRA_ERROR`` is the judge's own failure: it is retried elsewhere and never becomes a reward.
    """

    ACCEPTED = "accepted"
    WRONG_ANSWER = "wrong_answer"
    RUNTIME_ERROR = "runtime_error"
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    COMPILE_ERROR = "compile_error"
    NO_CODE = "no_code"
    SECURITY_VIOLATION = "security_violation"
    INFRA_ERROR = "infra_error"


class TestResult(BaseModel):
    """What one test showed. ``message`` may hold test data: it is for the people who own the suite, and never goes to a policy."""

    __test__ = False  # the name starts with "Test", but pytest has nothing to collect here
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    verdict: Verdict
    score: float = Field(default=0.0, ge=0, le=1)  # 1 passed, 0 failed; a checker may give a share
    cpu_s: float = 0.0
    wall_s: float = 0.0
    memory_mib: float = 0.0
    message: str = ""


class JudgeResult(BaseModel):
    """Verdict and reward of one completion.

    ``reward`` is the weighted mean of ``parts`` in [0, 1], or ``None`` for an infra error. ``message`` is for people and
    never steers anything.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    verdict: Verdict
    reward: float | None = Field(default=None, ge=0, le=1)
    parts: dict[str, float] = {}
    tests_passed: int = 0
    tests_total: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    memory_mib: float = 0.0
    isolation: str = "none"
    message: str = ""
    tests: tuple[TestResult, ...] = ()  # in the suite's order, as far as they ran; at most 1,000 are kept
    attempt: int = 1  # 2 and 3: after infra errors on other workers
    trust: Literal["full", "low"] = "full"  # low: the tests had to run in the candidate's own process
    queue_s: float = 0.0
    judge: str = ""  # version of the judge
    # The same again would come out the same on this node: a verdict may be kept, and an infra_error is for another node to try.
    repeatable: bool = False
