"""``forebay eval``: how many completions of a checkpoint solve held-out tasks. Same engine, sandbox and settings as a run."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from common.errors import ConfigError
from protocol.messages import Sampling
from protocol.tasks import Task, load_tasks
from protocol.verdicts import JudgeResult
from services.config import Config, model_folder_lacks
from services.reward.pool import JudgePool
from services.rollout.service import make_engine

# A person reads this command's output: the engine's processes say only what went wrong.
_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
    "TQDM_DISABLE": "1",
}


def main(config: Config, models: list[Path], tasks_path: Path, *, num_samples: int) -> int:
    """Print one row a model: mean reward (pass@1 over ``num_samples`` completions a task) and tasks solved at least once.

    Raises:
        ConfigError: a model or the task file can't be used.
    """
    if num_samples < 1:
        raise ConfigError(f"--samples must be 1 or more, not {num_samples}.")
    if config.rollout.engine == "fake":
        raise ConfigError(
            "rollout.engine = fake writes the same text whatever the model is: its solve rate says nothing."
        )
    tasks = load_tasks(tasks_path)
    for model in models:
        if not (model / "config.json").is_file():
            raise ConfigError(f"No Hugging Face checkpoint at {model.resolve()}: config.json is missing.")
        if lacks := model_folder_lacks(model, chats=True):
            raise ConfigError(f"The checkpoint can't be used: {' '.join(lacks)}")
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    table = Table(
        title=f"{len(tasks)} tasks of {tasks_path}, {num_samples} completions each at temperature {config.run.temperature:g}"
    )
    table.add_column("model")
    table.add_column("pass@1", justify="right")
    table.add_column("solved at least once", justify="right")
    for model in models:
        print(f"{model}: loading it, then {len(tasks) * num_samples} completions", flush=True)
        rewards = asyncio.run(_evaluate(config, model, tasks, num_samples))
        solved = sum(max(group) == 1.0 for group in rewards)
        table.add_row(str(model), f"{fmean(fmean(group) for group in rewards):.3f}", f"{solved}/{len(tasks)}")
    Console().print(table)
    return 0


async def _evaluate(config: Config, model: Path, tasks: list[Task], num_samples: int) -> list[list[float]]:
    run = config.run.model_copy(update={"model": model})
    engine = make_engine(run, config.rollout)
    pool = JudgePool(config.reward)
    await asyncio.to_thread(pool.start)
    limit = asyncio.Semaphore(config.rollout.max_concurrent_groups)
    sampling = Sampling(max_tokens=run.max_completion_tokens, temperature=run.temperature)
    in_hand = asyncio.Semaphore(min(4 * config.reward.num_workers, config.reward.max_queue))

    async def judged(text: str, task: Task) -> JudgeResult:
        async with in_hand:
            return await asyncio.wrap_future(pool.submit(text, task.tests))

    async def one(task: Task) -> list[float]:
        async with limit:
            texts = [c.text async for c in engine.generate(task.prompt, range(num_samples), sampling, run.seed)]
        results = await asyncio.gather(*(judged(text, task) for text in texts))
        if broken := [result.message for result in results if result.reward is None]:
            raise ConfigError(f"Task {task.task_id} can't be judged here: {broken[0]}")
        return [result.reward or 0.0 for result in results]

    try:
        await engine.start()
        return await asyncio.gather(*(one(task) for task in tasks))
    finally:
        await engine.close()
        await asyncio.to_thread(pool.close)
