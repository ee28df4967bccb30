"""The judge in tests: one by level, "add two numbers" as a suite of each kind, and what must be true after every job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from protocol.suites import TestSuite, parse_suite
from protocol.verdicts import JudgeResult, Verdict
from services.reward.config import RewardConfig
from services.reward.judge import Judge
from services.reward.languages import Toolchains
from services.reward.sandbox.flavours import flavour_of

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
LEVELS = ("namespaces", "landlock")
VERDICTS = {
    "AC": Verdict.ACCEPTED,
    "WA": Verdict.WRONG_ANSWER,
    "RE": Verdict.RUNTIME_ERROR,
    "TLE": Verdict.TIME_LIMIT,
    "MLE": Verdict.MEMORY_LIMIT,
    "OLE": Verdict.OUTPUT_LIMIT,
    "CE": Verdict.COMPILE_ERROR,
    "SV": Verdict.SECURITY_VIOLATION,
    "NC": Verdict.NO_CODE,
    "IE": Verdict.INFRA_ERROR,
}
LIMITS = {"cpu_s": 0.5, "wall_s": 2.0, "memory_mib": 128, "output_kib": 64}
OVERSHOOT_S = 0.3  # of a CPU limit; generous, SANDBOX 1.9 wants 0.1

# --- "add two numbers" ---

GOOD = "def f(a, b):\n    return a + b\n"
_PAIRS = ((1, 2), (40, 2), (918273645, 7))
_LOOP = f"def check(candidate):\n    for a, b in {_PAIRS}:\n        assert candidate(a, b) == a + b\n"
SUITES: dict[str, dict[str, Any]] = {
    "inline": {
        "kind": "asserts",
        "entry_point": "f",
        "code": "\n".join(f"assert f({a}, {b}) == {a + b}" for a, b in _PAIRS),
    },
    "remote": {"kind": "check", "entry_point": "f", "code": _LOOP},
    "call": {
        "kind": "call",
        "entry_point": "f",
        "cases": [{"args": [a, b], "expected": a + b} for a, b in _PAIRS],
    },
    "reference": {
        "kind": "reference",
        "entry_point": "f",
        "reference": GOOD,
        "generator": "def generate(rng):\n    return [rng.randrange(10**9), rng.randrange(1, 9)]",
        "num_cases": 3,
    },
    "stdin": {"kind": "stdin", "cases": [{"input": f"{a} {b}\n", "output": f"{a + b}\n"} for a, b in _PAIRS]},
    "checker": {
        "kind": "checker",
        "checker": "def check(given, output, answer):\n    return int(output) == sum(map(int, given.split()))",
        "cases": [{"input": f"{a} {b}\n"} for a, b in _PAIRS],
    },
}
KINDS = ("inline", "remote", "call", "stdin", "checker")
TEXT_KINDS = ("stdin", "checker")
_MAIN = "\na, b = map(int, input().split())\nprint(f(a, b))\n"
_CPP_HONEST = "#include <iostream>\nint main() { long long a, b; std::cin >> a >> b; std::cout << a + b; }"
_JS_HONEST = "const t = require('fs').readFileSync(0, 'utf8').split(' ');\nconsole.log(Number(t[0]) + Number(t[1]));"
HONEST_NATIVE = {"cpp": _CPP_HONEST, "javascript": _JS_HONEST}


_TOOLCHAINS = Toolchains()  # of this machine: looked up before a test can take PATH away


def needs_toolchain(language: str) -> None:
    """Skip the test where the language can't be judged; in CI that is a failure."""
    if language in ("cpp", "javascript") and _TOOLCHAINS.get(language) is None:
        reason = f"no toolchain for {language}: {Toolchains.wanted(language)} is not installed"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


def suite_of(kind: str, **more: Any) -> TestSuite:
    """ "Add two numbers" as a suite of this kind, under small limits; ``more`` are fields, and ``limits`` are merged."""
    limits = LIMITS | more.pop("limits", {})
    return parse_suite(SUITES[kind] | {"limits": limits} | more)


