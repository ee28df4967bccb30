"""``forebay judge`` and ``forebay reward --once`` as a user has them: the real judge, real files, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from loop_harness import ROOT

SUITE = {"kind": "asserts", "entry_point": "f", "code": "assert f(1) == 1\nassert f(2) == 2"}
GOOD = "Here it is.\n```python\ndef f(x):\n    return x\n```\n"
BAD = GOOD.replace("return x", "return 1")
FOREBAY = [sys.executable, "-m", "services.cli"]


def forebay(*words, **kwargs):
    return subprocess.run([*FOREBAY, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=300, **kwargs)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps(SUITE))
    (tmp_path / "good.md").write_text(GOOD)
    (tmp_path / "bad.py").write_text("def f(x):\n    return 1  # a line with ``` in it\n")
    return tmp_path


def assert_refused(done, *words):
    """A paragraph and the exit code of bad input."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


# ---- forebay judge ----


def test_a_right_completion_is_explained_and_ends_with_0(folder):
    done = forebay("judge", folder / "good.md", "--tests", folder / "t.json")
    assert done.returncode == 0, done.stderr
    for words in ("accepted", "passed every test", "1.000", "2 of 2 passed", "The code (2 lines)", "def f(x):"):
        assert words in done.stdout


def test_a_wrong_program_is_explained_and_ends_with_1(folder):
    done = forebay("judge", folder / "bad.py", "--tests", folder / "t.json")
    assert done.returncode == 1, done.stderr
    assert "wrong_answer" in done.stdout
    assert "return 1  # a line with ``` in it" in done.stdout


def test_json_has_all_of_it_and_stdin_is_a_completion(folder):
    done = forebay("judge", "-", "--tests", folder / "t.json", "--json", input=BAD)
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["verdict"], answer["reward"]) == ("wrong_answer", 0.0)
    assert "return 1" in answer["code"]
    assert "not the expected one" in answer["meaning"]


def test_settings_come_from_the_command_line_and_from_a_file_with_one_section(folder):
    (folder / "good.md").write_text(GOOD + "x" * 2000)
    (folder / "c.toml").write_text("[run]\nseed = 'anything'\n[reward]\nmax_completion_kib = 1\n")
    words = ("judge", folder / "good.md", "--tests", folder / "t.json", "--json")
    for more in ([], ["--set", "reward.max_completion_kib=1"], ["--config", folder / "c.toml"]):
        done = forebay(*words, *more)
        assert json.loads(done.stdout)["verdict"] == ("compile_error" if more else "accepted"), done.stderr
    assert_refused(forebay(*words, "--set", "reward.weightz=1"), "reward.weightz: unknown key")
    assert_refused(forebay(*words, "--set", "run.seed=1"), "run: unknown key")


def test_a_task_is_picked_out_of_a_file_by_its_id(folder):
    tasks = [{"task_id": name, "prompt": "p", "tests": SUITE} for name in ("a", "b")]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    words = ("judge", folder / "good.md", "--tests", folder / "tasks.jsonl")
    assert forebay(*words, "--task-id", "b").returncode == 0
    assert_refused(forebay(*words), "has 2 lines", "--task-id")
    assert_refused(forebay(*words, "--task-id", "c"), "no task 'c'", "a, b")
    (folder / "one.json").write_text(json.dumps(tasks[0]))
    assert forebay("judge", folder / "good.md", "--tests", folder / "one.json").returncode == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["t.json is not JSON", "line 1"]),
        ("[1]", ["t.json: it must be an object"]),
        ('{"kind": "sql"}', ["t.json is no test suite: kind:", "README.md"]),
        ('{"tests": {"kind": "check", "entry_point": "f"}}', ["tests.code: Field required"]),
        (json.dumps(SUITE | {"limits": {"cpu_s": 0}}), ["limits.cpu_s"]),
    ],
)
def test_a_bad_suite_is_refused_with_what_is_wrong_and_where(folder, text, words):
    (folder / "t.json").write_text(text)
    assert_refused(forebay("judge", folder / "good.md", "--tests", folder / "t.json"), *words)


def test_files_that_are_not_there_or_no_text_are_named(folder):
    assert_refused(forebay("judge", folder / "x.md", "--tests", folder / "t.json"), "x.md can't be read: No such file")
    assert_refused(forebay("judge", folder / "good.md", "--tests", folder / "x.json"), "x.json can't be read")
    (folder / "x.md").write_bytes(b"\xff")
    assert_refused(forebay("judge", folder / "x.md", "--tests", folder / "t.json"), "x.md is no UTF-8 text")


# ---- forebay reward --once ----


def lines(*completions):
    return "".join(
        json.dumps({"id": i, "completion": text, "tests": SUITE}) + "\n" for i, text in enumerate(completions)
    )


def test_a_file_is_judged_with_its_bad_lines_in_place(folder):
    (folder / "in.jsonl").write_text(
        lines(GOOD, BAD, "no code here") + "{\n" + lines(GOOD, "x" * 5_000_000, "```python\n\0\n```")
    )
    done = forebay("reward", "--once", folder / "in.jsonl", "--out", folder / "out.jsonl", "--set", "reward.workers=2")
    assert done.returncode == 8, done.stderr
    found = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [answer["verdict"] for answer in found] == [
        *("accepted", "wrong_answer", "no_code", "infra_error", "accepted", "compile_error", "compile_error")
    ]
    assert [answer["id"] for answer in found] == [0, 1, 2, None, 0, 1, 2]
    assert found[0]["isolation"] != "none"
    assert "a second" in done.stderr
    assert done.stdout == ""


def test_a_pipe_in_and_out(folder):
    done = forebay("reward", "--once", "-", "--out", "-", input=lines(GOOD, BAD))
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["verdict"] for line in done.stdout.splitlines()] == ["accepted", "wrong_answer"]


def test_a_run_that_ctrl_c_ends_is_finished_by_the_next(folder):
    slow = "```python\nimport time\ndef f(x):\n    time.sleep(0.1)\n    return x\n```"
    (folder / "in.jsonl").write_text(lines(*[slow + f"\n<!-- {n} -->" for n in range(30)]))
    words = [*FOREBAY, "reward", "--once", str(folder / "in.jsonl"), "--out", str(folder / "out.jsonl")]
    partial = folder / "out.jsonl.partial"
    first = subprocess.Popen(
        [*words, "--set", "reward.workers=1"], cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True
    )
    while not (partial.exists() and partial.stat().st_size):
        assert first.poll() is None
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGINT)  # as a terminal does
    _, text = first.communicate(timeout=300)
    assert first.returncode == 130, text
    kept = partial.read_bytes()
    assert 0 < kept.count(b"\n") < 30
    done = forebay(*words[3:])
    assert done.returncode == 0, done.stderr
    assert "were done before" in done.stderr
    whole = (folder / "out.jsonl").read_bytes()
    assert whole.startswith(kept)
    assert b"infra_error" not in whole
    assert [json.loads(line)["id"] for line in whole.splitlines()] == list(range(30))
    assert not partial.exists()


def test_wrong_words_are_answered_with_what_is_missing(folder):
    assert_refused(forebay("reward", "--once", folder / "in.jsonl"), "--once needs --out")
    assert_refused(forebay("reward", "--out", folder / "o.jsonl"), "--out needs --once")
    assert_refused(forebay("reward"), "--config", "--once IN --out OUT")
    assert_refused(
        forebay("reward", "--once", folder / "gone.jsonl", "--out", folder / "o.jsonl"), "gone.jsonl can't be read"
    )
