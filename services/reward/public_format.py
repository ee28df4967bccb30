"""The public format: a completion and its tests as one JSON line in, a verdict as one JSON line out. Pure.

In: ``{"id": string or integer, "completion": string, "tests": {"kind": ..., ...}}``. Other fields are ignored; ids may repeat. ``tests`` is a
suite (``protocol/suites.py``; ``services/reward/README.md`` has an example of every kind).

Out, one line for each line in and in the same order::

    {"id", "verdict", "reward", "parts": {name: number},
     "tests": [{"verdict", "score", "cpu_s", "wall_s", "memory_mib", "message"}, ...],
     "cpu_s", "wall_s", "memory_mib", "message", "isolation", "attempt", "trust"}

``protocol/verdicts.py`` says what each field means. A line that can't be judged has the verdict ``infra_error``, the reward ``null``
and a ``message`` that begins with the field at fault; its ``id`` is ``null`` if that could not be read.
"""

from __future__ import annotations

import json
from typing import Any

from protocol.suites import TestSuite, parse_suite
from protocol.verdicts import JudgeResult, Verdict

MAX_LINE_BYTES = 320 << 20  # a suite of the greatest size that travels, and a completion

Id = str | int | None


class LineRefused(ValueError):
    """A line that can't be judged. The text begins with the field at fault; ``line_id`` is what its answer goes by."""

    def __init__(self, line_id: Id, reason: str) -> None:
        super().__init__(reason)
        self.line_id = line_id


_FIELDS = (
    *("verdict", "reward", "parts", "tests", "cpu_s", "wall_s", "memory_mib"),
    *("message", "isolation", "attempt", "trust"),
)


def parse_line(line: bytes) -> tuple[Id, str, TestSuite]:
    """Id, completion and suite of a line.

    Raises:
        LineRefused: the line can't be judged.
    """
    line_id: Id = None
    try:
        record = _record(line)
        line_id = _id(record)
        for name in ("id", "completion", "tests"):
            if name not in record:
                raise ValueError(f"{name}: this field is missing")
        if line_id is None:
            raise ValueError("id: must be a string or an integer")
        return line_id, _completion(record["completion"]), suite_in(record["tests"])
    except ValueError as error:
        raise LineRefused(line_id, str(error)) from None


def suite_in(tests: object) -> TestSuite:
    """The suite in a line's ``tests``.

    Raises:
        ValueError: it is none; says where and why.
    """
    if not isinstance(tests, dict):
        raise ValueError(f"tests: must be an object with a kind, not {type(tests).__name__}")
    try:
        return parse_suite(tests)
    except ValueError as error:
        raise ValueError(f"tests.{error}") from None


def _completion(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"completion: must be a string, not {type(value).__name__}")
    if not _is_text(value):
        raise ValueError("completion: a lone surrogate is no text")
    return value


def id_of(line: bytes) -> Id:
    """The ``id`` that the answer to ``line`` has, whether or not the line can be judged."""
    try:
        return _id(_record(line))
    except ValueError:
        return None


def format_line(line_id: Id, result: JudgeResult) -> bytes:
    """The answer, with its line end."""
    record = result.model_dump(mode="json", include=set(_FIELDS), warnings=False)
    ordered = {"id": line_id, **{name: record[name] for name in _FIELDS}}
    return json.dumps(ordered, ensure_ascii=False).encode(errors="replace") + b"\n"


def refusal(reason: str) -> JudgeResult:
    """The result of a line that can't be judged."""
    return JudgeResult(verdict=Verdict.INFRA_ERROR, message=reason)


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"the line: not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"the line: not JSON ({error.msg} at character {error.pos})") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets in brackets
        raise ValueError(f"the line: not JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"the line: must be an object, not {type(record).__name__}")
    return record


def _id(record: dict[str, Any]) -> Id:
    value = record.get("id")
    if isinstance(value, str) and _is_text(value):
        return value
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
