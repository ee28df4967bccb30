"""Completions and suites that are no good, through the pool and through ``forebay reward --once``: each gets its answer, and its neighbours theirs.

What ``parse_suite`` refuses is in ``test_reports_service.py`` (B45) and ``test_reports.py`` (B75); a file with broken lines in ``test_judge_commands.py``.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from judge_harness import GOOD, ROOT, SUITES, fenced, judge_at, program_of, short, suite_of

from protocol.suites import parse_suite
from services.reward.config import RewardConfig
from services.reward.pool import JudgePool


@pytest.fixture(scope="module")
def pool() -> Iterator[JudgePool]:
    with judge_at("namespaces"):  # skips where that does not work
        pool = JudgePool(RewardConfig(workers=2))
    pool.start()
    yield pool
    pool.close()


WRONG = "def f(a, b): return 0"
_BAD = {  # a completion, the kind of suite, more fields of it, and the verdict
    "five megabytes": ("x" * 5_000_000, "call", {}, "CE"),
    "five megabytes of code": (fenced(GOOD + "x = 1\n" * 800_000), "inline", {}, "CE"),
    "a line of 250 kB": (fenced(GOOD + "x = '" + "y" * 250_000 + "'"), "call", {}, "AC"),
    "nothing": ("", "call", {}, "NC"),
    "blanks": (" \n\t\r\n" * 99, "stdin", {}, "NC"),
    "prose": ("I can't do that.", "call", {}, "NC"),
    "an empty block": ("```python\n```", "call", {}, "NC"),
    "only NULs": ("\0" * 1000, "call", {}, "NC"),
    "NUL in the code": (fenced(GOOD + "\0"), "call", {}, "CE"),
    "NUL in the prose": ("\0\0\n" + fenced(GOOD), "call", {}, "AC"),
    "surrogate in the code": (fenced(GOOD + "x = '\ud800'"), "call", {}, "CE"),
    "surrogate in a comment": (fenced(GOOD + "# \udfff"), "inline", {}, "CE AC"),
    "surrogate in the prose": ("\ud800\n" + fenced(GOOD), "call", {}, "AC"),
    "only surrogates": ("\ud800" * 1000, "stdin", {}, "NC"),
    "another language": ("```rust\nfn main() {}\n```", "stdin", {}, "NC"),
    "more memory than the node gives": (fenced(GOOD), "call", {"limits": {"memory_mib": 10240}}, "IE"),
    "a grader that is not there": (fenced(GOOD), "custom", {}, "IE"),
    "tests that are no Python": (fenced(GOOD), "inline", {"code": "assert f("}, "IE"),
    "tests that test nothing": (fenced(GOOD), "inline", {"code": "assert 1"}, "IE"),
    "literals that are none": (fenced(GOOD), "call", {"values": "python", "cases": [{"args": "[", "expected": "1"}]}, "IE"),
    "a reference that is broken": (fenced(GOOD), "reference", {"reference": "def f(a, b"}, "IE"),
    "a checker that is broken": (program_of("checker", GOOD), "checker", {"checker": "def check("}, "IE"),
    "a suite of one expected megabyte": (program_of("stdin", GOOD), "stdin", {"cases": [{"input": "1 2", "output": "3" * 10**6}]}, "WA"),
}  # fmt: skip


def bad_suite(name: str) -> Any:
    _, kind, more, _ = _BAD[name]
    return parse_suite({"kind": "custom", "grader": "x"}) if kind == "custom" else suite_of(kind, **more)


def test_each_bad_item_of_a_batch_gets_its_answer_and_its_neighbours_theirs(pool: JudgePool) -> None:
    jobs, wanted = [], []
    for number, (name, (completion, _, _, verdict)) in enumerate(_BAD.items()):
        kind = list(SUITES)[number % len(SUITES)]
        jobs.append((program_of(kind, f"# {number}\n{GOOD}"), suite_of(kind)))
        jobs.append((completion, bad_suite(name)))
        jobs.append((program_of(kind, f"# {number}\n{WRONG}"), suite_of(kind)))
        wanted += ["AC", verdict, "WA"]
    results = [future.result() for future in [pool.submit(*job) for job in jobs]]
    failed = [
        (job[0][:60], result)
        for job, result, verdict in zip(jobs, results, wanted, strict=True)
        if short(result) not in verdict.split()
    ]
    assert failed == []
    for result in results:
        assert (result.reward is None) == (short(result) == "IE")
        assert type(result).model_validate_json(result.model_dump_json()) == result


def test_the_same_bad_item_again_and_again_stays_what_it_is(pool: JudgePool) -> None:
    for name in (
        "tests that are no Python",
        "NUL in the code",
        "surrogate in the code",
        "more memory than the node gives",
    ):
        completion, _, _, verdict = _BAD[name]
        results = [pool.submit(completion, bad_suite(name)) for _ in range(20)]
        assert {short(future.result()) for future in results} == set(verdict.split())
    assert short(pool.judge(fenced(GOOD), suite_of("call"))) == "AC"


def test_a_full_queue_says_so_and_loses_nothing() -> None:
    with judge_at("namespaces"):
        pool = JudgePool(RewardConfig(workers=1, max_queue=4))
    pool.start()
    try:
        taken, refused = [], 0
        for number in range(200):
            try:
                taken.append(pool.submit(fenced(f"# {number}\n{GOOD}"), suite_of("call")))
            except queue.Full:
                refused += 1
        assert refused
        assert {short(future.result()) for future in taken} == {"AC"}
    finally:
        pool.close()


def test_a_file_with_bad_suites_and_completions_is_judged_line_by_line(tmp_path: Path) -> None:
    good = SUITES["call"]
    lines: list[tuple[Any, str]] = [
        ({"completion": fenced(GOOD), "tests": good}, "accepted"),
        ({"completion": fenced(GOOD), "tests": good | {"cases": []}}, "infra_error"),
        ({"completion": fenced(GOOD), "tests": {"kind": "sql"}}, "infra_error"),
        ({"completion": fenced(GOOD), "tests": good | {"language": "cobol"}}, "infra_error"),
        ({"completion": fenced(GOOD), "tests": SUITES["stdin"] | {"language": "cobol"}}, "infra_error"),
        ({"completion": fenced(GOOD), "tests": None}, "infra_error"),
        ({"completion": None, "tests": good}, "infra_error"),
        ({"tests": good}, "infra_error"),
        *(
            ({"completion": fenced(GOOD), "tests": good | {"limits": limits}}, "infra_error")
            for limits in ({"cpu_s": 0}, {"cpu_s": -1}, {"memory_mib": 10240}, {"memory_mib": 10**9}, {"cpu_s": "soon"}, {"timeout": 1}, [])
        ),
        ({"completion": "x" * 5_000_000, "tests": good}, "compile_error"),
        ({"completion": fenced(GOOD + "\0"), "tests": good}, "compile_error"),
        ({"completion": fenced(GOOD + "'\ud800'"), "tests": good}, "compile_error infra_error"),
        ({"completion": "\ud800", "tests": good}, "no_code infra_error"),
        ({"completion": fenced(WRONG), "tests": good}, "wrong_answer"),
        ({"completion": fenced(GOOD), "tests": good}, "accepted"),
    ]  # fmt: skip
    texts = [json.dumps({"id": number} | line) for number, (line, _) in enumerate(lines)]
    texts.insert(
        3, json.dumps({"id": "nan", "completion": fenced(GOOD), "tests": good | {"limits": {"cpu_s": float("nan")}}})
    )
    lines.insert(3, (None, "infra_error"))
    (tmp_path / "in.jsonl").write_text("\n".join(texts) + "\n")
    command = [sys.executable, "-m", "services.cli", "reward", "--once", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl"), "--set", "reward.workers=2"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 8, done.stderr
    assert "Traceback" not in done.stderr
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    wrong = [
        (answer, wanted)
        for answer, (_, wanted) in zip(found, lines, strict=True)
        if answer["verdict"] not in wanted.split()
    ]
    assert wrong == []
    assert all((answer["reward"] is None) == (answer["verdict"] == "infra_error") for answer in found)
