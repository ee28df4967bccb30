"""Completion text -> the code in it. Pure, linear in the text, and without parsing: parsing is for the sandbox.

The answer is one block, never several joined: the last one that defines the entry point; for whole programs the last one that reads
input, else the last that prints or has a main; else the last block that is labelled with the language, else the last bare one. Without
any fence it is the text itself, if it holds such code. What comes before the tag that ends the model's thinking is no answer.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from protocol.suites import Language

# Bounds on what nobody writes, so that a hostile text costs no more than a long one. Past them text is text.
_MAX_FENCES = 20_000
_MAX_MENTIONS = 1000  # of a name or a tag, that are no definition or no end of thinking
_MAX_PROSE_LINES = 1000
_MAX_PLAIN_LINES = 200_000
_MAX_NESTED = 100  # blocks that may hold blocks, and fences in each of those

_LABELS: dict[Language, re.Pattern[str]] = {
    "python": re.compile(r"(?:i?python|py|pypy)[\d.]*|pycon|python-repl|sage"),
    "cpp": re.compile(r"(?:c\+\+|cpp|g\+\+|gnu\+\+)\d*\w?|cc|cxx|c|hpp|h"),
    "javascript": re.compile(r"javascript|jsx?|node(?:js)?|[mc]js|ecmascript|es\d+"),
}
_NEUTRAL = frozenset({"", "code", "text", "txt", "plain", "plaintext", "solution", "answer", "markdown", "md"})


def extract_code(completion: str, entry_point: str = "", language: Language = "python") -> str | None:
    """The code to judge, or ``None`` when the completion holds none. It ends with a newline.

    ``entry_point`` is a function, a class, a method of any class, or ``"Class.method"``; "" stands for a whole program. Languages other
    than Python have whole programs only.
    """
    text = _after_thinking(completion.replace("\r\n", "\n").replace("\r", "\n"))
    if text is None:
        return None
    rank = _rank_of_definition(entry_point) if entry_point and language == "python" else _PROGRAM_RANKS[language]
    blocks = list(_blocks(text))
    code, value = _best(blocks, language, rank)
    if value <= 0:  # no fence around the code, but there may be fences in a docstring of it
        outside = _without_foreign(text, blocks, language)
        code = _plain(outside, language) if rank(outside) >= _LIKELY else code
    return None if code is None else _without_prompts(code) if language == "python" else code


# --- thinking ---

_CLOSING_TAG = re.compile(r"</(?:think|thinking|thought|reasoning)>|\[/THINK\]")
_OPENING_TAG = re.compile(r"\s{0,100}(?:<(?:think|thinking|thought|reasoning)>|\[THINK\])")
_QUOTES = re.compile(r"[\"`]|(?<!\w)'|'(?!\w)")  # an apostrophe is none


def _after_thinking(text: str) -> str | None:
    """The text after the last closing tag; ``None`` if the text begins with an opening tag that nothing closes.

    The opening tag may be in the prompt. A tag in a comment, or with quotes on both sides of it, is code or quoted text.
    """
    for tag in reversed(deque(_CLOSING_TAG.finditer(text), maxlen=_MAX_MENTIONS)):
        before = text[max(0, tag.start() - 200) : tag.start()].rpartition("\n")[2]
        after = text[tag.end() : tag.end() + 200].partition("\n")[0]
        quoted = _QUOTES.search(before) and _QUOTES.search(after)
        if not quoted and not before.lstrip().startswith(("#", "//")):
            return text[tag.end() :]
    return None if _OPENING_TAG.match(text) else text


# --- blocks ---

# What stands before a fence on its line is looked at afterwards, so that the search can skip to back-ticks. Only the start of
# a run of them is tried: each place in a long run would make the time quadratic.
_FENCE = re.compile(r"(?:```(?<!````)`*+|~~~(?<!~~~~)~*+)([^`~\n]{0,200}+)$", re.MULTILINE)
_BEFORE_FENCE = re.compile(r"[ \t>]*((?:(?:[-*+]|\d{1,3}[.)])[ \t]+){0,2})")


class _Fence(NamedTuple):
    start: int  # of its line
    end: int  # of its line, without the newline
    before: str  # indentation, quote marks, a list's marker
    listed: bool
    marker: str
    label: str


class _Block(NamedTuple):
    label: str
    code: str
    start: int  # in the text, with its fences; 0, 0 of a nested one
    end: int


def _fences(text: str, limit: int) -> Iterator[_Fence]:
    for match in islice(_FENCE.finditer(text), limit):
        before = text[max(0, match.start() - 40) : match.start()].rpartition("\n")[2]
        if len(before) < 40 and (shape := _BEFORE_FENCE.fullmatch(before)):
            marker = text[match.start() : match.start(1)]
            start = match.start() - len(before)
            yield _Fence(start, match.end(), before, bool(shape.group(1)), marker, _label(match.group(1)))


def _label(info: str) -> str:
    """The language that an info string names: of ``python title="x"``, ``{.python .numberLines}``, ``Python:main.py``."""
    return re.split(r"[\s,:;{}(=]+", info.strip().lstrip("{. "), maxsplit=1)[0].lower()


def _blocks(text: str, *, nested: bool = False) -> Iterator[_Block]:
    """The fenced blocks, in order; after one that may hold fenced blocks itself, those."""
    fences = list(_fences(text, _MAX_NESTED if nested else _MAX_FENCES))
    may_nest = not nested and len(fences) <= 2 * _MAX_NESTED
    index = 0
    while index < len(fences):
        opening = fences[index]
        end = _closing(text, fences, index)
        body = text[opening.end + 1 : fences[end].start if end < len(fences) else len(text)]
        if end == len(fences) and body.rstrip().endswith(opening.marker):
            body = body.rstrip()[: -len(opening.marker)]  # the fence is glued to the last line of code
        code = _unindented(body, opening.before)
        left_open = end == len(fences) or bool(fences[end].label)
        stop = opening.end + 1 + len(body) if left_open else fences[end].end
        yield _Block(opening.label, code, *((0, 0) if nested else (opening.start, stop)))
        if may_nest and (len(opening.marker) > 3 or opening.label in ("markdown", "md")):
            yield from _blocks(code, nested=True)
        index = end if left_open else end + 1


def _closing(text: str, fences: list[_Fence], index: int) -> int:
    """Index of the fence that ends the block which ``fences[index]`` opens, or ``len(fences)``.

    That is a bare one, or a labelled one: then the block was left open and the next one begins. Fences in a docstring end nothing.
    """
    opening = fences[index]
    code_from, marks = opening.end, {'"""': 0, "'''": 0}
    resume = 0  # fences before this offset are in a docstring
    for end in range(index + 1, len(fences)):
        fence = fences[end]
        if fence.start < resume or fence.marker[0] != opening.marker[0] or len(fence.marker) < len(opening.marker):
            continue
        for quote in marks:
            marks[quote] += text.count(quote, code_from, fence.start)
        code_from = fence.start
        open_quote = next((quote for quote, count in marks.items() if count % 2), "")
        if open_quote and (after := _docstring_end(text, fences, end, open_quote)):
            resume = after
        elif fence.label or not fence.listed:
            return end
    return len(fences)


