"""``forebay data convert``: HumanEval's format in, a task file out; all or nothing."""

import gzip
import json
from pathlib import Path

import pytest

from common.errors import ConfigError
from protocol.tasks import load_tasks
from services.tools.data import convert

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


STDIN = {"question": "Add.", "input_output": {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]}}
CALL = {"prompt": "Add.", "input_output": {"inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]], "fn_name": "add"}}


def converted(tmp_path, *records):
    (tmp_path / "apps.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    convert(tmp_path / "apps.jsonl", tmp_path / "out.jsonl")
    return load_tasks(tmp_path / "out.jsonl")


def as_text(record, **more):
    return record | {"input_output": json.dumps(record["input_output"])} | more


def test_whole_programs_of_apps_become_stdin_suites(tmp_path):
    solutions = json.dumps(["print(sum(map(int, open(0).read().split())))", "worse"])
    plain, text = converted(tmp_path, STDIN, as_text(STDIN, problem_id=7, solutions=solutions))
    assert [plain.task_id, text.task_id] == ["apps/1", "7"]
    assert plain.tests.kind == "stdin"
    assert [(case.input, case.output) for case in plain.tests.cases] == [("1 2\n", "3\n"), ("3\n4\n", "7\n")]
    assert text.tests.cases == plain.tests.cases
    assert "standard input" in plain.prompt
    assert text.tests.solution.startswith("print(sum")


def test_functions_of_apps_become_call_suites(tmp_path):
    starter = "class Solution:\n    def add(self, a, b):"
    plain, text = converted(tmp_path, CALL, as_text(CALL, starter_code=starter))
    for task in (plain, text):
        assert (task.tests.kind, task.tests.entry_point) == ("call", "add")
        assert [(case.args, case.expected) for case in task.tests.cases] == [([1, 2], 3), ([3, 4], 7)]
    assert starter in text.prompt
    assert "`add`" in plain.prompt


def test_results_that_are_lists_stay_lists(tmp_path):
    record = {"prompt": "p", "input_output": {"inputs": [[1], [2]], "outputs": [[1], [1, 2]], "fn_name": "f"}}
    (task,) = converted(tmp_path, record)
    assert [case.expected for case in task.tests.cases] == [[1], [1, 2]]


def test_arguments_of_livecodebench_are_json_one_a_line(tmp_path):
    tests = {"inputs": ['[1, 2]\n"x"', '[]\n""'], "outputs": ["true", "[1]"], "fn_name": "f"}
    (task,) = converted(tmp_path, {"question": "q", "input_output": json.dumps(tests)})
    assert [(case.args, case.expected) for case in task.tests.cases] == [([[1, 2], "x"], True), ([[], ""], [1])]


@pytest.mark.parametrize(
    "changes",
    [
        {"input_output": "{"},
        {"input_output": []},
        {"input_output": {"inputs": ["1"], "outputs": []}},
        {"input_output": {"inputs": [], "outputs": []}},
        {"input_output": {"inputs": [float("nan")], "outputs": [1], "fn_name": "f"}},
        {"input_output": {"inputs": [[float("nan")]], "outputs": [1], "fn_name": "f"}},
    ],
)
def test_a_broken_line_of_apps_is_named(tmp_path, changes):
    with pytest.raises(ConfigError, match=r"apps\.jsonl:2 is not in HumanEval's format .* nor in that of APPS"):
        converted(tmp_path, STDIN, STDIN | changes)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.skipif(not MBPP.exists(), reason=f"no {MBPP}: the MBPP file is not in this checkout")
def test_all_of_mbpp_is_converted_with_references(tmp_path):
    convert(MBPP, tmp_path / "mbpp.jsonl")
    tasks = load_tasks(tmp_path / "mbpp.jsonl")
    assert len(tasks) == 427
    assert all(task.reference for task in tasks)
