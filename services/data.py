"""``forebay data convert``: task files from HumanEval's format, which MBPP is published in too."""

from __future__ import annotations

import ast
import gzip
import json
import re
import warnings
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from protocol.suites import CheckSuite
from protocol.tasks import Task

PROMPT = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{stub}\n```"


def convert_line(record: dict[str, Any]) -> Task:
    """One HumanEval record -> a task.

    Raises:
        KeyError: a field is missing.
    """
    return Task(
        task_id=record["task_id"],
        prompt=PROMPT.format(stub=record["prompt"].strip()),
        tests=CheckSuite(kind="check", entry_point=record["entry_point"], code=record["test"]),
        reference=_reference(record["prompt"], record.get("canonical_solution", "")),
    )


def _reference(prompt: str, solution: str) -> str | None:
    """The whole reference solution. MBPP indents it otherwise than the docstring before it, which then has to go."""
    without_docstring = re.sub(r"^ *('''|\"\"\").*?\1 *\n", "", prompt, flags=re.DOTALL | re.MULTILINE)
    for code in (prompt + solution, without_docstring + solution):
        with warnings.catch_warnings(action="ignore"):  # of the references' own escapes
            try:
                ast.parse(code)
            except SyntaxError:
                continue
        return code if solution else None
    return None


def convert(source: Path, target: Path) -> int:
    """Read ``source`` (JSONL or JSONL.gz), write ``target``; prints how many. All or nothing.

    Raises:
        ConfigError: the source can't be read, or a line is not of the format (with its number).
    """
    tasks: list[Task] = []
    number = 0
    try:
        with gzip.open(source, "rt") if source.suffix == ".gz" else source.open() as lines:
            for number, line in enumerate(lines, start=1):  # noqa: B007 (the error says it)
                if line.strip():
                    tasks.append(convert_line(json.loads(line)))
    except OSError as error:
        raise ConfigError(f"{source} can't be read: {error}.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{source}:{number} is not in HumanEval's format ({type(error).__name__}: {error}). A line has task_id, prompt, "
            "entry_point, test and, if there is one, canonical_solution."
        ) from None
    partial = target.with_name(target.name + ".partial")
    partial.write_text("".join(task.model_dump_json(exclude_unset=True) + "\n" for task in tasks), encoding="utf-8")
    partial.rename(target)
    print(f"{len(tasks)} tasks from {source} in {target}")
    return 0
