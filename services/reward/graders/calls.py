"""Calls with expected values: kind ``call``, and ``reference``, whose expected values a reference implementation gives.

The candidate's process gets arguments and sends values; they are decoded and compared here.
"""

from __future__ import annotations

import ast
import contextlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from protocol.suites import CallSuite, Compare, Limits, ReferenceSuite
from protocol.verdicts import Verdict
from services.reward.compare.values import value_problem
from services.reward.functions import Functions
from services.reward.graded import Graded, limit_verdict
from services.reward.lab import Lab, Refused
from services.reward.sandbox import values
from services.reward.sandbox.control import Ended, Report

_KEPT_BYTES = 64 << 20  # of prepared calls
_GENERATOR_LIMITS = Limits(cpu_s=60, wall_s=300, memory_mib=1024)
_GENERATOR = """
import copy, random
def _module(name, source):
    scope = {{'__name__': name}}
    exec(compile(source, name + '.py', 'exec'), scope)
    return scope
_reference = _module('reference', {reference!r})
_generator = _module('generator', {generator!r})
def case(seed):
    args = _generator['generate'](random.Random(seed))
    return [list(args), _reference[{entry_point!r}](*copy.deepcopy(list(args)))]
"""


@dataclass(frozen=True)
class Case:
    """A call ready to be sent, and what is expected of it."""

    frame: bytes
    expected: Any
    arguments: tuple[Any, ...] = ()  # JSON trees


class Cases:
    """Prepared cases of the last suites, by content hash; bounded by the size of their calls."""

    def __init__(self, max_bytes: int = _KEPT_BYTES) -> None:
        self._kept: OrderedDict[str, tuple[Case, ...]] = OrderedDict()
        self._max_bytes, self._bytes = max_bytes, 0

    def of(self, suite: CallSuite | ReferenceSuite, lab: Lab) -> tuple[Case, ...]:
        """Raises ``Refused`` where the suite can't be prepared."""
        cases = self._kept.get(suite.content_hash)
        if cases is None:
            cases = _call_cases(suite) if isinstance(suite, CallSuite) else _reference_cases(suite, lab)
            self._kept[suite.content_hash] = cases
            self._bytes += _size(cases)
            while self._bytes > self._max_bytes and len(self._kept) > 1:
                self._bytes -= _size(self._kept.popitem(last=False)[1])
        self._kept.move_to_end(suite.content_hash)
        return cases


def _size(cases: tuple[Case, ...]) -> int:
    return sum(len(case.frame) for case in cases)


def grade_calls(
    lab: Lab, suite: CallSuite | ReferenceSuite, cases: tuple[Case, ...], code: str, graded: Graded
) -> None:
    """Call by call, each in a process of its own or all in one."""
    as_json = isinstance(suite, CallSuite) and suite.values == "json"
    artifact = b""
    at_once = suite.fresh_process or not _shows(cases)
    for group in [(case,) for case in cases] if suite.fresh_process else [cases]:
        frames = [case.frame for case in group] if at_once else None
        functions = lab.functions(code, suite.limits, artifact=artifact, keep=len(group) < len(cases), calls=frames)
        found: list[tuple[Verdict, str]] = []
        try:
            for case in group:
                found.append(_answer(functions, case, suite.compare, as_json))
                if graded.stop_early and found[-1][0] is not Verdict.ACCEPTED:
                    break
        except Ended:
            pass
        finally:
            report = functions.finish()
        artifact = functions.artifact
        if _not_compiled(functions, report, suite.limits, graded):
            return
        stopped = bool(found) and graded.stop_early and found[-1][0] is not Verdict.ACCEPTED
        if len(found) < len(group) and not stopped:
            found.append(_ended(report))
        if over := limit_verdict(report, suite.limits, overflow=functions.guest.overflow):
            found[-1] = over
        for verdict, message in found[:-1]:
            graded.add(verdict, message)
        graded.add(*found[-1], report=report)
        if graded.over:
            return


def _shows(cases: tuple[Case, ...]) -> bool:
    """Whether a process that gets all calls at once could read an expected value in a later one."""
    expected = []
    for case in cases:
        with contextlib.suppress(values.ValueRefused):
            expected.append(values.Encoder().encode(case.expected))
    return values.shows_any([tree for case in cases for tree in case.arguments], expected)


