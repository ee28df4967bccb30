"""Tasks: what the policy is asked to write and how it is judged. One JSON object a line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import ConfigError
from protocol.suites import TestSuite


class Task(BaseModel):
    """One task. ``prompt`` is the user's message; the rollout node renders it with the model's chat template."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task_id: str = Field(min_length=1)
    prompt: str = Field(min_length=1)
    tests: TestSuite
    reference: str | None = (
        None  # a solution; becomes ``tests.solution`` where that is missing. Never sent to a rollout node
    )


def load_tasks(path: Path) -> list[Task]:
    """All tasks of a JSONL file, in file order.

    Raises:
        ConfigError: no such file, an empty one, a line that is not a task or does not travel (with its number), or a
            repeated ``task_id``.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"The task file {path.resolve()} can't be read: {why}.") from None
    tasks: dict[str, Task] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            task = _with_solution(Task.model_validate(json.loads(line)))
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{path}:{number} is not JSON ({error.msg} at column {error.colno}). Mend or delete the line."
            ) from None
        except RecursionError:
            raise ConfigError(f"{path}:{number} is nested too deep. Mend or delete the line.") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the line"
            raise ConfigError(
                f"{path}:{number} is not a task: {where}: {first['msg']}. A line is "
                '{"task_id", "prompt", "tests": {"kind", ...}} (services/reward/README.md); other formats: forebay data convert.'
            ) from None
        try:
            task.tests.content_hash  # noqa: B018 (raises for what can't travel, before anything starts; it is kept)
        except ValueError as error:
            raise ConfigError(
                f"{path}:{number}: task {task.task_id!r} can't be sent to a node: tests.{error}."
            ) from None
        if task.task_id in tasks:
            raise ConfigError(f"{path}:{number} repeats the task_id {task.task_id!r}. Ids must be unique in a file.")
        tasks[task.task_id] = task
    if not tasks:
        raise ConfigError(f"The task file {path} holds no task.")
    return list(tasks.values())


def _with_solution(task: Task) -> Task:
    if task.reference is None or task.tests.solution is not None:
        return task
    return task.model_copy(update={"tests": task.tests.model_copy(update={"solution": task.reference})})


def fingerprint(tasks: list[Task]) -> str:
    """Name of the content of a task list: a run's cursor counts in it, so it must stay the same."""
    digest = hashlib.blake2b(digest_size=16)
    for task in tasks:
        digest.update(json.dumps([task.task_id, task.prompt, task.tests.content_hash]).encode())
    return digest.hexdigest()
