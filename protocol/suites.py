"""Test suites: how one completion is judged. The public format; ``services/reward/README.md`` documents it for users.

A suite is one of the models below, told apart by ``kind``. Every suite has a language, limits, and options; what the candidate gets to
see of it are the inputs of its tests, and never an expected value.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

Language = Literal["python", "cpp", "javascript"]
MAX_SUITE_BYTES = 256 << 20  # of a suite's JSON: what travels to a reward node, in one frame


class Limits(BaseModel):
    """Limits of one execution: one test of the kinds that start the program anew for each test, all tests together of the others.

    CPU time is what counts. ``wall_s`` is a backstop against programs that sleep: time that they wait for a busy CPU is not counted.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    cpu_s: float = Field(default=2.0, gt=0, le=3600)
    wall_s: float | None = Field(default=None, gt=0, le=7200)  # None: max(3 * cpu_s, cpu_s + 2)
    memory_mib: int = Field(default=512, ge=16, le=65536)
    output_kib: int = Field(default=1024, ge=1, le=65536)  # of each stream; raised where a test expects longer output
    processes: int = Field(default=1, ge=1, le=64)  # at a time, the program's first one included
    stack_mib: int = Field(default=64, ge=1, le=4096)  # of the main thread; recursion beyond it is a runtime_error

    @property
    def wall_limit_s(self) -> float:
        """``wall_s``, or its default."""
        return self.wall_s if self.wall_s is not None else max(3 * self.cpu_s, self.cpu_s + 2)


class Compare(BaseModel):
    """How an answer is compared with what is expected.

    Text: lines, then blank-separated tokens; line ends, trailing blanks and trailing empty lines don't count. A token is compared as
    text, unless the *expected* one has a decimal point or an exponent: then as a number, ``|a - b| <= max(atol, rtol * |b|)``.
    Values: ``bool`` is no number; ``1.0`` equals ``1``; floats by the same tolerance where the expected one is a float; JSON's limits
    are forgiven where the suite came as JSON (a tuple for a list, an int key for its text).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    atol: float = Field(default=1e-6, ge=0)
    rtol: float = Field(default=1e-6, ge=0)
    ignore_case: bool = False
    any_order: bool = False  # lines of a text, or items of a list (not of the lists in it), in any order
    whitespace: Literal["lines", "tokens", "exact"] = "lines"  # tokens: a line break is a blank; exact: byte for byte


class SuiteBase(BaseModel):
    """What every kind has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    language: Language = "python"
    limits: Limits = Limits()
    correctness: Literal["all", "fraction"] | None = None  # None: ``reward.correctness`` of the config
    solution: str | None = None  # a correct program: the measure of the efficiency part. Never leaves the judge

    def to_json(self) -> bytes:
        """All fields as UTF-8 JSON: what travels. ``parse_suite`` makes an equal suite of it.

        Raises:
            ValueError: something in it has no JSON (NaN, an infinity, a lone surrogate, too deep), or it is too big; says where.
        """
        try:
            data = self.model_dump()
        except ValueError:  # pydantic's own limit
            raise ValueError("the suite is nested too deep") from None
        try:
            encoded = _dumps(data)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{_culprit(data)}: {_reason(error)}") from None
        if len(encoded) > MAX_SUITE_BYTES:
            raise ValueError(
                f"the suite is {len(encoded) / 2**20:.0f} MiB of JSON, and at most {MAX_SUITE_BYTES >> 20} MiB travel: "
                "cut tests, or make the big ones in a generator (kind reference)"
            )
        return encoded

    @cached_property
    def content_hash(self) -> str:
        """Name of this suite on the wire and in caches: equal suites, equal names. Raises as ``to_json``."""
        return hash_of(self.to_json())


class _PythonOnly(SuiteBase):
    language: Literal["python"] = "python"


class AssertSuite(_PythonOnly):
    """``code`` is assert statements that call the function by its name."""

    kind: Literal["asserts"] = "asserts"
    entry_point: str = Field(min_length=1)
    code: str = Field(min_length=1)


class CheckSuite(_PythonOnly):
    """``code`` defines ``check(candidate)``, as HumanEval and MBPP do; it is called with the function ``entry_point``."""

    kind: Literal["check"] = "check"
    entry_point: str = Field(min_length=1)
    code: str = Field(min_length=1)


