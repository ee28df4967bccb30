"""The families of toy tasks: what is asked, the right program, and the bugs that the toy model has picked up.

``{a}`` and ``{b}`` are constants (small ints, or letters for some string families). ``right`` is a function body whose
last line is ``return <expression>``; each of ``wrong`` is a body with one realistic bug. make_tasks.py checks that
every bug fails the asserts of every task it can appear in.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

NUMBERS = tuple(range(2, 10))
LETTERS = tuple("aeionrst")
FIRST_WORDS = (
    *("scale", "shift", "pick", "fold", "trim", "merge", "score", "blend", "mark", "tune"),
    *("load", "fill", "wrap", "rank", "cast", "join", "move", "grade"),
)
SECOND_WORDS = (
    *("item", "value", "point", "row", "part", "cell", "unit", "step", "word", "node"),
    *("data", "level", "field", "slot", "line", "block", "edge", "case"),
)
LEADS = (
    "Write a function {sig} that returns {ask}.",
    "Define {sig} so that it returns {ask}.",
    "Write {sig}. It returns {ask}.",
)


@dataclass(frozen=True)
class Family:
    """One kind of task. ``args`` is the signature; its first name also says what the test inputs are (x, xs, s)."""

    key: str
    args: str
    ask: str
    right: str
    wrong: tuple[str, ...]
    a: tuple[Any, ...] = NUMBERS
    b: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Spec:
    """A family with its constants, function name and wording chosen: one task."""

    family: Family
    name: str
    lead: str
    a: Any
    b: Any

    @property
    def constants(self) -> tuple[str, Any, Any]:
        """What must differ between a training task and a held-out one, whatever the function is called."""
        return (self.family.key, self.a, self.b)

    @property
    def prompt(self) -> str:
        """The user's message."""
        ask = self.family.ask.format(a=self.a, b=self.b)
        return self.lead.format(sig=f"{self.name}({self.family.args})", ask=ask)

    def program(self, body: str, *, a: Any = None) -> str:
        """The function with ``body``; ``a`` replaces the first constant (a bug: a constant that is off by one)."""
        filled = body.format(a=self.a if a is None else a, b=self.b)
        lines = "".join(f"    {line}\n" for line in filled.split("\n"))
        return f"def {self.name}({self.family.args}):\n{lines}"


def choose(family: Family, rng: random.Random) -> Spec:
    """A random task of ``family``. Two constants are never equal: swapping them would not be a bug."""
    name = f"{rng.choice(FIRST_WORDS)}_{rng.choice(SECOND_WORDS)}"
    a = rng.choice(family.a)
    b = rng.choice([value for value in family.b if value != a]) if family.b else None
    return Spec(family, name, rng.choice(LEADS), a, b)


def _line(key: str, args: str, ask: str, right: str, *wrong: str, **constants: tuple[Any, ...]) -> Family:
    """A family whose bodies are one ``return`` line."""
    return Family(key, args, ask, f"return {right}", tuple(f"return {bug}" for bug in wrong), **constants)


_LOOP_SUM = "total = 0\nfor x in xs:\n    if x {op} {{a}}:\n        total += x\nreturn total"
_LOOP_COUNT = "count = 0\nfor x in xs:\n    if x {op} {{a}}:\n        count += {step}\nreturn count"

