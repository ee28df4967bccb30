"""The public format: what a line must have, what is said of a bad one, and that every documented example is a suite."""

import json
import re
from pathlib import Path

import pytest

from common.errors import ConfigError
from protocol.suites import AssertSuite, TestSuite, parse_suite
from protocol.tasks import load_tasks
from protocol.verdicts import JudgeResult, TestResult, Verdict
from services.reward.public_format import LineRefused, format_line, id_of, parse_line, refusal

README = Path(__file__).resolve().parents[2] / "services/reward/README.md"
EXAMPLES = re.findall(r"```json\n(.*?)```", README.read_text(), re.S)
SUITE = {"kind": "call", "entry_point": "f", "cases": [{"args": [1], "expected": 1}]}


def line(**changes):
    record = {"id": "a", "completion": "x", "tests": SUITE} | changes
    return json.dumps({key: value for key, value in record.items() if value is not ...}).encode()


def suite(**changes):
    return {"tests": SUITE | changes}


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_in_the_readme_is_a_suite(example):
    parsed = parse_suite(example)
    assert parse_suite(parsed.to_json()) == parsed


def test_the_readme_shows_every_kind():
    kinds = {member.model_fields["kind"].default for member in TestSuite.__origin__.__args__}
    assert {parse_suite(example).kind for example in EXAMPLES} == kinds


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_suite_keeps_its_name_when_it_travels(example):
    parsed = parse_suite(example)
    assert parse_suite(parsed.to_json()).content_hash == parsed.content_hash


def test_a_good_line_is_parsed_and_its_other_fields_are_ignored():
    line_id, completion, parsed = parse_line(line(id=7, source="apps", completion="a\0b"))
    assert (line_id, completion, parsed.kind) == (7, "a\0b", "call")


@pytest.mark.parametrize(
    ("text", "line_id", "words"),
    [
        (b"{", None, "the line: not JSON"),
        (b"[]", None, "the line: must be an object, not list"),
        (b"[" * 100_000, None, "the line: not JSON"),
        (b'{"id": 1' + b"1" * 5000 + b"}", None, "the line: not JSON"),
        (b'{"id": "a", "completion": "\xff"}', None, "the line: not UTF-8 (byte 27)"),
        (b'{"id": "a\x00"}', None, "the line: not JSON"),
        (line(id=...), None, "id: this field is missing"),
        (line(id=1.5), None, "id: must be a string or an integer"),
        (line(id=True), None, "id: must be a string or an integer"),
        (line(id="\ud800"), None, "id: must be a string or an integer"),
        (line(completion=...), "a", "completion: this field is missing"),
        (line(completion=None), "a", "completion: must be a string, not NoneType"),
        (line(completion="\udfff"), "a", "completion: a lone surrogate"),
        (line(tests=...), "a", "tests: this field is missing"),
        (line(tests=[]), "a", "tests: must be an object with a kind, not list"),
        (line(tests={}), "a", "tests.kind: "),
        (line(**suite(kind="sql")), "a", "tests.kind: "),
        (line(**suite(language="perl")), "a", "tests.language: "),
        (line(**suite(language="cpp")), "a", "tests.language: "),
        (line(**suite(casez=[])), "a", "tests.casez: "),
        (line(**suite(cases=[])), "a", "tests.cases: "),
        (line(**suite(cases=[{"args": [float("nan")], "expected": 1}])), "a", "tests.cases.0.args: NaN"),
        (line(**suite(cases=[{"args": [1], "expected": float("inf")}])), "a", "tests.cases.0.expected: NaN"),
        (line(**suite(solution="\ud800")), "a", "tests.solution: a lone surrogate"),
        (line(**suite(limits={"cpu_s": 0})), "a", "tests.limits.cpu_s: "),
        (line(**suite(limits={"cpu_s": float("nan")})), "a", "tests.limits.cpu_s: "),
        (line(**suite(limits={"wall_s": -1})), "a", "tests.limits.wall_s: "),
        (line(**suite(limits={"memory_mib": 10 << 20})), "a", "tests.limits.memory_mib: "),
        (line(**suite(limits={"memory_mib": "much"})), "a", "tests.limits.memory_mib: "),
        (line(**suite(compare={"atol": float("inf")})), "a", "tests.compare.atol: "),
    ],
)
def test_a_bad_line_is_refused_with_its_id_and_the_field_at_fault(text, line_id, words):
    with pytest.raises(LineRefused) as caught:
        parse_line(text)
    assert str(caught.value).startswith(words)
    assert caught.value.line_id == line_id == id_of(text)


