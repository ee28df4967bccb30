"""Whether a program's output is the expected text."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

from protocol.suites import Compare
from services.reward.compare.matching import close, coarse, unmatched

_WHOLE_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_BLANKS = b" \t\n\r\x0b\x0c"  # what bytes.split() splits at
_NUMBER = re.compile(rb"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MAX_NUMBER_CHARS = 1024  # longer tokens are compared as text only
_MAX_SHOWN_CHARS = 60


def text_problem(output: bytes, expected: str, compare: Compare) -> str:
    """Why ``output`` isn't ``expected``, or "". The rules are in the docstring of ``Compare``.

    Blank is ASCII white space and nothing else; NUL is an ordinary character; an output that isn't UTF-8 is wrong. Counts are compared
    first. A line with a blank at its front is the same line. With ``any_order`` the unit is a line (a token, if ``whitespace`` is
    "tokens"), and empty lines don't count. ``exact`` knows no numbers; there, the end of a line is part of it.
    """
    try:
        text = output.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"The output is not UTF-8 (byte {error.start})."
    wanted = expected.encode("utf-8", "surrogatepass")
    if compare.ignore_case:
        output, wanted = text.casefold().encode("utf-8"), expected.casefold().encode("utf-8", "surrogatepass")
    if output == wanted:
        return ""
    if compare.whitespace == "exact":
        return _exact_problem(output, wanted, compare.any_order)
    if compare.whitespace == "tokens":
        return _tokens_problem(output, wanted, compare)
    return _lines_problem(output, wanted, compare)


def _exact_problem(output: bytes, wanted: bytes, any_order: bool) -> str:
    ours, theirs = _WHOLE_LINE.findall(output), _WHOLE_LINE.findall(wanted)
    if any_order and Counter(ours) == Counter(theirs):
        return ""
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    a, b = (_shown(lines[first]) if first < len(lines) else "nothing" for lines in (ours, theirs))
    return f"Line {first + 1}: {a}, expected {b}."


def _tokens_problem(output: bytes, wanted: bytes, compare: Compare) -> str:
    theirs = wanted.split()
    ours = output.split(None, len(theirs))  # a longer output shows as one token too many, and costs no more than that
    if len(ours) != len(theirs):
        return _count_problem("The output", len(ours), len(theirs), "token")
    if compare.any_order:
        return _shuffled_problem(ours, theirs, compare, "token")
    for number, (token, other) in enumerate(zip(ours, theirs, strict=True), 1):
        if not _same_token(token, other, compare):
            return f"Token {number}: {_shown(token)}, expected {_shown(other)}."
    return ""


def _lines_problem(output: bytes, wanted: bytes, compare: Compare) -> str:
    output, wanted = output.rstrip(_BLANKS), wanted.rstrip(_BLANKS)
    if compare.any_order:
        ours, theirs = ([line for line in text.split(b"\n") if line.strip()] for text in (output, wanted))
        if len(ours) != len(theirs):
            return _count_problem("The output", len(ours), len(theirs), "line")
        return _shuffled_problem(ours, theirs, compare, "line")
    num, num_wanted = (text.count(b"\n") + bool(text) for text in (output, wanted))
    if num != num_wanted:
        return _count_problem("The output", num, num_wanted, "line")
    ours, theirs = output.split(b"\n"), wanted.split(b"\n")
    for number, (line, other) in enumerate(zip(ours, theirs, strict=True), 1):
        if line != other and (problem := _line_problem(f"Line {number}", line, other, compare)):
            return problem
    return ""


def _line_problem(where: str, line: bytes, other: bytes, compare: Compare) -> str:
    theirs = other.split()
    ours = line.split(None, len(theirs))
    if len(ours) != len(theirs):
        return _count_problem(where, len(ours), len(theirs), "token")
    for token, wanted in zip(ours, theirs, strict=True):
        if not _same_token(token, wanted, compare):
            return f"{where}: {_shown(token)}, expected {_shown(wanted)}."
    return ""


def _shuffled_problem(ours: list[bytes], theirs: list[bytes], compare: Compare, unit: str) -> str:
    """Lists of lines or tokens as multisets."""
    if Counter(len(line.split()) for line in ours) != Counter(len(line.split()) for line in theirs):
        return f"The {unit}s of the output have other numbers of tokens than expected."
    left, right = (Counter(b" ".join(line.split()) for line in lines) for lines in (ours, theirs))
    extra, missing = ([line.split() for line in (a - b).elements()] for a, b in ((left, right), (right, left)))
    missed = unmatched(
        sorted(extra, key=lambda line: [_token_key(token, compare) for token in line]),
        sorted(missing, key=lambda line: [_token_key(token, compare) for token in line]),
        lambda line, other: (
            len(line) == len(other) and all(_same_token(a, b, compare) for a, b in zip(line, other, strict=True))
        ),
    )
    return f"No {unit} of the output is {_shown(b' '.join(missed[0]))}." if missed else ""


def _same_token(token: bytes, wanted: bytes, compare: Compare) -> bool:
    if token == wanted:
        return True
    if not (b"." in wanted or b"e" in wanted or b"E" in wanted):
        return False  # before any look at the numbers: an integer is exact, and may have a million digits
    a, b = _number(token), _number(wanted)
    return a is not None and b is not None and close(a, b, compare)


def _number(token: bytes) -> float | None:
    """The number that a token spells in plain decimal (no ``nan``, ``1_000``, ``0x10``), if it is a finite one."""
    if len(token) > _MAX_NUMBER_CHARS or not _NUMBER.fullmatch(token):
        return None
    value = float(token)
    return value if math.isfinite(value) else None


def _token_key(token: bytes, compare: Compare) -> tuple[int, Any]:
    value = _number(token)
    return (1, token) if value is None else (0, coarse(value, compare))


def _count_problem(where: str, num: int, wanted: int, unit: str) -> str:
    if num == wanted + 1 and unit == "token":  # the last "token" may be the whole rest
        return f"{where} has more than the expected {wanted} {unit}{'' if wanted == 1 else 's'}."
    return f"{where} has {num} {unit}{'' if num == 1 else 's'}, expected {wanted}."


def _shown(text: bytes) -> str:
    start = repr(text[: 4 * _MAX_SHOWN_CHARS].decode("utf-8", "backslashreplace")[:_MAX_SHOWN_CHARS])
    return start if len(text) <= _MAX_SHOWN_CHARS else f"{start}... ({len(text)} bytes)"