class CallCase(BaseModel):
    """One call. With ``values = "python"`` in the suite, ``args``, ``kwargs`` and ``expected`` are texts of Python literals."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    args: Any = []  # a list
    kwargs: Any = {}  # an object
    expected: Any


class CallSuite(_PythonOnly):
    """Calls with expected values. ``entry_point`` is a function, or a method of ``class Solution`` (a new instance for each test);
    ``"Class.method"`` names another class."""

    kind: Literal["call"] = "call"
    entry_point: str = Field(min_length=1)
    cases: tuple[CallCase, ...] = Field(min_length=1)
    values: Literal["json", "python"] = "json"
    compare: Compare = Compare()
    fresh_process: bool = True  # each test in a process of its own, so that no state goes from one to the next
    await_result: bool = False  # a coroutine that the function returns is awaited; else it is a wrong answer


class StdinCase(BaseModel):
    """One run of the program: these exact bytes (UTF-8) on its standard input; ``null`` is no input."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: str | None = None
    output: str


class StdinSuite(SuiteBase):
    """Whole programs that read standard input and write standard output."""

    kind: Literal["stdin"] = "stdin"
    cases: tuple[StdinCase, ...] = Field(min_length=1)
    compare: Compare = Compare()
    any_exit_code: bool = False  # else an exit code other than 0 is a runtime_error


class CheckerCase(BaseModel):
    """One run that a checker judges. ``answer`` is for the checker alone."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: str | None = None
    answer: str = ""


class CheckerSuite(SuiteBase):
    """Whole programs with more than one right output. ``checker`` is Python that defines ``check(input, output, answer)``: true, false,
    or a share in [0, 1]. It runs in a sandbox of its own, without the candidate."""

    kind: Literal["checker"] = "checker"
    cases: tuple[CheckerCase, ...] = Field(min_length=1)
    checker: str = Field(min_length=1)
    any_exit_code: bool = False


class ReferenceSuite(_PythonOnly):
    """Property test: the candidate's function must agree with ``reference`` on generated arguments.

    ``reference`` is Python that defines ``entry_point``. ``generator`` is Python that defines ``generate(rng)``, which returns the argument
    list of one test from a seeded ``random.Random``. Both run in a sandbox of their own, without the candidate.
    """

    kind: Literal["reference"] = "reference"
    entry_point: str = Field(min_length=1)
    reference: str = Field(min_length=1)
    generator: str = Field(min_length=1)
    num_cases: int = Field(default=20, ge=1, le=10_000)
    seed: int = 0
    compare: Compare = Compare()
    fresh_process: bool = True


class CustomSuite(SuiteBase):
    """A grader of the operator's own, installed under the entry point ``forebay.graders`` and allowed by ``reward.graders``."""

    kind: Literal["custom"] = "custom"
    grader: str = Field(min_length=1)
    params: dict[str, Any] = {}


TestSuite = Annotated[
    AssertSuite | CheckSuite | CallSuite | StdinSuite | CheckerSuite | ReferenceSuite | CustomSuite,
    Field(discriminator="kind"),
]
_ADAPTER: TypeAdapter[TestSuite] = TypeAdapter(TestSuite)


def parse_suite(data: bytes | str | dict[str, Any]) -> TestSuite:
    """A suite from JSON, or from its parsed form.

    Raises:
        ValueError: not a suite, or not one that travels (``to_json``); says where and why.
    """
    try:
        parsed = json.loads(data) if isinstance(data, bytes | str) else data
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    try:
        suite = _ADAPTER.validate_python(parsed)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or "kind"  # the first part is the kind itself
        raise ValueError(f"{where}: {first['msg']}") from None
    suite.content_hash  # noqa: B018 (raises for what does not travel, and is kept for who asks)
    return suite


def hash_of(suite_json: bytes) -> str:
    """``content_hash`` of the suite whose ``to_json`` this is."""
    return hashlib.blake2b(suite_json, digest_size=16).hexdigest()


def _dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _culprit(value: Any) -> str:
    """Path, three parts deep at most, of the first value in a dict that has no JSON."""
    path: list[str] = []
    while len(path) < 3 and isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            try:
                _dumps(item)
            except (ValueError, TypeError, RecursionError):
                path.append(str(key))
                value = item
                break
        else:  # it is a key, not a value
            break
    return ".".join(path).encode(errors="replace").decode() or "the suite"


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return "a lone surrogate is no text, and does not travel"
    if isinstance(error, RecursionError):
        return "nested too deep"
    return "NaN and infinities are no JSON" if "Out of range" in str(error) else str(error)
