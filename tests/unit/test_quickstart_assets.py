"""The quickstart's shipped tasks and model: well formed, disjoint, right, and what their makers write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.tasks import Task, load_tasks

QUICKSTART = Path(__file__).parents[2] / "deploy" / "quickstart"
TRAIN, HELDOUT = QUICKSTART / "tasks_train.jsonl", QUICKSTART / "tasks_heldout.jsonl"
MAX_MODEL_BYTES = 8 * 1024 * 1024


@pytest.mark.parametrize(("path", "least"), [(TRAIN, 200), (HELDOUT, 64)])
def test_a_task_file_holds_enough_tasks_and_each_can_be_judged(path: Path, least: int) -> None:
    tasks = load_tasks(path)
    assert len(tasks) >= least
    assert {task.tests.kind for task in tasks} == {"asserts"}
    assert all(f"def {task.tests.entry_point}(" in str(task.reference) for task in tasks)


def test_no_heldout_task_is_a_training_task_under_another_name() -> None:
    def nameless(task: Task) -> str:
        return str(task.reference).replace(task.tests.entry_point, "f")

    train, heldout = load_tasks(TRAIN), load_tasks(HELDOUT)
    assert not {task.task_id for task in train} & {task.task_id for task in heldout}
    assert not {task.prompt for task in train} & {task.prompt for task in heldout}
    assert not {nameless(task) for task in train} & {nameless(task) for task in heldout}


@pytest.mark.parametrize("path", [TRAIN, HELDOUT])
def test_every_reference_passes_its_own_asserts(path: Path) -> None:
    for task in load_tasks(path):
        exec(f"{task.reference}\n{task.tests.code}", {})  # our own programs, from families.py


def test_make_tasks_writes_the_shipped_files_byte_for_byte(tmp_path: Path) -> None:
    command = [sys.executable, "-B", str(QUICKSTART / "make_tasks.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=60)
    for shipped in (TRAIN, HELDOUT):
        assert (tmp_path / shipped.name).read_bytes() == shipped.read_bytes()


def test_the_model_folder_is_small_and_its_tokenizer_ends_a_turn() -> None:
    model = QUICKSTART / "model"
    assert sum(file.stat().st_size for file in model.iterdir()) < MAX_MODEL_BYTES
    config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["eos_token"] == "<|im_end|>"
    assert "add_generation_prompt" in config["chat_template"]