def _docstring_end(text: str, fences: list[_Fence], index: int, quote: str) -> int:
    """Where the docstring that ``fences[index]`` may be in ends, or 0: then the odd quote was a literal, and the block ends here.

    A docstring's end comes before the next block of code is opened, but its own examples may be labelled.
    """
    following = fences[index + 1 : index + 20] if not fences[index].label else fences[index + 2 : index + 20]
    limit = next((fence.start for fence in following if fence.label), len(text))
    return text.find(quote, fences[index].end, limit) + 1


def _unindented(body: str, before: str) -> str:
    """The block without what stood before its fence on each line: quote marks, a list's indentation, or a common one."""
    if ">" in before:
        body = re.sub(rf"^(?:[ \t]{{0,3}}> ?){{1,{before.count('>')}}}", "", body, flags=re.MULTILINE)
    first = re.match(r"\s*\n|", body)
    margin = re.compile(r"[ \t]{0,100}").match(body, first.end() if first else 0)
    if margin and margin.group() and not re.search(rf"^(?!{margin.group()})[ \t]*[^ \t\n]", body, re.MULTILINE):
        body = re.sub(rf"^{margin.group()}", "", body, flags=re.MULTILINE)
    elif before and ">" not in before:
        body = re.sub(rf"^[ \t]{{1,{len(before)}}}", "", body, flags=re.MULTILINE)
    return body.rstrip() + "\n"


# --- choice ---

_LIKELY = 2  # ranks from here on are code that fits; below, a block is taken for want of a better one


def _best(blocks: list[_Block], language: Language, rank: Callable[[str], int]) -> tuple[str | None, int]:
    """The last one of those with the highest rank, and that rank: 1 for a labelled one that looks like nothing, 0 for a bare one."""
    best, best_rank = None, -1
    for block in blocks:
        labelled = bool(_LABELS[language].fullmatch(block.label))
        if not block.code.strip() or not (labelled or block.label in _NEUTRAL):
            continue
        value = max(rank(block.code), int(labelled))
        if value >= max(best_rank, 0) and (value > 0 or not block.label):
            best, best_rank = block.code, value
    return best, best_rank


