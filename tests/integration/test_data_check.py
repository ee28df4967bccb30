"""``forebay data check`` over real sandboxes."""

import json
import subprocess
import sys


def test_tasks_whose_tests_refuse_their_own_solution_are_named(tmp_path):
    tests = {"kind": "asserts", "entry_point": "f", "code": "assert f(1) == 2"}
    tasks = [
        {"task_id": "right", "prompt": "p", "tests": tests, "reference": "def f(x):\n    return x + 1\n"},
        {"task_id": "wrong", "prompt": "p", "tests": {**tests, "solution": "def f(x):\n    return x\n"}},
        {"task_id": "unsolved", "prompt": "p", "tests": tests},
    ]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "data", "check", str(path), "--repeat", "2"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert "1 of 2 solutions are accepted 2 times out of 2; 1 tasks have no solution" in done.stdout
    assert "wrong_answer" in done.stdout
    assert "0/2" in done.stdout
