"""What the judge says of honest and wrong programs, kind by kind: verdicts, options, parts.

How it starts and ends is in ``test_judge_start_and_end.py``, attacks are in ``test_attacks.py``, and what public bug reports taught in
``test_reports.py`` and ``test_reports_service.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from judge_harness import (
    GOOD,
    HONEST_NATIVE,
    LEVELS,
    SUITES,
    TEXT_KINDS,
    call_suite,
    fenced,
    judge_at,
    program_of,
    short,
    stdin_suite,
    suite_of,
    verdict_of,
)

from protocol.suites import TestSuite, parse_suite
from protocol.verdicts import JudgeResult, Verdict
from services.reward import judge as judge_module
from services.reward.config import RewardConfig, RewardWeights
from services.reward.judge import Judge


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with judge_at("namespaces") as judge:
        yield judge


@pytest.fixture(scope="module")
def landlocked() -> Iterator[Judge]:
    with judge_at("landlock") as judge:
        yield judge


def judged(judge: Judge, code: str, suite: TestSuite, language: str = "python") -> JudgeResult:
    return judge.judge(fenced(code, language), suite)


# --- verdicts by kind ---

_VERDICTS = [  # f, and the verdict where it is called, and where it is part of a program
    ("def f(a, b): return a + b", "AC", "AC"),
    ("f = lambda a, b: a + b", "AC", "AC"),
    ("def f(a, b): return a - b", "WA", "WA"),
    ("def f(a, b): return None", "WA", "WA"),
    ("def f(a, b): raise ValueError('no')", "RE", "RE"),
    ("def f(a): return a", "RE", "RE"),
    ("def f(a, b): return f(a, b)", "RE", "RE"),
    ("1 / 0\ndef f(a, b): return a + b", "RE", "RE"),
    ("import no_such_module\ndef f(a, b): return a + b", "RE", "RE"),
    ("def f(a, b:\n    return a", "CE", "CE"),
    ("def f(a, b):\nreturn a", "CE", "CE"),
    ("def f(a, b): return a + b\n  x = 1", "CE", "CE"),
    ("await f", "CE", "CE"),
    ("return 3", "CE", "CE"),
    ("def f(a, b):\n    while True: pass", "TLE", "TLE"),
    ("def f(a, b): return [0] * 10**11", "MLE", "MLE"),
    ("def f(a, b):\n    while True: print('x' * 10**5)", "OLE", "OLE"),
    ("import os\ndef f(a, b): os.abort()", "RE", "RE"),
    ("import sys\ndef f(a, b): sys.stderr.write('noise'); print('more', file=sys.stderr); return a + b", "AC", "AC"),
    ("import numpy\ndef f(a, b): return int(numpy.add(a, b))", "AC RE", "AC RE"),
]  # fmt: skip


@pytest.mark.parametrize("kind", SUITES)
def test_each_kind_has_each_verdict(judge: Judge, kind: str) -> None:
    suite = suite_of(kind, limits={"cpu_s": 0.2})
    for code, called, run in _VERDICTS:
        result = judge.judge(program_of(kind, code), suite)
        assert short(result) in (run if kind in TEXT_KINDS else called).split(), (code, result)
        assert result.reward == (1.0 if result.verdict is Verdict.ACCEPTED else 0.0)
        assert result.tests_total == 3 or kind == "remote"  # a loop that was left early
        assert result.isolation == judge.isolation != "none"
        assert result.judge.startswith("forebay ")
        assert result.repeatable == (
            short(result) in ("AC", "WA", "CE")
            or "def f(a): " in code
            or (short(result) == "RE" and "abort" not in code)
        )


def test_printing_does_not_disturb_the_answers_of_a_called_function(judge: Judge) -> None:
    code = "import sys\nprint('at load')\ndef f(a, b):\n    print('{\"value\": 0}', a, b)\n    sys.stdout.buffer.write(b'\\0\\0\\0\\1')\n    return a + b"
    for kind in ("inline", "remote", "call", "reference"):
        assert verdict_of(judge, program_of(kind, code), suite_of(kind)) == "AC"


def test_the_first_failure_in_the_order_of_the_suite_is_the_verdict(judge: Judge) -> None:
    code = "def f(x):\n    if x == 1: return 0\n    if x == 2: raise KeyError(x)\n    if x == 3:\n        while True: pass\n    return x"
    for order, verdict in (((0, 1, 2, 3), "WA"), ((0, 2, 1), "RE"), ((3, 1, 2), "TLE")):
        suite = call_suite(*(([x], x) for x in order), limits={"cpu_s": 0.1}, correctness="fraction")
        result = judged(judge, code, suite)
        assert short(result) == verdict
        assert result.message.startswith(f"Test {1 + order.index(next(x for x in order if x))}")
        assert len(result.tests) == len(order)


def test_a_program_that_was_stopped_three_times_is_not_run_again(judge: Judge) -> None:
    suite = stdin_suite(*[("1", "1")] * 9, limits={"cpu_s": 0.05, "wall_s": 1}, correctness="fraction")
    result = judged(judge, "input()\nwhile True: pass", suite)
    assert (short(result), len(result.tests), result.tests_total) == ("TLE", 3, 9)


def test_all_or_nothing_stops_at_the_first_failure_and_a_fraction_goes_on(judge: Judge) -> None:
    code = "def f(a, b): return a + b if a != 40 else 0"
    for kind in ("inline", "remote", "call", "stdin", "checker"):
        result = judge.judge(program_of(kind, code), suite_of(kind))
        assert (short(result), result.reward, result.tests_passed, len(result.tests)) == ("WA", 0.0, 1, 2), kind
        result = judge.judge(program_of(kind, code), suite_of(kind, correctness="fraction"))
        assert (short(result), result.tests_passed, result.tests_total) == ("WA", 2, 3), kind
        assert result.reward == pytest.approx(2 / 3)


def test_the_config_says_how_correctness_is_counted_and_a_suite_may_differ() -> None:
    code = "def f(a, b): return a + b if a != 40 else 0"
    with judge_at("namespaces", correctness="fraction") as judge:
        assert judged(judge, code, suite_of("call")).reward == pytest.approx(2 / 3)
        assert judged(judge, code, suite_of("call", correctness="all")).reward == 0.0
        raising = "def f(a, b):\n    if a == 40: raise KeyError\n    return a + b"
        for kind in ("inline", "remote"):
            result = judged(judge, raising, suite_of(kind))
            assert (short(result), result.tests_passed, result.tests_total) == ("RE", 2, 3), kind
        assert judged(judge, "def f(a, b: pass", suite_of("call")).reward == 0.0


def test_asserts_in_a_loop_count_each_time(judge: Judge) -> None:
    code = "def check(candidate):\n    for i in range(7):\n        assert candidate(i) == i"
    suite = parse_suite({"kind": "check", "entry_point": "f", "code": code})
    result = judged(judge, "def f(x): return x", suite)
    assert (short(result), result.tests_passed, result.tests_total) == ("AC", 7, 7)


# --- entry points ---

_SOLUTIONS = {
    "function": "def two(a, b): return a + b",
    "method": "class Solution:\n    def two(self, a, b): return a + b",
    "static method": "class Solution:\n    @staticmethod\n    def two(a, b): return a + b",
    "class method": "class Solution:\n    @classmethod\n    def two(cls, a, b): return cls is Solution and a + b",
    "helper class first": "class Node:\n    def two(self): return 0\nclass Solution:\n    class Inner: pass\n    def two(self, a, b): return a + b",
    "function and class": "class Solution:\n    def two(self, a, b): return 0\ndef two(a, b): return a + b",
    "state by test": "class Solution:\n    def __init__(self): self.sum = 0\n    def two(self, a, b):\n        self.sum += a + b\n        return self.sum",
    "base class": "class Base:\n    def two(self, a, b): return a + b\nclass Solution(Base): pass",
    "decorated": "from functools import cache\n@cache\ndef two(a, b): return a + b",
    "partial": "from functools import partial\ntwo = partial(lambda c, a, b: a + b, 0)",
    "callable object": "class C:\n    def __call__(self, a, b): return a + b\ntwo = C()",
    "guard": "def two(a, b): return a + b\nif __name__ == '__main__':\n    raise SystemExit('must not run')",
}  # fmt: skip


@pytest.mark.parametrize("name", _SOLUTIONS)
def test_a_function_or_a_method_of_solution_is_found(judge: Judge, name: str) -> None:
    for fresh in (True, False):
        suite = call_suite(([1, 2], 3), ([3, 4], 7), entry_point="two", fresh_process=fresh)
        result = judged(judge, _SOLUTIONS[name], suite)
        assert short(result) == "AC", result
    asserts = {"kind": "asserts", "entry_point": "two", "code": "assert two(1, 2) == 3\nassert two(3, 4) == 7"}
    assert verdict_of(judge, fenced(_SOLUTIONS[name]), asserts) == "AC"


def test_a_named_class_is_used_with_a_new_instance_for_each_test(judge: Judge) -> None:
    code = "class Counter:\n    def __init__(self): self.n = 0\n    def add(self, k):\n        self.n += k\n        return self.n"
    suite = call_suite(([2], 2), ([3], 3), entry_point="Counter.add", fresh_process=False)
    assert short(judged(judge, code, suite)) == "AC"
    assert short(judged(judge, code.replace("Counter", "Other"), suite)) == "RE"
    assert short(judged(judge, "def add(k): return k", suite)) == "RE"


# --- options ---

_COMPARE = [  # compare, expected output, output, verdict
    ({}, "1 2\n3", "1  2 \n3\n\n", "AC"),
    ({}, "1 2\n3", "1\n2\n3", "WA"),
    ({}, "yes", "YES", "WA"),
    ({}, "0.333333333", "0.33333333331", "AC"),
    ({"ignore_case": True}, "yes", "YES", "AC"),
    ({"whitespace": "tokens"}, "1 2\n3", "1\n2\n3", "AC"),
    ({"whitespace": "exact"}, "1 2\n", "1 2\n", "AC"),
    ({"whitespace": "exact"}, "1 2\n", "1 2", "WA"),
    ({"any_order": True}, "a\nb\nb", "b\na\nb", "AC"),
    ({"any_order": True}, "a\nb\nb", "b\na\na", "WA"),
    ({"atol": 0.1}, "1.0", "1.05", "AC"),
    ({"atol": 0.0, "rtol": 0.0}, "1.0", "1.0000001", "WA"),
    ({"rtol": 0.1}, "100.0", "109", "AC"),
]  # fmt: skip


@pytest.mark.parametrize(("compare", "expected", "output", "verdict"), _COMPARE)
def test_compare_options_reach_the_comparison_of_outputs(
    judge: Judge, compare: dict[str, Any], expected: str, output: str, verdict: str
) -> None:
    assert (
        short(
            judged(judge, f"import sys\nsys.stdout.write({output!r})", stdin_suite((None, expected), compare=compare))
        )
        == verdict
    )


@pytest.mark.parametrize(
    ("compare", "expected", "value", "verdict"),
    [
        ({}, [1, 2], "(1, 2)", "AC"),
        ({}, [1, 2], "[2, 1]", "WA"),
        ({"any_order": True}, [1, 2], "[2, 1]", "AC"),
        ({"any_order": True}, [1, 2], "{2, 1}", "AC"),
        ({"ignore_case": True}, ["a"], "['A']", "AC"),
        ({"atol": 0.5}, 1.0, "1.4", "AC"),
        ({}, 1.0, "1.4", "WA"),
        ({}, {"1": 2}, "{1: 2}", "AC"),
        ({}, 1, "True", "WA"),
    ],
)
def test_compare_options_reach_the_comparison_of_values(
    judge: Judge, compare: dict[str, Any], expected: Any, value: str, verdict: str
) -> None:
    code = f"def f(): return {value}"
    assert short(judged(judge, code, call_suite(([], expected), compare=compare))) == verdict


def test_values_may_be_python_literals_and_then_types_are_exact(judge: Judge) -> None:
    suite = call_suite(("[(1, 2), {3}]", "{1: (2, {3})}"), values="python")
    assert short(judged(judge, "def f(a, b): return {a[0]: (a[1], b)}", suite)) == "AC"
    assert short(judged(judge, "def f(a, b): return {a[0]: [a[1], b]}", suite)) == "WA"
    assert short(judged(judge, "def f(a, b): return {str(a[0]): (a[1], b)}", suite)) == "WA"
    keywords = parse_suite(
        {"kind": "call", "entry_point": "f", "cases": [{"args": [1], "kwargs": {"b": 2}, "expected": 3}]}
    )
    assert short(judged(judge, GOOD, keywords)) == "AC"


@pytest.mark.parametrize("language", ["python", "cpp", "javascript"])
def test_any_exit_code_is_an_option(judge: Judge, language: str) -> None:
    code = {
        "python": "print(3)\nexit(7)",
        "cpp": '#include <cstdio>\nint main() { puts("3"); return 7; }',
        "javascript": "console.log(3); process.exitCode = 7",
    }[language]
    strict, lenient = (stdin_suite(("", "3"), any_exit_code=x, language=language) for x in (False, True))
    result = judged(judge, code, strict, language)
    assert (short(result), "code 7" in result.message) == ("RE", True), result
    assert short(judged(judge, code, lenient, language)) == "AC"
    crash = {"python": "import os\nprint(3, flush=True)\nos.abort()", "cpp": code.replace("return 7", "fflush(0); __builtin_trap()").replace("<cstdio>", "<cstdio>"),
             "javascript": "require('fs').writeSync(1, '3'); process.abort()"}[language]  # fmt: skip
    assert short(judged(judge, crash, lenient, language)) == "RE"


def test_a_coroutine_is_awaited_only_where_the_suite_says_so(judge: Judge) -> None:
    code = "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x"
    assert short(judged(judge, code, call_suite(([3], 3), await_result=True))) == "AC"
    assert short(judged(judge, code, call_suite(([3], 3)))) == "WA"
    assert short(judged(judge, "def f(x): return x", call_suite(([3], 3), await_result=True))) == "AC"
    never = "import asyncio\nasync def f(x): await asyncio.Event().wait()"
    assert short(judged(judge, never, call_suite(([3], 3), await_result=True, limits={"wall_s": 0.3}))) == "TLE"


def test_tests_share_a_process_only_where_the_suite_says_so(judge: Judge) -> None:
    code = "n = 0\ndef f():\n    global n\n    n += 1\n    return n"
    for fresh, expected in ((True, 1), (False, 2)):
        suite = call_suite(([], 1), ([], expected), fresh_process=fresh)
        assert short(judged(judge, code, suite)) == "AC"
    dies = "import os\nn = 0\ndef f():\n    global n\n    n += 1\n    return n if n < 2 else os._exit(0)"
    result = judged(judge, dies, call_suite(*[([], 1)] * 3, fresh_process=False, correctness="fraction"))
    assert (short(result), result.tests_passed, result.tests_total) == ("RE", 1, 3)


def test_several_processes_are_an_option(judge: Judge) -> None:
    code = "from multiprocessing import Pool\ndef sq(x): return x * x\nif __name__ == '__main__':\n    with Pool(2) as pool: print(sum(pool.map(sq, range(10))))"
    assert short(judged(judge, code, stdin_suite((None, "285"), limits={"processes": 8}))) == "AC"
    assert short(judged(judge, code, stdin_suite((None, "285"), limits={"wall_s": 2}))) == "RE"
    assert (
        short(
            judged(
                judge,
                "import os\nprint(os.fork() and os.wait()[1] or 3)",
                stdin_suite((None, "3\n3"), limits={"processes": 2}),
            )
        )
        == "AC"
    )


def test_the_stack_is_an_option(judge: Judge) -> None:
    deep = (
        "#include <iostream>\nlong g(long n, volatile char *p) { volatile char c[1000]; c[n % 9] = *p; return n ? 1 + g(n - 1, c) + 0 * c[8] : 0; }\n"
        "int main() { char c = 1; std::cout << g(20000, &c); }"
    )
    assert short(judged(judge, deep, stdin_suite((None, "20000"), language="cpp"), "cpp")) == "AC"
    assert (
        short(judged(judge, deep, stdin_suite((None, "20000"), language="cpp", limits={"stack_mib": 128}), "cpp"))
        == "AC"
    )


def test_the_output_limit_is_an_option_and_rises_with_what_is_expected(judge: Judge) -> None:
    code = "print('x' * 100_000)"
    assert short(judged(judge, code, stdin_suite((None, "x" * 100_000), limits={"output_kib": 1}))) == "AC"
    assert short(judged(judge, code, stdin_suite((None, "x"), limits={"output_kib": 1}))) == "OLE"
    assert short(judged(judge, code, stdin_suite((None, "x"), limits={"output_kib": 200}))) == "WA"


# --- checkers and references ---


def checker_suite(checker: str, *cases: tuple[str, str], **more: Any) -> TestSuite:
    made = [{"input": i, "answer": a} for i, a in cases] or [{"input": "1"}]
    return parse_suite({"kind": "checker", "checker": checker, "cases": made} | more)


def test_a_checker_gives_yes_no_or_a_share(judge: Judge) -> None:
    share = "def check(given, output, answer): return float(output)"
    for output, score in (("1", 1.0), ("0.25", 0.25), ("0", 0.0)):
        result = judged(judge, f"print({output})", checker_suite(share, correctness="fraction"))
        assert (short(result), result.reward) == ("AC" if score == 1 else "WA", score), result
        assert judged(judge, f"print({output})", checker_suite(share)).reward == float(score == 1)
    two = checker_suite(
        "def check(given, output, answer): return int(given) / 4 if output == answer else 0",
        ("4", "a\n"),
        ("2", "a\n"),
        correctness="fraction",
    )
    assert judged(judge, "print('a')", two).reward == 0.75
    for yes in ("True", "1", "1.0"):
        assert short(judged(judge, "pass", checker_suite(f"def check(i, o, a): return {yes}"))) == "AC"


def test_a_checker_that_fails_by_itself_is_no_fault_of_the_candidate(judge: Judge) -> None:
    for checker in (
        "def check(i, o, a): return 2",
        "def check(i, o, a): return -0.1",
        "def check(i, o, a): return None",
        "def check(i, o, a): return 'yes'",
        "def check(i, o, a): return float('nan')",
        "def check(i, o, a): return undefined",
        "def check(i, o, a): import no_such_module",
        "def verify(i, o, a): return True",
        "def check(i, o, a:",
        "import os\nos._exit(0)",
        "1 / 0",
    ):
        result = judged(judge, "print(1)", checker_suite(checker))
        assert (short(result), result.reward) == ("IE", None), (checker, result)
        assert "checker" in result.message
    assert short(judged(judge, "print(1)", checker_suite("def check(i, o, a): return int(o) == 1"))) == "AC"


def test_a_checker_may_fail_at_an_output_of_the_wrong_form(judge: Judge) -> None:
    checker = checker_suite(
        "def check(i, o, a):\n    x, y = map(int, o.split())\n    assert x < y\n    return [1, 0][x - 1] == 1"
    )
    for output, verdict in (("1 5", "AC"), ("x", "WA"), ("", "WA"), ("1 2 3", "WA"), ("5 1", "WA"), ("9 10", "WA")):
        assert short(judged(judge, f"print({output!r})", checker)) == verdict, output


@pytest.mark.parametrize(
    "fails",
    ["raise KeyError(o)", "return 1 / int(o)", "os._exit(0)", "return [0][int(o) + 9]", "return bytearray(10**10)"],
)
def test_a_checker_that_an_output_breaks_is_no_way_out(judge: Judge, fails: str) -> None:
    """Else a candidate could buy itself an infra error instead of a wrong answer."""
    checker = checker_suite(
        f"import os\ndef check(i, o, a):\n    if o == a: return 1\n    {fails}",
        ("", "1\n"),
        ("", "0\n"),
        ("", "1\n"),
        correctness="fraction",
    )
    result = judged(judge, "print(0)", checker)
    assert (short(result), result.tests_passed, result.tests_total) == ("WA", 1, 3), result


def test_a_checker_sees_input_output_and_answer_and_never_the_candidates_box(judge: Judge) -> None:
    checker = "import os\ndef check(given, output, answer): return (given, output, answer, os.listdir()) == ('in\\n', 'out\\n', 'ans', [])"
    assert (
        short(judged(judge, "open('left', 'w').close()\nprint('out')", checker_suite(checker, ("in\n", "ans")))) == "AC"
    )


def test_a_reference_that_can_not_be_used_is_refused(judge: Judge) -> None:
    good = SUITES["reference"]
    for broken in (
        {"reference": "def f(a, b"},
        {"reference": "def g(a, b): return 1"},
        {"reference": "def f(a, b): return 1 / 0"},
        {"reference": "def f(a, b): return object()"},
        {"generator": "def generate(rng): return 5"},
        {"generator": "def generate(rng): return [object(), 1]"},
        {"generator": "def other(rng): return []"},
        {"generator": "import os\ndef generate(rng): os._exit(0)"},
        {"generator": "raise SystemExit"},
    ):
        result = judged(judge, GOOD, parse_suite(good | broken))
        assert (short(result), result.reward, result.repeatable) == ("IE", None, True), (broken, result)
    assert short(judged(judge, GOOD, parse_suite(good))) == "AC"


def test_a_reference_suite_is_the_same_for_all_and_another_with_another_seed(judge: Judge) -> None:
    suites = [parse_suite(SUITES["reference"] | {"seed": seed}) for seed in (0, 1)]
    echo = "def f(a, b): return [a, b]"
    messages = [judged(judge, echo, suite).message for suite in (suites[0], suites[0], suites[1])]
    assert messages[0] == messages[1] != messages[2]


def test_a_reference_may_change_its_arguments(judge: Judge) -> None:
    suite = parse_suite({"kind": "reference", "entry_point": "f", "reference": "def f(x):\n    x.sort()\n    return x",
                         "generator": "def generate(rng): return [[rng.randrange(9) for _ in range(9)]]"})  # fmt: skip
    assert short(judged(judge, "def f(x): return sorted(x)", suite)) == "AC"
    assert short(judged(judge, "def f(x): return x", suite)) == "WA"


# --- what a node can't judge ---


def test_what_this_node_can_not_judge_is_refused_without_another_try(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = suite_of("call", limits={"memory_mib": 65536})
    monkeypatch.setattr(judge.lab, "toolchain", lambda language: Judge(RewardConfig()).lab.toolchain("go"))
    for suite, word in (
        (large, "memory_mib"),
        (suite_of("stdin", language="cpp"), "toolchain"),
        (parse_suite({"kind": "custom", "grader": "x"}), "allowed"),
    ):
        result = judged(judge, HONEST_NATIVE["cpp"] if suite.language == "cpp" else GOOD, suite, suite.language)
        assert (short(result), result.reward, result.repeatable) == ("IE", None, True)
        assert word in result.message


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        *(
            (kind, code)
            for kind in ("asserts", "check")
            for code in ("x = 1", "assert True", "assert f( ==", "import os")
        ),
        ("asserts", "def f(): pass\nassert f() is None"),
    ],
)
def test_a_suite_that_tests_nothing_is_an_infra_error(judge: Judge, kind: str, code: str) -> None:
    text = code if kind == "asserts" else "def check(candidate):\n    " + code.replace("\n", "\n    ")
    result = judged(judge, GOOD, parse_suite({"kind": kind, "entry_point": "f", "code": text}))
    assert (short(result), result.reward, result.repeatable) == ("IE", None, True), result


def test_a_suite_that_executes_no_test_is_an_infra_error(judge: Judge) -> None:
    for code in (
        "for x in []:\n    assert f(x, x)",
        "if False:\n    assert f(1, 2) == 3",
        "import no_such_module\nassert f(1, 2) == 3",
        "assert f(object(), 1)\nassert f",
        "raise KeyError\nassert f(1, 2) == 3",
    ):
        result = judged(judge, GOOD, parse_suite({"kind": "asserts", "entry_point": "f", "code": code}))
        assert short(result) != "AC", code
        assert short(result) == "IE" or "raise" in code, (code, result)


# --- parts ---


def test_readability_is_a_part_of_right_programs_only() -> None:
    with judge_at("namespaces", weights=RewardWeights(readability=0.5)) as judge:
        good = judged(judge, GOOD, suite_of("call"))
        assert good.parts["correctness"] == 1.0
        assert 0.5 < good.parts["readability"] <= 1.0
        assert 0.8 < (good.reward or 0) <= 1.0
        ugly = (
            "def f(a, b):\n    x=1;y=2;z=3;w=4;q=5;r=6;t=7;u=8;v=9;k=10;j=11;p=12\n"
            + "    if a:\n"
            + "        if b: pass\n" * 30
            + "    return a + b"
        )
        assert (judged(judge, ugly, suite_of("call")).reward or 0) < (good.reward or 0)
        wrong = judged(judge, "def f(a, b): return 0", suite_of("call"))
        assert (wrong.parts["readability"], wrong.reward) == (0.0, 0.0)
        bomb = judged(judge, GOOD + f"X = {'[' * 90}{']' * 90}\n" + "y = 1\n" * 9000, suite_of("call"))
        assert short(bomb) == "AC"


def test_efficiency_compares_with_the_solution_of_the_suite() -> None:
    slow = "def f(a, b):\n    for _ in range({}): pass\n    return a + b"
    with judge_at("namespaces", weights=RewardWeights(efficiency=1.0)) as judge:
        for kind in ("call", "inline", "stdin"):
            suite = suite_of(kind, solution=program_of(kind, slow.format(60_000)))
            fast = judge.judge(program_of(kind, GOOD), suite)
            assert (fast.parts["efficiency"], fast.reward) == (1.0, 1.0), kind
            bad = judge.judge(program_of(kind, slow.format(1_500_000)), suite)
            assert (short(bad), bad.parts["efficiency"], bad.reward) == ("AC", 0.0, 0.5), kind
            forged = judge.judge(
                program_of(
                    kind, "import time\ntime.process_time = time.perf_counter = lambda: 0\n" + slow.format(1_500_000)
                ),
                suite,
            )
            assert forged.parts["efficiency"] == 0.0, "S08"
            wrong = judge.judge(program_of(kind, "def f(a, b): return 0"), suite)
            assert (wrong.parts["efficiency"], wrong.reward) == (0.0, 0.0)
        assert "efficiency" not in judged(judge, GOOD, suite_of("call")).parts
        broken = suite_of("call", solution="def f(a, b): return 0")
        assert judged(judge, GOOD, broken).parts["efficiency"] == 0.0


# --- custom graders ---


def _graded_by_length(judge: Judge, suite: Any, code: str, graded: Any) -> None:
    graded.total = 1
    if suite.params.get("fails"):
        raise KeyError("a bug of the grader's")
    if suite.params.get("silent"):
        return
    passed = len(code) <= suite.params["max_length"]
    graded.add(Verdict.ACCEPTED if passed else Verdict.WRONG_ANSWER, "" if passed else "Too long.")


def test_a_grader_of_the_operators_own_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("length", "test_judging:_graded_by_length", "forebay.graders")
    monkeypatch.setattr(judge_module, "entry_points", lambda group: [entry] if group == "forebay.graders" else [])
    monkeypatch.setitem(sys.modules, "test_judging", sys.modules[__name__])
    with judge_at("namespaces", graders=["length", "gone"]) as judge:
        suite = {"kind": "custom", "grader": "length", "params": {"max_length": 40}}
        assert verdict_of(judge, fenced(GOOD), suite) == "AC"
        assert verdict_of(judge, fenced(GOOD * 5), suite) == "WA"
        assert verdict_of(judge, "no code", suite) == "NC"
        for params in ({"fails": 1}, {"silent": 1}):
            assert verdict_of(judge, fenced(GOOD), suite | {"params": params}) == "IE"
        for name, word in (("gone", "not installed"), ("other", "not allowed")):
            result = judged(judge, GOOD, parse_suite({"kind": "custom", "grader": name}))
            assert (short(result), word in result.message) == ("IE", True)


# --- what honest programs may do ---

_HONEST = [
    ("def f(xs):\n    xs.sort()", "a = [3, 1]\nassert f(a) is None\nassert a == [1, 3]"),
    ("def f(x):\n    if x < 0: raise ValueError('no')\n    return x",
     "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass\nassert f(2) == 2"),
    ("def g(x):\n    return x[::-1]\ndef f(x):\n    return g(g(x))", "for s in ('ab', ''):\n    assert g(f(s)) == s[::-1]"),
    ("class f:\n    def __init__(self): self.n = 0\n    def add(self, k):\n        self.n += k\n        return self.n",
     "o = f()\nassert o.add(2) == 2\nassert o.add(3) == 5"),
    ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2]"),
    ("import asyncio\nasync def g(): return 4\ndef f(): return asyncio.run(g())", "assert f() == 4"),
    ("import threading\nr = []\ndef f():\n    t = threading.Thread(target=r.append, args=(1,)); t.start(); t.join(); return r", "assert f() == [1]"),
    ("from concurrent.futures import ThreadPoolExecutor\ndef f():\n    with ThreadPoolExecutor(4) as p: return list(p.map(abs, [-1, 2]))", "assert f() == [1, 2]"),
    ("def f():\n    open('note', 'w').write('x' * 10**6)\n    return len(open('note').read())", "assert f() == 10**6"),
    ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int' = 1\ndef f(): return P().x", "assert f() == 1"),
    ("from enum import Enum\nclass E(Enum):\n    A = 1\ndef f(): return E.A.name, E['A'].value", "assert f() == ('A', 1)"),
    ("import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)", "assert f(20000) == 20000"),
    ("def f(): return exit is not None and input", "assert f()"),
    ("import pickle, copy, types\ndef f(x): return pickle.loads(pickle.dumps(copy.deepcopy(x)))", "assert f({'a': [1]}) == {'a': [1]}"),
    ("import shutil, os\ndef f():\n    open('a', 'w').write('1'); shutil.copy('a', 'b'); shutil.copy2('a', 'c'); os.chmod('a', 0o600); return sorted(os.listdir())",
     "assert f() == ['a', 'b', 'c']"),
    ("import os, signal\ndef f():\n    got = []\n    signal.signal(10, lambda n, _: got.append(n)); os.kill(os.getpid(), 10); return got", "assert f() == [10]"),
    ("import os, time\ndef f():\n    try:\n        os.kill(os.getpid(), 2); time.sleep(0.1)\n    except KeyboardInterrupt:\n        return 'interrupted'",
     "assert f() == 'interrupted'"),
    ("import zoneinfo, sqlite3, hashlib, ssl, ctypes, csv, tempfile\ndef f():\n    tempfile.TemporaryFile().close()\n    return sqlite3.connect(':memory:')"
     ".execute('select 5').fetchone()", "assert f() == (5,)"),
    ("import random\ndef f(): return random.random()", "assert f() == f() or True\nassert 0 <= f() < 1"),
]  # fmt: skip


@pytest.mark.parametrize("at", LEVELS)
@pytest.mark.parametrize(("code", "tests"), _HONEST)
def test_honest_programs_are_accepted(judge: Judge, landlocked: Judge, at: str, code: str, tests: str) -> None:
    suite = parse_suite({"kind": "asserts", "entry_point": "f", "code": tests})
    result = judged({"namespaces": judge, "landlock": landlocked}[at], code, suite)
    assert short(result) == "AC", result


def test_programs_of_other_languages_are_accepted_and_compiled_once(judge: Judge, landlocked: Judge) -> None:
    for at in (judge, landlocked):
        for language, code in HONEST_NATIVE.items():
            suite = suite_of("stdin", language=language, limits={"memory_mib": 512, "cpu_s": 2})
            first, second = judged(at, code, suite, language), judged(at, code, suite, language)
            assert (short(first), short(second)) == ("AC", "AC"), (first, second)
        native = suite_of("checker", language="cpp")
        assert short(judged(at, HONEST_NATIVE["cpp"], native, "cpp")) == "AC"
        assert short(judged(at, "int main() { return", native, "cpp")) == "CE"


def test_a_compiler_has_its_own_limits_whatever_ran_before(judge: Judge, landlocked: Judge) -> None:
    heavy = "#include <bits/stdc++.h>\nint main() { std::cout << 1; }"
    for number, at in enumerate((judge, landlocked)):
        small = stdin_suite(("1 2", "3"), language="cpp", limits={"memory_mib": 16})
        assert short(judged(at, HONEST_NATIVE["cpp"], small, "cpp")) == "AC"
        result = judged(
            at, f"{heavy} // {number}", stdin_suite(("aa", "1"), language="cpp", limits={"memory_mib": 64}), "cpp"
        )
        assert short(result) == "AC", result
