"""``forebay data convert``: HumanEval's format in, a task file out; all or nothing."""

import gzip
import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from protocol.tasks import load_tasks
from services.data import convert

MBPP = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "mbpp_sanitized.jsonl"
RECORD = {
    "task_id": "T/1",
    "prompt": "def add(a, b):\n    '''\n    Add.\n    '''\n",
    "entry_point": "add",
    "canonical_solution": "  return a + b\n",  # indented otherwise than the docstring, as in MBPP
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
}


def test_a_record_becomes_a_task_with_a_reference_that_runs(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps(RECORD) + "\n\n")
    assert convert(tmp_path / "in.jsonl", tmp_path / "out.jsonl") == 0
    (task,) = load_tasks(tmp_path / "out.jsonl")
    assert (task.tests.kind, task.tests.entry_point) == ("check", "add")
    assert "def add(a, b):" in task.prompt
    scope = {}
    exec(task.reference + task.tests.code + "\ncheck(add)", scope)


def test_gzip_is_read(tmp_path):
    with gzip.open(tmp_path / "in.jsonl.gz", "wt") as file:
        file.write(json.dumps(RECORD))
    convert(tmp_path / "in.jsonl.gz", tmp_path / "out.jsonl")
    assert len(load_tasks(tmp_path / "out.jsonl")) == 1


@pytest.mark.parametrize("bad", ["{", '{"task_id": "x"}', "[]"])
def test_a_broken_line_is_named_and_nothing_is_written(tmp_path, bad):
    (tmp_path / "in.jsonl").write_text(json.dumps(RECORD) + "\n" + bad + "\n")
    with pytest.raises(ConfigError, match=r"in\.jsonl:2 is not in HumanEval's format"):
        convert(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.skipif(not MBPP.exists(), reason=f"no {MBPP}: the MBPP file is not in this checkout")
def test_all_of_mbpp_is_converted_with_references(tmp_path):
    convert(MBPP, tmp_path / "mbpp.jsonl")
    tasks = load_tasks(tmp_path / "mbpp.jsonl")
    assert len(tasks) == 427
    assert all(task.reference for task in tasks)