def _not_compiled(functions: Functions, report: Report, limits: Limits, graded: Graded) -> bool:
    """Whether there was no code object, which fails the whole."""
    if functions.compiled:
        return False
    graded.count(report)
    if functions.compile_error is None and (over := limit_verdict(report, limits, overflow=False)):
        graded.fail(*over)
    graded.fail(Verdict.COMPILE_ERROR, functions.compile_error or f"The compiler died (signal {report.signal}).")
    return True


def _ended(report: Report) -> tuple[Verdict, str]:
    ended = f"signal {report.signal}" if report.signal else f"exit code {report.exit_code}"
    return Verdict.RUNTIME_ERROR, f"The program ended without an answer ({ended})."


def _answer(functions: Functions, case: Case, compare: Compare, as_json: bool) -> tuple[Verdict, str]:
    """The verdict on one call.

    Raises:
        Ended: the process ended instead of answering.
    """
    if functions.raised is not None:
        return _raised(functions.raised)
    if not functions.loaded:
        raise Ended
    try:
        value, _ = values.read_reply(functions.answer(case.frame), values.Decoder())
    except values.CandidateRaised as raised:
        return _raised(str(raised))
    except values.ValueRefused as error:
        return Verdict.RUNTIME_ERROR, f"The program's answer can't be read: {error}"
    problem = value_problem(value, case.expected, compare, as_json=as_json)
    return (Verdict.WRONG_ANSWER, problem) if problem else (Verdict.ACCEPTED, "")


def _raised(text: str) -> tuple[Verdict, str]:
    return (Verdict.MEMORY_LIMIT if text.startswith("MemoryError") else Verdict.RUNTIME_ERROR), text


def _call_cases(suite: CallSuite) -> tuple[Case, ...]:
    options = ["await"] if suite.await_result else []
    made = []
    for number, case in enumerate(suite.cases, start=1):
        args, kwargs, expected = case.args, case.kwargs, case.expected
        try:
            if suite.values == "python":
                args, kwargs, expected = (_literal(part) for part in (args, kwargs, expected))
            if not isinstance(args, list | tuple) or not isinstance(kwargs, dict):
                raise ValueError("args must be a list and kwargs an object")
            made.append(_case(suite.entry_point, args, kwargs, options, expected))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
            raise Refused(f"Case {number} of the suite can't be used: {error}.") from None
    return tuple(made)


def _literal(part: Any) -> Any:
    return ast.literal_eval(part) if isinstance(part, str) else part


def _case(entry_point: str, args: Any, kwargs: dict[str, Any], options: list[str], expected: Any) -> Case:
    encoder = values.Encoder()
    trees = tuple(encoder.encode(value) for value in (*args, *kwargs.values()))
    return Case(_frame(entry_point, args, kwargs, options), expected, trees)


def _frame(entry_point: str, args: Any, kwargs: dict[str, Any], options: list[str]) -> bytes:
    encoder = values.Encoder()
    return values.dumps(["call", entry_point, encoder.encode(tuple(args)), encoder.encode(kwargs), options])


def _no_object(_number: int, type_name: str) -> Any:
    """No candidate could give this back: it would be wrong for ever."""
    raise values.ValueRefused(f"a {type_name} has no value that can be compared")


def _reference_cases(suite: ReferenceSuite, lab: Lab) -> tuple[Case, ...]:
    """Arguments from the generator and values from the reference, out of a sandbox that holds no candidate."""
    source = _GENERATOR.format(reference=suite.reference, generator=suite.generator, entry_point=suite.entry_point)
    functions = lab.functions(source, _GENERATOR_LIMITS, use="tests")
    try:
        if not functions.loaded:
            raise Refused(f"The suite's reference or generator can't be loaded: {functions.raised or 'it ended'}.")
        made = []
        for index in range(suite.num_cases):
            try:
                reply = functions.call(_frame("case", [suite.seed * 1_000_003 + index], {}, []))
                args, expected = values.read_reply(reply, values.Decoder(_no_object))[0]
                made.append(_case(suite.entry_point, args, {}, [], expected))
            except values.CandidateRaised as raised:
                raise Refused(f"The suite's reference or generator failed in case {index + 1}: {raised}.") from None
            except (Ended, values.ValueRefused, TypeError, ValueError) as error:
                why = str(error) or "it passed its limits or died"
                raise Refused(f"Case {index + 1} of the suite's generator can't be used: {why}.") from None
        return tuple(made)
    finally:
        functions.finish()