FAMILIES = (
    # Arithmetic.
    _line("times_plus", "x", "x times {a} plus {b}", "x * {a} + {b}", "x * {a} - {b}", "x * {b} + {a}", b=NUMBERS),
    _line("times_minus", "x", "x times {a} minus {b}", "x * {a} - {b}", "x * {a} + {b}", "x * {b} - {a}", b=NUMBERS),
    _line(
        "plus_times",
        "x",
        "the sum of x and {a}, times {b}",
        "(x + {a}) * {b}",
        "x + {a} * {b}",
        "(x + {b}) * {a}",
        b=NUMBERS,
    ),
    _line("minus", "x", "x minus {a}", "x - {a}", "{a} - x", "x + {a}"),
    _line("square_plus", "x", "the square of x plus {a}", "x * x + {a}", "x * 2 + {a}", "x * x - {a}", a=NUMBERS[1:]),
    _line("remainder", "x", "the remainder of x divided by {a}", "x % {a}", "x // {a}", "x / {a}"),
    _line(
        "weighted",
        "x, y",
        "{a} times x plus {b} times y",
        "{a} * x + {b} * y",
        "{a} * y + {b} * x",
        "{a} * x - {b} * y",
        b=NUMBERS,
    ),
    _line(
        "distance", "x, y", "{a} times the distance of x and y", "{a} * abs(x - y)", "{a} * (x - y)", "{a} * abs(x + y)"
    ),
    # Comparisons and conditionals.
    _line("greater", "x", "whether x is greater than {a}", "x > {a}", "x >= {a}", "x < {a}"),
    _line("at_least", "x", "whether x is at least {a}", "x >= {a}", "x > {a}", "x <= {a}"),
    _line("divisible", "x", "whether x is divisible by {a}", "x % {a} == 0", "x % {a} != 0", "x // {a} == 0"),
    _line("never_below", "x", "x but never less than {a}", "max(x, {a})", "min(x, {a})"),
    _line("never_above", "x", "x but never more than {a}", "min(x, {a})", "max(x, {a})"),
    _line(
        "if_negative",
        "x",
        "{a} if x is negative, else {b}",
        "{a} if x < 0 else {b}",
        "{b} if x < 0 else {a}",
        "{a} if x > 0 else {b}",
        b=NUMBERS,
    ),
    Family(
        "larger",
        "x, y",
        "the larger of x and y, plus {a}",
        "if x > y:\n    return x + {a}\nreturn y + {a}",
        ("if x < y:\n    return x + {a}\nreturn y + {a}",),
    ),
    # Lists.
    Family(
        "sum_above",
        "xs",
        "the sum of the values in xs above {a}",
        _LOOP_SUM.format(op=">"),
        tuple(_LOOP_SUM.format(op=op) for op in (">=", "<")),
    ),
    Family(
        "count_below",
        "xs",
        "how many values in xs are below {a}",
        _LOOP_COUNT.format(op="<", step="1"),
        (_LOOP_COUNT.format(op=">", step="1"), _LOOP_COUNT.format(op="<", step="x")),
    ),
    _line(
        "add_each",
        "xs",
        "xs with {a} added to each value",
        "[x + {a} for x in xs]",
        "[x - {a} for x in xs]",
        "xs + [{a}]",
    ),
    _line(
        "times_each", "xs", "xs with each value times {a}", "[x * {a} for x in xs]", "[x + {a} for x in xs]", "xs * {a}"
    ),
    _line(
        "keep_above",
        "xs",
        "the values in xs above {a}",
        "[x for x in xs if x > {a}]",
        "[x for x in xs if x >= {a}]",
        "[x for x in xs if x < {a}]",
    ),
    _line("first", "xs", "the first {a} values of xs", "xs[:{a}]", "xs[{a}:]", "xs[{a}]", a=NUMBERS[:5]),
    _line("drop", "xs", "xs without its first {a} values", "xs[{a}:]", "xs[:{a}]", "xs[-{a}:]", a=NUMBERS[:5]),
    _line("max_plus", "xs", "the maximum of xs plus {a}", "max(xs) + {a}", "min(xs) + {a}", "max(xs) - {a}"),
    _line("sum_times", "xs", "the sum of xs times {a}", "sum(xs) * {a}", "sum(xs) + {a}", "len(xs) * {a}"),
    # Strings.
    _line("repeat", "s", "s repeated {a} times", "s * {a}", "s + {a}", "s * {a} + s"),
    _line("upper_repeat", "s", "s in upper case, {a} times", "s.upper() * {a}", "s.lower() * {a}", "s * {a}"),
    _line(
        "reverse_add",
        "s",
        's reversed, with "{a}" at the end',
        's[::-1] + "{a}"',
        's + "{a}"',
        '"{a}" + s[::-1]',
        a=LETTERS,
    ),
    _line("count_letter", "s", 'how often "{a}" is in s', 's.count("{a}")', 's.find("{a}")', '"{a}" in s', a=LETTERS),
    _line(
        "starts",
        "s",
        'whether s starts with "{a}"',
        's.startswith("{a}")',
        's.endswith("{a}")',
        '"{a}" in s',
        a=LETTERS,
    ),
    _line(
        "replace",
        "s",
        's with "{a}" in place of "{b}"',
        's.replace("{b}", "{a}")',
        's.replace("{a}", "{b}")',
        a=LETTERS,
        b=LETTERS,
    ),
    _line("first_letters", "s", "the first {a} letters of s", "s[:{a}]", "s[{a}:]", "s[{a}]", a=NUMBERS[:5]),
)
