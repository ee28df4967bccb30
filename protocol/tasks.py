"""Tasks: what the policy is asked to write and how it is judged. One JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import ConfigError


class Limits(BaseModel):
    """Limits of one execution. CPU time is what counts; wall time is a backstop against sleeping programs."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    cpu_s: float = Field(default=2.0, gt=0, le=3600)
    wall_s: float = Field(default=8.0, gt=0, le=7200)
    memory_mib: int = Field(default=512, ge=16, le=65536)
    output_kib: int = Field(default=1024, ge=1, le=65536)


class TestSuite(BaseModel):
    """How a completion is judged.

    ``asserts``: ``code`` is assert statements that call the function by its name. ``check``: ``code`` defines
    ``check(candidate)``, as HumanEval and MBPP do, and is called with the function named ``entry_point``.
    """

    __test__ = False  # the name starts with "Test", but pytest has nothing to collect here
    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["asserts", "check"]
    entry_point: str = Field(min_length=1)
    code: str = Field(min_length=1)
    limits: Limits = Limits()


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
                '{"task_id", "prompt", "tests": {"kind", "entry_point", "code"}}; other formats: forebay data convert.'
            ) from None
        if task.task_id in tasks:
            raise ConfigError(f"{path}:{number} repeats the task_id {task.task_id!r}. Ids must be unique in a file.")
        tasks[task.task_id] = task
    if not tasks:
        raise ConfigError(f"The task file {path} holds no task.")
    return list(tasks.values())
