"""Tasks: what the policy is asked to write and how it is judged. One JSON object a line."""

from __future__ import annotations

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
    reference: str | None = None  # a solution, for checks of the task itself; never sent to a rollout node


def load_tasks(path: Path) -> list[Task]:
    """All tasks of a JSONL file, in file order.

    Raises:
        ConfigError: no such file, an empty one, a line that is not a task (with its number), or a repeated ``task_id``.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The task file {path.resolve()} can't be read: {error}.") from None
    tasks: dict[str, Task] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            task = Task.model_validate(json.loads(line))
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{path}:{number} is not JSON ({error.msg} at column {error.colno}). Mend or delete the line."
            ) from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the line"
            raise ConfigError(
                f"{path}:{number} is not a task: {where}: {first['msg']}. A line is "
                '{"task_id", "prompt", "tests": {"kind", ...}} (services/reward/README.md); other formats: forebay data convert.'
            ) from None
        if task.task_id in tasks:
            raise ConfigError(f"{path}:{number} repeats the task_id {task.task_id!r}. Ids must be unique in a file.")
        tasks[task.task_id] = task
    if not tasks:
        raise ConfigError(f"The task file {path} holds no task.")
    return list(tasks.values())