def _rank_of_definition(entry_point: str) -> Callable[[str], int]:
    """3: defines every part of the name; 2: one of them, or assigns the name."""
    names = entry_point.strip().split(".")
    definitions = [re.compile(rf"(?:def|class)[ \t]+{re.escape(name)}\b") for name in names]
    assignment = re.compile(rf"\n{re.escape(names[-1])}[ \t]*(?::[^=\n]{{0,200}})?=(?!=)[ \t]*(lambda\b)?")

    def rank(code: str) -> int:
        found = [_defines(code, definition) for definition in definitions]
        assigned = assignment.search("\n" + code) if len(names) == 1 else None
        if all(found) or (assigned and assigned.group(1)):
            return 3
        return _LIKELY if any(found) or assigned else 0

    return rank


def _defines(code: str, definition: re.Pattern[str]) -> bool:
    for match in islice(definition.finditer(code), _MAX_MENTIONS):
        before = code[max(0, match.start() - 100) : match.start()].rpartition("\n")[2]
        if before.strip() in ("", "async"):
            return True
    return False


def _program_rank(reads: tuple[str, ...], runs: tuple[str, ...]) -> Callable[[str], int]:
    """3: reads input; 2: prints, or has a main. An example run of the program only prints."""
    read, run = (
        [re.compile(pattern) for pattern in patterns] for patterns in (reads, runs)
    )  # each begins with a literal: fast
    return lambda code: 3 if any(p.search(code) for p in read) else _LIKELY if any(p.search(code) for p in run) else 0


_PROGRAM_RANKS: dict[Language, Callable[[str], int]] = {
    "python": _program_rank(
        (r"input\(", r"stdin\b(?!\s{0,8}=[^=])", r"open\(0", r"os\.read\(0"), (r"print\(", r"stdout\b", r"__main__")
    ),
    "cpp": _program_rank((r"main\s{0,8}\(",), (r"#include\b",)),
    "javascript": _program_rank(
        (r"stdin\b", r"readline\b", r"readFileSync\(", r"readSync\(", r"Deno\."), (r"console\.log\(", r"stdout\b")
    ),
}


# --- text without fences ---

_CODE_START: dict[Language, re.Pattern[str]] = {
    "python": re.compile(r"^(?:import |from [\w.]+ import|def |async def |class |@\w|#|>>> |\"\"\"|'''|if __name__|print\(|for \w+ in "
                         r"|[A-Za-z_]\w*\s*(?::[^=\n]*)?=[^=]|[A-Za-z_]\w*\(.*\)$)", re.MULTILINE),
    "cpp": re.compile(r"^(?:#\s*(?:include|define|pragma|if)|//|/\*|using |template\b|(?:int|auto|void|signed) main\b|typedef |struct |class \w+\s*\{)", re.MULTILINE),
    "javascript": re.compile(r"^(?:(?:const|let|var) [\w{\[]|(?:async )?function\b|import\b.*['\"]|class \w+|['\"]use strict|//|/\*|\(|process\."
                             r"|console\.|require\()", re.MULTILINE),
}  # fmt: skip
_PROSE = re.compile(r"(?!(?:import|from|def|class|return|if|for|while|with|try|assert|raise|del|global|print|async|match) ?)"
                    r"[A-Za-z][\w',’-]*,?(?: [\w'’`\"(),;:%/.-]+)+[.:!?]?|(?:[-*•]|\d+\.) .*|\*\*.*|</?[\w-]+>|\[/?[A-Z]+\]")  # fmt: skip


def _plain(text: str, language: Language) -> str | None:
    """Unfenced code without the prose around it: from the first line that begins code, to the last that is not a sentence."""
    if text.count("\n") > _MAX_PLAIN_LINES:
        return text + "\n"
    text = _unindented(text.strip("\n"), "")
    start = _CODE_START[language].search(text)
    if start is None:
        return None
    lines = text[start.start() :].rstrip().split("\n")
    for _ in range(min(_MAX_PROSE_LINES, len(lines) - 1)):
        if lines[-1].strip() and (len(lines[-1]) > 1000 or not _PROSE.fullmatch(lines[-1])):
            break
        lines.pop()
    return "\n".join(lines) + "\n"


def _without_foreign(text: str, blocks: list[_Block], language: Language) -> str:
    """The text without its blocks in other languages."""
    pieces, at = [], 0
    for block in blocks:
        if block.end and block.label not in _NEUTRAL and not _LABELS[language].fullmatch(block.label):
            pieces.append(text[at : block.start])
            at = block.end
    return "".join(pieces) + text[at:]


def _without_prompts(code: str) -> str:
    """An interactive session's input; its output is dropped."""
    if not code.lstrip().startswith(">>>"):
        return code
    return "".join(f"{line[4:]}\n" for line in code.split("\n") if line[:4].rstrip() in (">>>", "..."))
