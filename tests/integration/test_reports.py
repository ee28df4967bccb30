"""Public bug reports of other judges, as tests of ours: SANDBOX 3.2 and 3.5, by number: how code is executed, and cheating.

3.1 is ``tests/unit/test_extraction.py``; 3.3 and 3.4, limits and a service's own failures, are ``test_reports_service.py``.

Each line stands for a kind of bug, so each has variations. Where our verdict is another one than the report's, the test says why.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from judge_harness import (
    GOOD,
    SUITES,
    TEXT_KINDS,
    call_suite,
    fenced,
    function,
    guests_of,
    judge_at,
    program,
    program_of,
    short,
    stdin_suite,
    suite_of,
)

from protocol.suites import parse_suite
from protocol.verdicts import JudgeResult
from services.reward.judge import Judge


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with judge_at("namespaces") as judge:
        yield judge


# --- 3.2 how the code is executed ---


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("def f(n): return 1 if n < 2 else n * f(n - 1)\nprint(f(5))", "120"),
        (
            "def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != 0 and even(n - 1)\nprint(even(10))",
            "True",
        ),
        ("import math\ndef f(): return math.floor(2.5)\nprint(f())", "2"),
        ("N = 3\nprint([N * i for i in range(N)], sorted([3, 1], key=lambda x: x * N))", "[0, 3, 6] [1, 3]"),
        ("class A:\n    def me(self): return A\nprint(A().me() is A)", "True"),
        ("x = 1\ndef f():\n    global x\n    x += 1\nf()\nprint(x, globals()['x'], 'x' in vars())", "2 2 True"),
        ("exec('y = 5')\nprint(y, eval('y + 1'))", "5 6"),
    ],
)
def test_b10_names_of_a_program_are_global(judge: Judge, code: str, output: str) -> None:
    assert program(judge, code, None, output) == "AC"
    assert function(judge, code.replace("def f(", "def g(").replace(" f(", " g(") + "\ndef f(): return 1", ([], 1)) in (
        "AC",
        "RE",
    )


@pytest.mark.parametrize("quote", ['"', "'"])
@pytest.mark.parametrize("after", ["", "\ndone = True", "\nelse:\n    print('imported')"])
def test_b11_a_main_guard_runs_in_programs_and_not_in_calls(judge: Judge, quote: str, after: str) -> None:
    code = f"if __name__ == {quote}__main__{quote}:\n    print(int(input()) * 2){after}"
    assert program(judge, code, "4", "8") == "AC"
    guarded = f"def f(x): return x\nif __name__ == {quote}__main__{quote}:\n    raise SystemExit(input()){after}"
    assert function(judge, guarded, ([3], 3)) == "AC"


def test_b11_a_program_may_look_at_its_own_main_module(judge: Judge) -> None:
    assert (
        program(
            judge,
            "import __main__, sys\nx = 3\nprint(__main__.x, sys.modules['__main__'] is __main__, sys.argv)",
            None,
            "3 True ['main.py']",
        )
        == "AC"
    )


def test_b14_one_list_argument_is_not_spread_and_a_suite_of_many_calls_stays_one_of_calls(judge: Judge) -> None:
    assert function(judge, "def f(x): return len(x)", *[([list(range(n))], n) for n in range(30)]) == "AC"
    assert (
        function(judge, "def f(*a): return len(a)", ([[1, 2, 3]], 1), ([[1], [2]], 2), ([], 0), ([None], 1), ([{}], 1))
        == "AC"
    )
    asserts = parse_suite(
        {
            "kind": "asserts",
            "entry_point": "f",
            "code": "assert f([1, 2]) == 2\nassert f((1, 2)) == 2\nassert f({1: 2}) == 1",
        }
    )
    assert short(judge.judge(fenced("def f(x): return len(x)"), asserts)) == "AC"


def test_b15_leaving_a_program_is_legal_and_leaving_a_call_is_not(judge: Judge) -> None:
    for leave in ("sys.exit()", "sys.exit(0)", "exit()", "quit()", "raise SystemExit", "os._exit(0)"):
        assert program(judge, f"import os, sys\nprint(8, flush=True)\n{leave}\nprint(9)", None, "8") == "AC", leave
    for leave in ("exit(1)", "sys.exit(1)", "sys.exit('no')", "raise SystemExit(2)", "os._exit(3)"):
        assert program(judge, f"import os, sys\nprint(8, flush=True)\n{leave}", None, "8") == "RE", leave
        assert (
            program(judge, f"import os, sys\nprint(8, flush=True)\n{leave}", None, "8", any_exit_code=True) == "AC"
        ), leave
    for leave in ("sys.exit(0)", "exit()", "os._exit(0)"):
        assert function(judge, f"import os, sys\n{leave}\ndef f(): return 1", ([], 1)) == "RE", leave


def test_b16_the_interpreter_is_a_whole_one(judge: Judge) -> None:
    assert program(judge, "print(8)\nexit()", None, "8") == "AC"
    assert (
        program(
            judge,
            "print(copyright is not None, help is not None, quit is not None, exit is not None, __name__, __builtins__ is not None)",
            None,
            "True True True True __main__ True",
        )
        == "AC"
    )
    assert (
        program(
            judge,
            "import sys\nprint(sys.flags.utf8_mode, sys.stdout.encoding, sys.stdin.encoding, len(sys.argv))",
            None,
            "1 utf-8 utf-8 1",
        )
        == "AC"
    )


def test_b18_asyncio_works_and_a_coroutine_is_no_answer(judge: Judge) -> None:
    code = "import asyncio\nasync def main():\n    await asyncio.sleep(0.01)\n    print(await asyncio.gather(a(1), a(2)))\nasync def a(x): return x\nasyncio.run(main())"
    assert program(judge, code, None, "[1, 2]") == "AC"
    assert (
        program(
            judge,
            "import asyncio\nloop = asyncio.new_event_loop()\nprint(loop.run_until_complete(asyncio.sleep(0, 3)))",
            None,
            "3",
        )
        == "AC"
    )
    assert function(judge, "async def f(x): return x", ([3], 3)) == "WA"
    assert function(judge, "async def f(x): return x", ([3], 3), await_result=True) == "AC"


def test_b19_multiprocessing_where_the_suite_allows_processes(judge: Judge) -> None:
    code = "from multiprocessing import Pool, Queue, Lock, Value\ndef sq(x): return x * x\nif __name__ == '__main__':\n    lock, value, queue = Lock(), Value('i', 3), Queue()\n    with Pool(2) as pool: print(sum(pool.map(sq, range(4))), value.value)"
    assert program(judge, code, None, "14 3", limits={"processes": 8, "cpu_s": 4}) == "AC"
    result = judge.judge(fenced(code), stdin_suite((None, "14 3"), limits={"wall_s": 3}))
    assert short(result) == "RE"
    assert "PermissionError" in result.message


def test_b20_numpy_starts_within_the_limits_and_is_not_charged(judge: Judge) -> None:
    probe = judge.judge(fenced("import numpy"), stdin_suite((None, "")))
    if "No module" in probe.message:
        pytest.skip("the sandbox's interpreter has no numpy")
    code = "import numpy as np\nprint(int(np.arange(10).sum()))"
    assert program(judge, code, None, "45", limits={"memory_mib": 256, "cpu_s": 0.3}) == "AC"


_READERS = [
    "import sys\nprint(len(sys.stdin.buffer.read()))",
    "import sys\nn = len(input()) + 1\nn += len(sys.stdin.readline())\nfor line in sys.stdin: n += len(line)\nprint(n)",
    "print(len(open(0).read()))",
    "print(len(open('/dev/stdin').read()))",
    "import os\nprint(len(os.read(0, 10**6)))",
    "import sys, os\nprint(len(os.read(sys.stdin.fileno(), 10**6)))",
    "import fileinput\nprint(sum(len(line) for line in fileinput.input()))",
    "import sys\nprint(sum(map(len, iter(sys.stdin.readline, ''))))",
    "import sys, io\nprint(len(io.TextIOWrapper(sys.stdin.buffer).read()))",
    "import sys\nprint(sum(len(line) for line in sys.stdin.readlines()))",
    "import sys, mmap, select\nselect.select([0], [], [])\nprint(len(sys.stdin.read()))",
    "import sys\nn = 0\ntry:\n    while True: n += len(input()) + 1\nexcept EOFError: print(n)",
    "import sys\ninput = sys.stdin.readline\nprint(len(input()) + len(sys.stdin.read()))",
]


@pytest.mark.parametrize("code", _READERS)
def test_b21_standard_input_is_a_real_descriptor(judge: Judge, code: str) -> None:
    at_level = (
        "/dev/stdin" in code
    )  # there is no /proc in the sandbox for it to lead to: a file error, and so is documented
    assert program(judge, code, "ab\ncd\nef\n", "9") == ("RE" if at_level else "AC")


def test_b23_no_input_is_empty_and_never_the_word_none(judge: Judge) -> None:
    for text in (None, ""):
        assert program(judge, "import sys\nprint(len(sys.stdin.read()))", text, "0") == "AC"
        assert program(judge, "try: input()\nexcept EOFError: print('end')", text, "end") == "AC"


def test_b24_a_program_may_end_before_it_has_read_its_input(judge: Judge) -> None:
    large = "x" * 5_000_000
    assert program(judge, "print(1)", large, "1") == "AC"
    assert program(judge, "import sys\nsys.stdin.read(1)\nprint(1)", large, "1") == "AC"
    assert program(judge, "import os\nos.close(0)\nprint(1)", large, "1") == "AC"
    assert program(judge, "print(1", large, "1") == "CE"
    assert program(judge, "raise ValueError", large, "1") == "RE"
    assert program(judge, "while True: pass", large, "1", limits={"cpu_s": 0.1}) == "TLE"
    assert program(judge, "import sys\nprint(len(sys.stdin.read()))", large, "5000000") == "AC"
    suite = stdin_suite((large, "1"), language="cpp")
    assert short(judge.judge(fenced('#include <cstdio>\nint main() { puts("1"); }', "cpp"), suite)) == "AC"
    suite = stdin_suite((large, "1"), language="javascript")
    assert short(judge.judge(fenced("console.log(1)", "javascript"), suite)) == "AC"


@pytest.mark.parametrize(
    "text", ["a\n\nb", "a\n\nb\n", "\n", " \t ", "\n\n\na", "a\r\nb\r\n", "\x00\x01", "é\u2028ü\U0001f600", "\ufeff1"]
)
def test_b25_input_arrives_as_it_stands(judge: Judge, text: str) -> None:
    assert program(judge, "import sys\nprint(sys.stdin.buffer.read())", text, repr(text.encode())) == "AC"


def test_b27_blanks_separate_tokens_and_a_line_break_does_only_in_token_mode(judge: Judge) -> None:
    assert program(judge, "print('5 3 1 ')\nprint('2\\t')", None, "5 3 1\n2") == "AC"
    assert program(judge, "print('5 3 1')\nprint('2')", None, "5 3 1 \n2 ") == "AC"
    assert program(judge, "for x in (1, 1, 2): print(x)", None, "1 1 2") == "WA"
    assert program(judge, "for x in (1, 1, 2): print(x)", None, "1 1 2", compare={"whitespace": "tokens"}) == "AC"
    assert program(judge, "print('11 2')", None, "1 1 2", compare={"whitespace": "tokens"}) == "WA"


def test_b28_the_final_newline_does_not_count(judge: Judge) -> None:
    for end in ("", "\\n", "\\n\\n\\n", "\\r\\n"):
        assert program(judge, f"print('a\\nb', end='{end}')", None, "a\nb\n") == "AC"
        assert program(judge, f"print('a\\nb', end='{end}')", None, "a\nb") == "AC"


@pytest.mark.parametrize(
    ("expected", "output", "verdict"),
    [
        ("0.333333333", "0.33333333331", "AC"),
        ("0.0", "1e-12", "AC"),
        ("0.0", "-0.0", "AC"),
        ("YES 0.5", "YES 0.5000001", "AC"),
        ("1e300", "1.0000000001e300", "AC"),
        ("1.0 2.0 3.0", "1 2 3", "AC"),
        ("2.0", "2.1", "WA"),
        ("1.0", "nan", "WA"),
        ("1.0", "inf", "WA"),
        ("1000.0", "1_000.0", "WA"),
        ("16.0", "0x10", "WA"),
        ("1.0", "True", "WA"),
        ("1", "1.0", "WA"),
        ("1", "1.0000000001", "WA"),
        ("1000000000000000001", "1000000000000000000", "WA"),
        ("007", "7", "WA"),
    ],
)
def test_b29_s43_floats_have_a_tolerance_and_integers_are_exact(
    judge: Judge, expected: str, output: str, verdict: str
) -> None:
    assert program(judge, f"print({output!r})", None, expected) == verdict


def test_b29_lists_of_floats_have_the_tolerance_too(judge: Judge) -> None:
    assert function(judge, "def f(): return [0.1 + 0.2, {'a': 1/3}]", ([], [0.3, {"a": 0.333333333}])) == "AC"
    assert function(judge, "def f(): return [0.31, {'a': 1/3}]", ([], [0.3, {"a": 0.333333333}])) == "WA"


def test_b30_several_right_answers_are_for_a_checker(judge: Judge) -> None:
    checker = {
        "kind": "checker",
        "checker": "def check(i, o, a): return int(o) != sum(map(int, i.split()))",
        "cases": [{"input": "1 2"}, {"input": "4 5"}],
    }
    for value, verdict in (("9999", "AC"), ("2", "AC"), ("3", "WA"), ("9", "WA"), ("''", "WA"), ("'two'", "WA")):
        assert short(judge.judge(fenced(f"print({value})"), parse_suite(checker))) == verdict
    assert program(judge, "print(9)", "1 2", "2") == "WA"


@pytest.mark.parametrize(
    "output", ["1", "", "1\n2", "1\n2\n3\n4", "1 2 3", "1\n2\n3 4", "12\n3", "123", "1\n\n2\n3", "1\n2\n33"]
)
def test_b31_s58_all_of_the_answer_and_no_more(judge: Judge, output: str) -> None:
    assert program(judge, f"print({output!r})", None, "1\n2\n3") == "WA"


def test_b31_a_word_within_a_word_is_another_word(judge: Judge) -> None:
    for output in ("invalid", "vali", "valid valid", "valid.", "\x00valid"):
        assert program(judge, f"print({output!r})", None, "valid") == "WA"
    assert function(judge, "def f(): return 'invalid'", ([], "valid")) == "WA"
    assert function(judge, "def f(): return [1, 2]", ([], [1, 2, 3])) == "WA"
    assert function(judge, "def f(): return []", ([], [1])) == "WA"
    assert function(judge, "def f(): return {}", ([], {"a": 1})) == "WA"


@pytest.mark.parametrize(
    ("value", "expected", "as_json", "as_python"),
    [
        ("(1, 2)", [1, 2], "AC", "WA"),
        ("{1: 2}", {"1": 2}, "AC", "WA"),
        ("True", 1, "WA", "WA"),
        ("1", True, "WA", "WA"),
        ("1.0", 1, "AC", "AC"),
        ("1", 1.0, "AC", "AC"),
        ("{'b': 1, 'a': 2}", {"a": 2, "b": 1}, "AC", "AC"),
        ("'1'", 1, "WA", "WA"),
        ("None", "None", "WA", "WA"),
        ("None", False, "WA", "WA"),
        ("0", False, "WA", "WA"),
        ("''", None, "WA", "WA"),
        ("'[1, 2]'", [1, 2], "WA", "WA"),
        ("{1, 2}", [1, 2], "WA", "WA"),
        ("[[1], (2,)]", [[1], [2]], "AC", "WA"),
        ("iter([1, 2])", [1, 2], "WA", "WA"),
        ("range(2)", [0, 1], "WA", "WA"),
    ],
)
def test_b32_values_are_compared_by_type(judge: Judge, value: str, expected: Any, as_json: str, as_python: str) -> None:
    assert function(judge, f"def f(): return {value}", ([], expected)) == as_json
    assert function(judge, f"def f(): return {value}", ("[]", repr(expected)), values="python") == as_python


def test_b34_recursion_as_deep_as_the_program_asks_for(judge: Judge) -> None:
    deep = "import sys\nsys.setrecursionlimit(10**6)\nn = 0\ndef dfs(k):\n    return 0 if k == 0 else 1 + dfs(k - 1)\nprint(dfs(50_000))"
    assert program(judge, deep, None, "50000") == "AC"
    threaded = (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\ndef dfs(k):\n    return 0 if k == 0 else 1 + dfs(k - 1)\n"
        "t = threading.Thread(target=lambda: print(dfs(50_000)))\nt.start()\nt.join()"
    )
    assert program(judge, threaded, None, "50000") == "AC"
    assert (
        program(judge, "def dfs(k): return 0 if k == 0 else 1 + dfs(k - 1)\nprint(dfs(5_000))", None, "5000") == "RE"
    )  # the limit is Python's own
    crash = "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n    def __getattr__(self, n): return getattr(self, n + 'x')\nA().x"
    result = judge.judge(fenced(crash), stdin_suite((None, ""), limits={"cpu_s": 5}))
    assert short(result) in ("RE", "MLE"), result


@pytest.mark.parametrize("data", [r"\xff\xfe3\n", r"3\n\x80", r"\xed\xa0\x80", r"3\xc3"])
def test_b35_output_that_is_no_text_is_wrong(judge: Judge, data: str) -> None:
    assert program(judge, f"import sys\nsys.stdout.buffer.write(b'{data}')", None, "3") == "WA"


def test_s39_s40_text_that_is_hard_to_carry(judge: Judge) -> None:
    assert program(judge, "print('3\\0')", None, "3") == "WA"
    assert program(judge, "print('\\0')", None, "\0") == "AC"
    assert program(judge, "print('\\ud800')", None, "3") == "RE"
    result = judge.judge(fenced("raise ValueError('\\ud800\\0')"), stdin_suite((None, "3")))
    assert (short(result), "\ud800" in result.message) == ("RE", False)
    assert JudgeResult.model_validate_json(result.model_dump_json()) == result
    for code in (
        "def f(): return 'x\\ud800'",
        "def f(): raise KeyError('\\udfff')",
        "def f(): return {'\\ud800': '\\0'}",
    ):
        result = judge.judge(fenced(code), call_suite(([], 1)))
        assert short(result) in ("WA", "RE")
        assert JudgeResult.model_validate_json(result.model_dump_json()) == result


@pytest.mark.parametrize("code", ["x = 1\0", "\0", "'\0'", "# \0", "x = 1\n\0\nprint(x)"])
def test_b37_a_nul_in_the_source_is_a_compile_error(judge: Judge, code: str) -> None:
    for kind in ("call", "stdin", "inline"):
        assert short(judge.judge(fenced(f"{GOOD}\nprint(1)\n{code}"), suite_of(kind))) == "CE"


def test_b39_nothing_of_the_judge_gets_into_the_output(judge: Judge) -> None:
    """100 of the 10,000: what could print is the same in each."""
    suite = stdin_suite((None, ""), compare={"whitespace": "exact"})
    assert {short(judge.judge(fenced(f"input_ = '{n}'"), suite)) for n in range(100)} == {"AC"}
    assert program(judge, "print(end='')", None, "", compare={"whitespace": "exact"}) == "AC"
    assert program(judge, "print()", None, "", compare={"whitespace": "exact"}) == "WA"


def test_b40_output_is_taken_while_the_program_runs(judge: Judge) -> None:
    five = "x" * 99 + "\n"
    assert program(judge, "print(('x' * 99 + '\\n') * 50_000)", None, five * 50_000) == "AC"
    limits = {"output_kib": 6000}
    assert program(judge, "import sys\nsys.stderr.write('e' * 5_000_000)\nprint(1)", None, "1", limits=limits) == "AC"
    assert (
        program(
            judge,
            "import sys\nfor _ in range(50): sys.stderr.write('e' * 10**5); sys.stdout.write('o' * 10**5)",
            None,
            "o" * 5_000_000,
            limits=limits,
        )
        == "AC"
    )
    assert function(judge, "def f():\n    print('x' * 5_000_000)\n    return 1", ([], 1), limits=limits) == "AC"
    echo = "import sys\nfor line in sys.stdin: sys.stdout.write(line)"
    assert program(judge, echo, five * 50_000, five * 50_000) == "AC"


# --- 3.5 cheating and unsafe judging: most of it is in test_attacks.py ---


def test_b72_a_decorator_does_not_reach_the_test_function(judge: Judge) -> None:
    for end in (
        "@",
        "@property",
        "@staticmethod\n",
        "@lambda f: (lambda *a: None)",
        "def g():",
        "if True:",
        "class T:",
        "try:",
    ):
        for kind in ("inline", "remote", "call"):
            assert short(judge.judge(fenced(f"def f(a, b): return 0\n{end}"), suite_of(kind))) == "CE", end


def test_b73_s38_success_that_is_printed_or_written_is_none(judge: Judge) -> None:
    for text in ("PASSED", "test_f PASSED [100%]", "OK", "1.0", '{"reward": 1}', "nan", "inf", "Infinity"):
        code = f"for name in ('reward.txt', 'result.json', '/tmp/reward'):\n    open(name, 'w').write({text!r})\nprint({text!r})\ndef f(a, b): return {text!r}"
        for kind in SUITES:
            result = judge.judge(program_of(kind, code), suite_of(kind))
            assert (short(result), result.reward) == ("WA", 0.0)


def test_b74_files_named_like_modules_of_the_judge_have_no_effect(judge: Judge) -> None:
    code = "for n in ('conftest', 'sitecustomize', 'random', 'collections', 'json', 'solution', 'tests', 'decimal', 'asyncio'):\n    open(f'{n}.py', 'w').write('raise SystemExit(0)')\n"
    for kind in SUITES:
        assert short(judge.judge(program_of(kind, code + "def f(a, b): return 0"), suite_of(kind))) == "WA"
        assert short(judge.judge(program_of(kind, code + GOOD), suite_of(kind))) == "AC"
    assert function(judge, code + "async def f(): return 3", ([], 3), await_result=True) == "AC"


def test_b75_s57_a_suite_without_tests_or_that_is_none_is_refused(judge: Judge) -> None:
    for broken in (
        {"kind": "call", "entry_point": "f", "cases": []},
        {"kind": "stdin", "cases": []},
        {"kind": "checker", "checker": "def check(i, o, a): return 1", "cases": []},
        {"kind": "reference", "entry_point": "f", "reference": "x", "generator": "x", "num_cases": 0},
        {"kind": "asserts", "entry_point": "f", "code": ""},
        {"kind": "stdin", "cases": None},
        {"kind": "other"},
        {},
    ):
        with pytest.raises(ValueError, match=r"cases|num_cases|code|kind"):
            parse_suite(broken)
    for data in (b"\xff", b"{", b"null", b"[]", b'"x"', b"x\x9c\x00"):
        with pytest.raises(ValueError, match=r"."):
            parse_suite(data)
    for undecodable in ("[", "{1: }", "f(x)", "object()", "__import__('os')", "1 +"):
        result = judge.judge(fenced("def f(*a): return 1"), call_suite(("[]", undecodable), values="python"))
        assert (short(result), result.reward) == ("IE", None), undecodable


def test_b77_b78_the_service_runs_what_it_judges_as_nobody(judge: Judge) -> None:
    code = "import os\nprint(os.getuid() not in (0,), os.geteuid() == os.getuid(), os.path.exists('/etc/passwd'))"
    assert program(judge, code, None, "True True False") == "AC"


def test_b80_s59_what_is_for_the_owner_of_the_suite_is_marked_so() -> None:
    """Ours is single-turn: no reply goes back to a policy, and the fields that hold test data say that they must not."""
    assert "policy" in (sys.modules["protocol.verdicts"].TestResult.__doc__ or "")


def test_b81_solutions_of_a_suite_are_tried_against_it(judge: Judge) -> None:
    """``forebay data check`` does so for a file: tests/integration/test_data_check.py."""
    for kind in SUITES:
        suite = suite_of(kind)
        assert {short(judge.judge(program_of(kind, GOOD), suite)) for _ in range(3)} == {"AC"}


def test_nothing_is_left_after_all_of_this(judge: Judge) -> None:
    assert guests_of(judge) == []
    assert set(TEXT_KINDS) <= set(SUITES)
