"""Completion text -> the code in it. Pure, linear in the text, and without parsing: parsing is for the sandbox.

The answer is the last Python block that defines the entry point; else the last Python block; else, without any fence, the
text itself if it defines the entry point. Text before a closing ``</think>`` is not an answer.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

_FENCE = re.compile(r"^([ \t>]*(?:[-*+][ \t]+|\d{1,3}[.)][ \t]+)?)(`{3,}|~{3,})[ \t]*([^`\n]*)$")
_CLOSED_THINKING = re.compile(r"(?<![\"'])</think(?:ing)?>(?![\"'`])")
_OPEN_THINKING = re.compile(r"\s*<think(?:ing)?>")
_PYTHON_LABELS = frozenset(
    {"", "python", "py", "python2", "python3", "py3", "ipython", "python-repl", "pycon", "code", "sage"}
)
_CODE_START = re.compile(
    r"^(?:import |from [\w.]+ import|def |async def |class |@\w|#|\"\"\"|'''|[A-Za-z_]\w*\s*(?::[^=]*)?=[^=])"
)
_PROSE = re.compile(r"^(?!(?:import|from|def|class|return|if|for|while|with|try|assert|raise|del|global|print|async|match) ?)"
                    r"[A-Za-z][\w',’-]*,?(?: [\w'’`\"(),;:%/.-]+)+[.:!?]?$")  # fmt: skip
_TRIPLE = re.compile(r'"""|\'\'\'')


@dataclass(frozen=True)
class _Block:
    label: str
    code: str


def extract_code(completion: str, entry_point: str) -> str | None:
    """The code to judge, or ``None`` when the completion holds none."""
    text = completion.replace("\r\n", "\n").replace("\r", "\n")
    ends = list(_CLOSED_THINKING.finditer(text))
    if ends:
        text = text[ends[-1].end() :]
    elif _OPEN_THINKING.match(text):
        return None  # it never stopped thinking
    defines = re.compile(
        rf"^[ \t]*(?:async[ \t]+def|def|class)[ \t]+{re.escape(entry_point)}\b|^{re.escape(entry_point)}[ \t]*(?::[^=\n]*)?=",
        re.MULTILINE,
    )
    blocks = [block for block in _blocks(text) if block.label in _PYTHON_LABELS and block.code.strip()]
    for block in reversed(blocks):
        if defines.search(block.code):
            return block.code
    if blocks:
        return blocks[-1].code
    return _plain(text) if defines.search(text) else None


def _blocks(text: str) -> list[_Block]:
    lines = text.split("\n")
    found: list[_Block] = []
    index = 0
    while index < len(lines):
        opening = _FENCE.match(lines[index]) if len(lines[index]) < 400 else None
        if opening is None:
            index += 1
            continue
        marker, label = opening.group(2), _label(opening.group(3))
        end = _closing(lines, index + 1, marker, docstrings=label in _PYTHON_LABELS)
        found.append(_Block(label, _dedent(lines[index + 1 : end], len(opening.group(1)))))
        index = end + 1
    return found


def _label(info: str) -> str:
    words = info.strip().strip("{}").split()
    return words[0].lstrip(".").rstrip(":,").lower() if words else ""


def _closing(lines: list[str], start: int, marker: str, *, docstrings: bool) -> int:
    """Index of the closing fence, or of the end. A fence inside a docstring closes nothing, unless that leaves nothing to close."""
    quote, first = "", -1
    for index in range(start, len(lines)):
        line = lines[index]
        bare = line.strip(" \t>")
        if len(bare) >= len(marker) and bare == marker[0] * len(bare):
            if not quote or not docstrings:
                return index
            first = index if first < 0 else first
        for match in _TRIPLE.finditer(line):
            if not quote:
                quote = match.group()
            elif quote == match.group():
                quote = ""
    return first if first >= 0 else len(lines)


def _dedent(lines: list[str], indent: int) -> str:
    """The block without the indentation of its fence (a list item) or a common one."""
    if indent and any(line.startswith(">") for line in lines):
        lines = [line.lstrip(">")[1:] if line.lstrip(">")[:1] == " " else line.lstrip(">") for line in lines]
    return textwrap.dedent("\n".join(lines)) + "\n"


def _plain(text: str) -> str:
    """Unfenced code without the prose around it: from the first line that begins code, to the last that is not a sentence."""
    lines = textwrap.dedent(text).split("\n")
    start = next((index for index, line in enumerate(lines) if _CODE_START.match(line)), 0)
    end = len(lines)
    while end > start + 1 and (
        not lines[end - 1].strip() or (len(lines[end - 1]) < 1000 and _PROSE.match(lines[end - 1]))
    ):
        end -= 1
    return "\n".join(lines[start:end]) + "\n"