def call_suite(*cases: Any, entry_point: str = "f", **more: Any) -> TestSuite:
    """Cases are pairs (args, expected)."""
    made = [{"args": args, "expected": expected} for args, expected in cases]
    return parse_suite({"kind": "call", "entry_point": entry_point, "cases": made} | more)


def stdin_suite(*cases: tuple[str | None, str], **more: Any) -> TestSuite:
    """Cases are pairs (input, expected output)."""
    return parse_suite({"kind": "stdin", "cases": [{"input": i, "output": o} for i, o in cases]} | more)


def program_of(kind: str, code: str) -> str:
    """A completion for that suite from code that defines ``f(a, b)``: a whole program, where the kind wants one."""
    return fenced(code + _MAIN if kind in TEXT_KINDS else code)


def fenced(code: str, language: str = "python") -> str:
    needs_toolchain({"py": "python", "js": "javascript", "c++": "cpp"}.get(language, language))
    return f"````{language}\n{code}\n````"


# A docstring is enough for ``flavour_of``; so an honest job can be sent to the worker that just ran an attack.
_IMPORTS = {"bare": "import os", "plain": "import math", "full": "import threading", "numpy": "import numpy"}
_HONEST = '''"""
{imports}
"""
import builtins, os, signal, sys
def f(a, b):
    import math
    left = os.listdir() + os.listdir(os.environ["TMPDIR"])
    state = [len is builtins.len, sum([1, 2]) == 3, math.sqrt(4) == 2, "X" not in os.environ, "leak" not in sys.modules]
    state += [signal.getsignal(signal.SIGALRM) is signal.SIG_DFL, os.umask(0o22) == 0o22, signal.getitimer(0) == (0, 0)]
    return a + b if not left and all(state) else f"{{left}} {{state}}"
'''


def honest_after(code: str) -> str:
    """An honest program that runs on the worker where ``code`` ran, and fails if anything was left to it."""
    return _HONEST.format(imports=_IMPORTS[flavour_of(code)])


def assert_clean(judge: Judge, kind: str, code: str = "") -> None:
    """The next honest job on the same worker is accepted, in an empty box, and no process is left."""
    result = judge.judge(program_of(kind, honest_after(code)), suite_of(kind))
    assert result.verdict is Verdict.ACCEPTED, result
    assert guests_of(judge) == []


def guests_of(judge: Judge) -> list[int]:
    """Host pids of processes below the judge's workers that are none of the workers' own."""
    found = []
    for worker in judge.lab._workers.values():
        inits = children_of(worker.pid) if worker.level == "namespaces" else [worker.pid]
        assert len(inits) == 1
        found += children_of(inits[0])
    return found


def children_of(pid: int) -> list[int]:
    """As the kernel lists them, of all threads; zombies too."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(word) for word in path.read_text().split()]
    return found


def descendants_of(pid: int) -> list[int]:
    found, queue = [], [pid]
    while queue:
        below = children_of(queue.pop())
        found += below
        queue += below
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def verdict_of(judge: Judge, completion: str, suite: TestSuite | dict[str, Any]) -> str:
    """The verdict's short name."""
    return short(judge.judge(completion, parse_suite(suite) if isinstance(suite, dict) else suite))


def program(judge: Judge, code: str, text: str | None, output: str, **more: Any) -> str:
    """The verdict's short name on a whole program, by its output for one input; ``more`` are fields of the suite."""
    return verdict_of(judge, fenced(code), stdin_suite((text, output), **more))


def function(judge: Judge, code: str, *cases: Any, **more: Any) -> str:
    """The verdict's short name on a function ``f``, by pairs (args, expected); ``more`` are fields of the suite."""
    return verdict_of(judge, fenced(code), call_suite(*cases, **more))


def short(result: JudgeResult) -> str:
    return next(name for name, verdict in VERDICTS.items() if verdict is result.verdict)


@contextmanager
def judge_at(level: str, **config: Any) -> Iterator[Judge]:
    """A judge at one level of isolation; the test is skipped where that does not work."""
    judge = Judge(RewardConfig(**config), levels=(level,))  # type: ignore[arg-type]
    try:
        judge.start()
    except ConfigError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(f"this machine has no isolation by {level}: {error}")
    try:
        yield judge
    finally:
        judge.close()
