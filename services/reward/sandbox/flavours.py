"""What a worker has imported before it forks: a program pays nothing for it, but every fork is slower for it."""

from __future__ import annotations

import re

_BARE = ""
_PLAIN = "typing re collections collections.abc functools itertools math heapq bisect string copy operator json"
_FULL = (
    f"{_PLAIN} abc array contextlib dataclasses datetime decimal enum fractions hashlib inspect io random statistics textwrap threading "
    "time traceback types unicodedata"
)
FLAVOURS = {"bare": _BARE, "plain": _PLAIN, "full": _FULL, "numpy": f"{_FULL} numpy", "native": _BARE}
_BUILT_IN = frozenset(
    [
        "sys",
        "os",
        "time",
        "math",
        "builtins",
        "errno",
        "gc",
        "itertools",
        "io",
        "posix",
        "marshal",
        "signal",
        "atexit",
        "__future__",
    ]
)
_IMPORT = re.compile(r"^[ \t]*(?:import[ \t]+([\w., \t]+)|from[ \t]+(\w+))", re.MULTILINE)


def flavour_of(code: str) -> str:
    """The smallest Python flavour that has what ``code`` imports; modules that none has are imported by the program itself."""
    names: set[str] = set()
    for match in _IMPORT.finditer(code):
        names |= {part.split()[0].partition(".")[0] for part in (match[1] or match[2]).split(",") if part.strip()}
    if names <= _BUILT_IN:
        return "bare"
    if names <= _BUILT_IN | set(_PLAIN.split()):
        return "plain"
    return "numpy" if "numpy" in names else "full"
