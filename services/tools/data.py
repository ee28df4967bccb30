"""``forebay data check``: are the suites of a task file right? And ``forebay data convert``: task files from HumanEval's format, which MBPP is published in too, and from that of APPS, which TACO shares
and LiveCodeBench's harness uses (``input_output``). Each line says by its fields which one it is."""

from __future__ import annotations

import ast
import gzip
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from common.errors import ConfigError
from protocol.suites import CallCase, CallSuite, CheckSuite, StdinCase, StdinSuite
from protocol.tasks import Task, load_tasks
from protocol.verdicts import JudgeResult, Verdict
from services.reward.config import RewardConfig
from services.reward.pool import JudgePool

_AT_ONCE = 64  # tasks whose solutions are being judged

PROMPT = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{stub}\n```"

STDIN_PROMPT = "{question}\n\nRead from standard input and write to standard output. Answer with one whole Python program in one code block."
CALL_PROMPT = "{question}\n\n{starter}Answer with the whole code in one Python code block; it is called as `{name}`."


def convert_line(record: dict[str, Any], name: str) -> Task:
    """One record -> a task, which is called ``name`` if it has no id of its own.

    Raises:
        KeyError: a field is missing.
        ValueError: a field is not what the format says.
    """
    if not isinstance(record, dict):
        raise ValueError("not an object")
    return _from_apps(record, name) if "input_output" in record else _from_humaneval(record)


def _from_apps(record: dict[str, Any], name: str) -> Task:
    """``input_output`` is JSON, or JSON in a string: ``inputs`` and ``outputs`` of equal length, and ``fn_name`` where a function is
    called; else they are standard input and output, as a string or a list of lines."""
    tests = record["input_output"]
    tests = json.loads(tests) if isinstance(tests, str) else tests
    inputs, outputs, function = tests["inputs"], tests["outputs"], tests.get("fn_name")
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    question = str(record["question"] if "question" in record else record["prompt"]).strip()
    if function is None:
        cases = tuple(StdinCase(input=_lines(i), output=_lines(o)) for i, o in zip(inputs, outputs, strict=True))
        prompt, suite = STDIN_PROMPT.format(question=question), StdinSuite(kind="stdin", cases=cases)
    else:
        starter = str(record.get("starter_code") or "").strip()
        starter = f"Start from this code:\n\n```python\n{starter}\n```\n\n" if starter else ""
        prompt = CALL_PROMPT.format(question=question, starter=starter, name=function)
        suite = CallSuite(kind="call", entry_point=function, cases=_calls(inputs, outputs))
    own = next((record[key] for key in ("task_id", "question_id", "problem_id", "id") if key in record), name)
    return Task(task_id=str(own), prompt=prompt, tests=suite, reference=_first_solution(record.get("solutions")))


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) + "\n" if isinstance(value, list) else str(value)


def _calls(inputs: list[Any], outputs: list[Any]) -> tuple[CallCase, ...]:
    """Texts are JSON, one argument a line (LiveCodeBench). Else lists of arguments, and APPS puts most results into a list of one."""
    if isinstance(inputs[0], str):
        inputs = [[json.loads(line) for line in text.split("\n") if line.strip()] for text in inputs]
        outputs = [json.loads(text) for text in outputs]
    elif all(isinstance(output, list) and len(output) == 1 for output in outputs):
        outputs = [output[0] for output in outputs]
    return tuple(CallCase(args=args, expected=value) for args, value in zip(inputs, outputs, strict=True))


def _first_solution(solutions: Any) -> str | None:
    """APPS has a JSON list of programs in a string."""
    if isinstance(solutions, str) and solutions.startswith("["):
        solutions = json.loads(solutions)
    return str(solutions[0]) if isinstance(solutions, list) and solutions else None


def _from_humaneval(record: dict[str, Any]) -> Task:
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
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    tasks.append(convert_line(json.loads(line), f"{source.name.partition('.')[0]}/{number}"))
                    tasks[-1].tests.content_hash  # noqa: B018 (raises for what can't be written as JSON)
    except OSError as error:
        raise ConfigError(f"{source} can't be read: {error}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error).replace("\n", " ")
        raise ConfigError(
            f"{source}:{number} is not in HumanEval's format ({type(error).__name__}: {reason}), nor in that of APPS. A line of the first has "
            "task_id, prompt, entry_point, test and, if there is one, canonical_solution; of the second question or prompt, and "
            'input_output: {"inputs": [...], "outputs": [...], "fn_name": where there is one}.'
        ) from None
    partial = target.with_name(target.name + ".partial")
    partial.write_text("".join(task.model_dump_json(exclude_unset=True) + "\n" for task in tasks), encoding="utf-8")
    partial.rename(target)
    print(f"{len(tasks)} tasks from {source} in {target}")
    return 0


def check(config: RewardConfig, path: Path, *, repeat: int) -> int:
    """Judge every task's own solution ``repeat`` times; prints the tasks whose suite does not accept it each time. 0 when all do, else 1.

    Such a suite is wrong, too strict for its limits, or tosses coins: completions of its task can't be judged by it.

    Raises:
        ConfigError: the task file can't be used.
    """
    if repeat < 1:
        raise ConfigError(f"--repeat must be 1 or more, not {repeat}.")
    tasks = load_tasks(path)
    solved = [task for task in tasks if task.tests.solution]
    table = Table(title=f"{path}: {len(tasks)} tasks, {len(solved)} with a solution; each judged {repeat} times")
    for name in ("task", "accepted", "first other verdict"):
        table.add_column(name)
    bad = 0
    pool = JudgePool(config.model_copy(update={"cache_size": 0}))
    pool.start()
    try:
        for task, results in _judged(pool, solved, repeat):
            others = [result for result in results if result.verdict is not Verdict.ACCEPTED]
            if others:
                bad += 1
                said = f"{others[0].verdict}: {others[0].message}"
                table.add_row(task.task_id, f"{repeat - len(others)}/{repeat}", said)
    finally:
        pool.close()
    if bad:
        Console().print(table)
    unsolved = f"; {len(tasks) - len(solved)} tasks have no solution to judge by" if len(solved) < len(tasks) else ""
    print(f"{len(solved) - bad} of {len(solved)} solutions are accepted {repeat} times out of {repeat}{unsolved}.")
    return 1 if bad else 0


def _judged(pool: JudgePool, tasks: list[Task], repeat: int) -> Iterator[tuple[Task, list[JudgeResult]]]:
    """Results of each task's solution; a bounded number of tasks is under way."""
    for start in range(0, len(tasks), _AT_ONCE):
        waiting = []
        for task in tasks[start : start + _AT_ONCE]:
            code = task.tests.solution or ""
            # Equal code is judged once at a time: comments make the runs different programs.
            mark = {"python": "#", "cpp": "//", "javascript": "//"}[task.tests.language]
            texts = [f"``````{task.tests.language}\n{code}\n{mark} {run}\n``````" for run in range(repeat)]
            waiting.append((task, [pool.submit(text, task.tests) for text in texts]))
        for task, futures in waiting:
            yield task, [future.result() for future in futures]