def test_an_answer_has_the_documented_fields_and_no_other():
    tests = (TestResult(verdict=Verdict.WRONG_ANSWER, message="é ≠ e"),)
    result = JudgeResult(verdict=Verdict.WRONG_ANSWER, reward=0.5, parts={"correctness": 0.5}, tests=tests)
    answer = format_line("a", result)
    documented = re.findall(r"```text\n(.*?)```", README.read_text(), re.S)[1]
    fields, test_fields = (
        re.sub(r"\[\{(.*?)\}.*?\]|: \{.*?\}", "", documented),
        re.search(r"\[\{(.*?)\}", documented)[1],
    )
    assert list(json.loads(answer)) == re.findall(r'"(\w+)"', fields)
    assert list(json.loads(answer)["tests"][0]) == re.findall(r'"(\w+)"', test_fields)
    assert answer.endswith(b"}\n")
    assert "é ≠ e".encode() in answer


def test_an_answer_is_one_line_of_utf8_whatever_a_program_printed():
    answer = format_line("a", JudgeResult(verdict=Verdict.RUNTIME_ERROR, reward=0.0, message="\ud800\n\u2028\0"))
    assert answer.count(b"\n") == 1
    assert json.loads(answer)["message"] == "?\n\u2028\0"


def test_a_refusal_is_no_reward():
    answer = json.loads(format_line(None, refusal("id: this field is missing")))
    assert (answer["id"], answer["verdict"], answer["reward"]) == (None, "infra_error", None)


# ---- task files ----


def task_file(tmp_path, **fields):
    (tmp_path / "t.jsonl").write_text(json.dumps({"task_id": "a", "prompt": "p", "tests": SUITE} | fields))
    return tmp_path / "t.jsonl"


def test_a_reference_becomes_the_solution_of_a_suite_that_has_none(tmp_path):
    (task,) = load_tasks(task_file(tmp_path, reference="def f(x): return x"))
    assert task.tests.solution == "def f(x): return x"
    (task,) = load_tasks(task_file(tmp_path, reference="other", tests=SUITE | {"solution": "its own"}))
    assert task.tests.solution == "its own"
    assert load_tasks(task_file(tmp_path))[0].tests.solution is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (suite(cases=[{"args": [float("nan")], "expected": 1}]), r"cases\.0\.args: NaN and infinities"),
        (suite(solution="\ud800"), r"solution: a lone surrogate"),
        ({"prompt": "\ud800"}, r"prompt: .*unicode"),
        (suite(limits={"cpu_s": 0}), r"limits\.cpu_s"),
    ],
)
def test_a_task_that_could_not_be_sent_is_refused_with_its_line(tmp_path, fields, words):
    with pytest.raises(ConfigError, match=r"t\.jsonl:1.*" + words):
        load_tasks(task_file(tmp_path, **fields))


def test_a_suite_that_is_too_big_to_travel_is_refused_when_the_tasks_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("protocol.suites.MAX_SUITE_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"t\.jsonl:1: task 'a' can't be sent.*at most"):
        load_tasks(task_file(tmp_path, reference="#" * 2000))


def test_a_line_that_is_nested_too_deep_is_refused(tmp_path):
    (tmp_path / "t.jsonl").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"t\.jsonl:1 is nested too deep"):
        load_tasks(tmp_path / "t.jsonl")


def test_equal_suites_have_equal_names_and_others_have_not():
    one, same, other = (AssertSuite(entry_point="f", code=f"assert f({n})") for n in (1, 1, 2))
    assert one.content_hash == same.content_hash != other.content_hash
