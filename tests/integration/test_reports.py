"""Public bug reports of other judges, as tests of ours: SANDBOX 3.2 to 3.5, by number. 3.1 is ``tests/unit/test_extraction.py``.

Each line stands for a kind of bug, so each has variations. Where our verdict is another one than the report's, the test says why.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from judge_harness import (
    GOOD,
    OVERSHOOT_S,
    ROOT,
    SUITES,
    TEXT_KINDS,
    children_of,
    descendants_of,
    fenced,
    guests_of,
    is_alive,
    judge_at,
    program_of,
    short,
    suite_of,
)

from protocol.suites import TestSuite, parse_suite
from protocol.verdicts import JudgeResult, Verdict
from services.reward.config import RewardConfig
from services.reward.judge import Judge
from services.reward.pool import JudgePool

NUM_WORKERS = 2


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with judge_at("namespaces") as judge:
        yield judge


@pytest.fixture(scope="module")
def temp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The judges' folder for temporary files: other judges of this machine use another."""
    path = tmp_path_factory.mktemp("judges")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(path))
        yield path


@pytest.fixture(scope="module")
def pool(temp: Path) -> Iterator[JudgePool]:
    with judge_at("namespaces"):  # skips where that does not work
        pool = JudgePool(RewardConfig(workers=NUM_WORKERS, cache_size=0))
    pool.start()
    yield pool
    pool.close()
    assert list(temp.iterdir()) == []


def stdin_suite(text: str | None, output: str, **more: Any) -> TestSuite:
    return parse_suite({"kind": "stdin", "cases": [{"input": text, "output": output}]} | more)


def call_suite(*cases: Any, **more: Any) -> TestSuite:
    made = [{"args": args, "expected": expected} for args, expected in cases]
    return parse_suite({"kind": "call", "entry_point": "f", "cases": made} | more)


def program(judge: Judge, code: str, text: str | None, output: str, **more: Any) -> str:
    """The verdict on a whole program."""
    return short(judge.judge(fenced(code), stdin_suite(text, output, **more)))


def function(judge: Judge, code: str, *cases: Any, **more: Any) -> str:
    """The verdict on a function ``f``."""
    return short(judge.judge(fenced(code), call_suite(*cases, **more)))


def unique(code: str, number: int) -> str:
    """The same program, and another text: no verdict is shared with it."""
    return f"# {number}\n{code}"


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
    result = judge.judge(fenced(code), stdin_suite(None, "14 3", limits={"wall_s": 3}))
    assert short(result) == "RE"
    assert "PermissionError" in result.message


def test_b20_numpy_starts_within_the_limits_and_is_not_charged(judge: Judge) -> None:
    probe = judge.judge(fenced("import numpy"), stdin_suite(None, ""))
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
    suite = stdin_suite(large, "1", language="cpp")
    assert short(judge.judge(fenced('#include <cstdio>\nint main() { puts("1"); }', "cpp"), suite)) == "AC"
    suite = stdin_suite(large, "1", language="javascript")
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
    result = judge.judge(fenced(crash), stdin_suite(None, "", limits={"cpu_s": 5}))
    assert short(result) in ("RE", "MLE"), result


@pytest.mark.parametrize("data", [r"\xff\xfe3\n", r"3\n\x80", r"\xed\xa0\x80", r"3\xc3"])
def test_b35_output_that_is_no_text_is_wrong(judge: Judge, data: str) -> None:
    assert program(judge, f"import sys\nsys.stdout.buffer.write(b'{data}')", None, "3") == "WA"


def test_s39_s40_text_that_is_hard_to_carry(judge: Judge) -> None:
    assert program(judge, "print('3\\0')", None, "3") == "WA"
    assert program(judge, "print('\\0')", None, "\0") == "AC"
    assert program(judge, "print('\\ud800')", None, "3") == "RE"
    result = judge.judge(fenced("raise ValueError('\\ud800\\0')"), stdin_suite(None, "3"))
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
    suite = stdin_suite(None, "", compare={"whitespace": "exact"})
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


# --- 3.3 limits and time ---

_BURN = "import time\nstart = time.process_time()\nwhile time.process_time() < start + {}: pass\n"


def test_b41_b43_short_cpu_limits_hold_under_load(pool: JudgePool) -> None:
    """B41: 30 ms of CPU under a limit of 80 ms, 64 at once beside four processes that burn, some of which wait for a CPU for seconds;
    B43: a start costs nothing."""
    suite = stdin_suite(None, "1", limits={"cpu_s": 0.08, "wall_s": 0.5})
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        working = [pool.submit(fenced(unique(_BURN.format(0.03) + "print(1)", n)), suite) for n in range(64)]
        starting = [
            pool.submit(
                fenced(unique("import json, re, collections, random, decimal\nprint(1)", n)),
                stdin_suite(None, "1", limits={"cpu_s": 0.05}),
            )
            for n in range(32)
        ]
        verdicts = [short(future.result()) for future in working + starting]
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert verdicts == ["AC"] * 96


def test_b42_sleeping_costs_no_cpu_and_burning_does(judge: Judge) -> None:
    limits = {"cpu_s": 0.2, "wall_s": 2.0}
    assert program(judge, "import time\ntime.sleep(0.3)\nprint(1)", None, "1", limits=limits) == "AC"
    result = judge.judge(fenced(_BURN.format(0.5) + "print(1)"), stdin_suite(None, "1", limits=limits))
    assert short(result) == "TLE"
    assert 0.15 < result.cpu_s < 0.2 + OVERSHOOT_S
    assert "cpu" in result.message
    result = judge.judge(
        fenced("import time\ntime.sleep(9)"), stdin_suite(None, "1", limits={"cpu_s": 0.2, "wall_s": 0.3})
    )
    assert (short(result), "wall" in result.message) == ("TLE", True)


@pytest.mark.parametrize(
    "expression",
    ["max(itertools.product(range(9), repeat=12))", "sum(range(10**12))", "sorted(itertools.repeat(1))", "list(range(10**7)).count('x' * 10) or pow(7, 10**9)", "re.match('(a|a)*$', 'a' * 60 + 'b')"],
)  # fmt: skip
def test_b44_a_call_into_c_ends_at_the_limit(judge: Judge, expression: str) -> None:
    for kind in ("call", "stdin"):
        code = f"import itertools, re\ndef f(a, b): return {expression}"
        result = judge.judge(program_of(kind, code), suite_of(kind, limits={"cpu_s": 0.2, "memory_mib": 1024}))
        assert short(result) == "TLE", result
        assert result.cpu_s < 0.2 + OVERSHOOT_S


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf"), "fast", [], 10**9])
@pytest.mark.parametrize("name", ["cpu_s", "wall_s", "memory_mib", "output_kib", "processes", "stack_mib"])
def test_b45_a_limit_that_is_none_is_refused(name: str, limit: Any) -> None:
    with pytest.raises(ValueError, match=f"limits.{name}|NaN"):
        parse_suite(SUITES["call"] | {"limits": {name: limit}})


def test_b45_limits_hold_and_there_are_defaults(judge: Judge) -> None:
    loop = fenced("def f(a, b):\n    while True: pass")
    for limits in ({"cpu_s": 0.1}, {"cpu_s": "0.1"}, {"cpu_s": 5, "wall_s": 0.2}):
        assert short(judge.judge(loop, parse_suite(SUITES["call"] | {"limits": limits}))) == "TLE"
    assert parse_suite(SUITES["call"]).limits.cpu_s == 2.0  # B48 waits for it
    with pytest.raises(ValueError, match="limits"):
        parse_suite(SUITES["call"] | {"limits": {"timeout": 1}})  # an unknown name is no limit


def test_b46_what_the_judge_has_in_memory_is_none_of_the_candidates(judge: Judge) -> None:
    ballast = bytearray(1 << 30)
    ballast[:: 1 << 12] = b"x" * len(range(0, len(ballast), 1 << 12))
    fresh = Judge(RewardConfig(), levels=("namespaces",))
    fresh.start()
    try:
        result = fresh.judge(fenced("print(1)"), stdin_suite(None, "1", limits={"memory_mib": 64}))
        assert short(result) == "AC", result
        assert result.memory_mib < 64
    finally:
        fresh.close()
        del ballast


def test_b47_a_service_that_is_limited_itself_still_judges() -> None:
    script = (
        "import sys\nfrom services.reward.judge import Judge\nfrom services.reward.config import RewardConfig\nfrom protocol.suites import parse_suite\n"
        "judge = Judge(RewardConfig(), levels=(sys.argv[1],)); judge.start()\n"
        "suite = parse_suite({'kind': 'stdin', 'cases': [{'input': '', 'output': '1'}], 'limits': {'stack_mib': 512}})\n"
        "print('verdict', judge.judge('```python\\nprint(1)\\n```', suite).verdict); judge.close()"
    )
    for level in ("namespaces", "landlock"):
        command = f'ulimit -s 8192 && ulimit -n 128 && ulimit -f 1000000 && exec {sys.executable} -c "$1" {level}'
        done = subprocess.run(
            ["bash", "-c", command, "bash", script], cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert "verdict accepted" in done.stdout, (done.stdout, done.stderr)


def test_b48_there_are_limits_without_being_asked_for(judge: Judge) -> None:
    assert function(judge, "def f():\n    while True: pass", ([], 1)) == "TLE"
    assert function(judge, "def f():\n    x = [0] * 10**11", ([], 1)) == "MLE"
    assert program(judge, "while True: print('x' * 10**5)", None, "1") == "OLE"


def test_b50_b57_the_exit_status_is_reported(judge: Judge) -> None:
    for code, words in (
        ("raise SystemExit(3)", "code 3"),
        ("import os; os._exit(255)", "code 255"),
        ("import os; os.kill(os.getpid(), 11)", "signal 11"),
        ("import os; os.kill(os.getpid(), 15)", "signal 15"),
        ("import os; os.abort()", "signal 6"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
        ("raise ValueError('no')", "ValueError: no"),
    ):
        result = judge.judge(fenced(code), stdin_suite(None, "1"))
        assert (short(result), words in result.message) == ("RE", True), result
    for code, words in (
        ("os.abort()", "signal 6"),
        ("os.kill(os.getpid(), 11)", "signal 11"),
        ("os._exit(4)", "code 4"),
    ):
        result = judge.judge(fenced(f"import os\ndef f(): {code}"), call_suite(([], 1)))
        assert (short(result), words in result.message) == ("RE", True), result


def test_b51_a_missing_toolchain_is_no_compile_error(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    bare = Judge(RewardConfig(), levels=("namespaces",))
    bare.start()
    try:
        for language in ("cpp", "javascript"):
            result = bare.judge(
                fenced("console.log(1); // int main() {}", language), stdin_suite(None, "1", language=language)
            )
            assert (short(result), result.reward, result.repeatable) == ("IE", None, True)
            assert "toolchain" in result.message
        assert program(bare, "print(1)", None, "1") == "AC"
    finally:
        bare.close()


def test_b53_a_hundred_files_may_be_open(judge: Judge) -> None:
    assert program(judge, "files = [open(f'{n}', 'w') for n in range(200)]\nprint(len(files))", None, "200") == "AC"
    assert (
        program(
            judge,
            "import tempfile\nfiles = [tempfile.TemporaryFile() for _ in range(100)]\nprint(len(files))",
            None,
            "100",
        )
        == "AC"
    )
    result = judge.judge(fenced("files = [open(f'{n}', 'w') for n in range(999)]"), stdin_suite(None, ""))
    assert (short(result), "Errno 24" in result.message) == ("RE", True)


# --- 3.4 processes, leaks, service behaviour ---


class Baseline:
    """What a service must have back after its work: processes, descriptors, memory, folders, groups, mounts."""

    def __init__(self, temp: Path) -> None:
        self.temp = temp
        self.pids = sorted(descendants_of(os.getpid()))
        self.descriptors = {pid: self._num_descriptors(pid) for pid in (os.getpid(), *self.pids)}
        self.rss_mib = {pid: self._rss_mib(pid) for pid in self.pids}
        self.boxes = sorted(temp.rglob("*"))
        self.mounts = len(Path("/proc/self/mounts").read_text().splitlines())
        self.groups = sorted(
            path for top in Path("/sys/fs/cgroup").glob("*") for path in top.rglob(f"forebay-*{os.getpid()}*")
        )

    @staticmethod
    def _num_descriptors(pid: int) -> int:
        with contextlib.suppress(OSError):
            return len(os.listdir(f"/proc/{pid}/fd"))
        return -1

    @staticmethod
    def _rss_mib(pid: int) -> float:
        with contextlib.suppress(OSError):
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20
        return -1

    def assert_same(self) -> None:
        now = Baseline(self.temp)
        assert now.pids == self.pids
        assert not [pid for pid in now.pids if not is_alive(pid)], "zombies"
        assert now.boxes == self.boxes
        assert now.mounts == self.mounts
        assert now.groups == self.groups
        for pid, count in now.descriptors.items():
            assert count <= self.descriptors[pid] + 3, pid
        for pid, rss in now.rss_mib.items():
            assert rss < self.rss_mib[pid] * 1.3 + 20, pid


def test_b55_b58_b64_to_b67_nothing_grows(pool: JudgePool, temp: Path) -> None:
    """At sizes that fit: 30 time limits instead of 1,000, each at 50 ms; 64 good jobs; 300 that write 1 MB, a third of them killed; 200 that
    are given up. All the kinds of worker are up before the baseline is taken."""
    loop, good = "def f(a, b):\n    while True: pass", GOOD
    tiny = {"cpu_s": 0.05, "wall_s": 1.0}
    suites = {kind: suite_of(kind) for kind in SUITES}

    def good_jobs(start: int, count: int) -> list[Future[JudgeResult]]:
        kinds = list(suites)
        return [
            pool.submit(program_of(kinds[n % 6], unique(good, start + n)), suites[kinds[n % 6]]) for n in range(count)
        ]

    assert {short(future.result()) for future in good_jobs(0, 60)} == {"AC"}
    before = Baseline(temp)

    slow = [
        pool.submit(program_of(kind, unique(loop, n)), suite_of(kind, limits=tiny))
        for n in range(15)
        for kind in ("call", "stdin")
    ]
    assert {short(future.result()) for future in slow} == {"TLE"}, "B55"
    before.assert_same()
    assert {short(future.result()) for future in good_jobs(100, 64)} == {"AC"}, "B64"

    write = "open('x', 'wb').write(bytes(1 << 20))\n"
    ends = ["print(1)", "import os\nos.kill(os.getpid(), 9)", "raise KeyError"]
    writers = [pool.submit(fenced(unique(write + ends[n % 3], n)), stdin_suite(None, "1")) for n in range(300)]
    counts = [short(future.result()) for future in writers]
    assert (counts.count("AC"), counts.count("RE")) == (100, 200), "B66"
    before.assert_same()

    given_up, cancelled = [], 0
    for n in range(200):
        given_up.append(pool.submit(program_of("call", unique(loop, 1000 + n)), suite_of("call", limits=tiny)))
        cancelled += given_up[-1].cancel()  # at once: but for the few that a judge has just taken
    assert cancelled > 150
    assert {short(future.result()) for future in given_up if not future.cancelled()} <= {"TLE"}
    assert {short(future.result()) for future in good_jobs(300, 12)} == {"AC"}, "B58"
    before.assert_same()
    assert pool.counters()["queued"] == 0


def test_b66_a_box_that_is_a_folder_of_the_host_is_emptied_and_removed(temp: Path) -> None:
    """Level ``landlock``."""
    with judge_at("landlock"):
        pool = JudgePool(RewardConfig(workers=1, cache_size=0), levels=("landlock",))
    before = set(temp.iterdir())
    pool.start()
    try:
        ends = ["print(1)", "import os\nos.kill(os.getpid(), 9)", "while True: pass"]
        write = "import os\nopen('x', 'wb').write(bytes(1 << 20))\nos.makedirs('a/b/c')\n"
        suite = stdin_suite(None, "1", limits={"cpu_s": 0.05})
        jobs = [pool.submit(fenced(unique(write + ends[n % 3], n)), suite) for n in range(45)]
        assert {short(job.result()) for job in jobs} == {"AC", "RE", "TLE"}
        boxes = set(temp.iterdir()) - before
        assert 1 <= len(boxes) <= 3
        assert [path for box in boxes for path in box.rglob("*")] == []
    finally:
        pool.close()
    assert set(temp.iterdir()) == before


def test_b56_b59_b60_jobs_may_come_from_any_thread_while_others_hold_locks(pool: JudgePool) -> None:
    """200 of the 10,000. The judges are processes of their own: no thread or lock of ours is ever forked."""
    stop = threading.Event()
    lock = threading.Lock()

    def busy() -> None:
        while not stop.is_set():
            with lock:
                print(end="")

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    futures: list[Future[JudgeResult]] = []
    try:
        for n in range(200):
            submitter = threading.Thread(
                target=lambda n=n: futures.append(
                    pool.submit(program_of("call", unique(GOOD, 5000 + n)), suite_of("call"))
                )
            )
            submitter.start()
            submitter.join()
        assert {short(future.result()) for future in futures} == {"AC"}
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def judge_processes() -> list[int]:
    found = []
    for pid in children_of(os.getpid()):
        with contextlib.suppress(OSError):
            if b"services.reward.judge_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.parametrize("victim", ["worker", "init", "judge"])
def test_b61_a_killed_worker_or_judge_costs_no_reward(victim: str) -> None:
    with judge_at("namespaces"):
        pool = JudgePool(RewardConfig(workers=1))
    others = set(judge_processes())
    pool.start()
    try:
        mine = next(pid for pid in judge_processes() if pid not in others)
        slow = "import time\ndef f(a, b):\n    time.sleep(2)\n    return a + b"
        running = pool.submit(program_of("call", slow), suite_of("call", fresh_process=False, limits={"wall_s": 9}))
        worker = wait_for(lambda: next((pid for pid in children_of(mine) if len(descendants_of(pid)) >= 2), None))
        init = children_of(worker)[0]
        os.kill({"worker": worker, "init": init, "judge": mine}[victim], signal.SIGKILL)
        result = running.result(timeout=200)
        assert (short(result), result.reward, result.attempt) == ("AC", 1.0, 2), result
        assert short(pool.judge(program_of("stdin", GOOD), suite_of("stdin"))) == "AC"
        gone = {"worker": [worker, init], "init": [worker, init], "judge": [mine, worker, init]}[victim]
        wait_for(lambda: not any(map(is_alive, gone)) or None)
    finally:
        pool.close()


def wait_for(condition: Any, timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while (found := condition()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_b61_a_full_disk_is_not_the_candidates_fault(judge: Judge) -> None:
    """The box is memory of the sandbox, so a full disk of the host does not reach it. What is short of memory for good is an infra error."""
    boxed = "import os\nopen('x', 'wb').write(bytes(1 << 20))\nprint(os.statvfs('.').f_bavail * os.statvfs('.').f_bsize > 1 << 20)"
    assert program(judge, boxed, None, "True") == "AC"
    result = judge.judge(fenced("print(1)"), stdin_suite(None, "1", limits={"memory_mib": 65536}))
    assert (short(result), result.reward) == ("IE", None)


def test_b61_a_worker_that_can_not_be_had_is_an_infra_error_and_comes_back(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = Judge(RewardConfig(), levels=("namespaces",))
    fresh.start()
    try:
        fresh.lab.drop()
        with monkeypatch.context() as broken:
            broken.setattr(fresh.lab, "_config", RewardConfig(python="/no/such/python"))
            result = fresh.judge(fenced("print(1)"), stdin_suite(None, "1"))
            assert (short(result), result.reward, result.repeatable) == ("IE", None, False)
        assert program(fresh, "print(1)", None, "1") == "AC"
    finally:
        fresh.close()


def test_b68_each_test_runs_once(judge: Judge) -> None:
    """A suite of asserts that count their calls, a checker that counts, a generator: where the count would show in the verdict."""
    counting = "n = 0\ndef f(x):\n    global n\n    n += 1\n    return n"
    asserts = {"kind": "asserts", "entry_point": "f", "code": "assert f(0) == 1\nassert f(0) == 2\nassert f(0) == 3"}
    assert short(judge.judge(fenced(counting), parse_suite(asserts))) == "AC"
    loop = {
        "kind": "check",
        "entry_point": "f",
        "code": "def check(c):\n    for i in range(1, 6):\n        assert c(0) == i",
    }
    assert short(judge.judge(fenced(counting), parse_suite(loop))) == "AC"
    assert function(judge, counting, *[([0], n) for n in (1, 2, 3)], fresh_process=False) == "AC"
    checker = {
        "kind": "checker",
        "checker": "n = 0\ndef check(i, o, a):\n    global n\n    n += 1\n    return n == int(a)",
        "cases": [{"answer": "1"}, {"answer": "2"}],
    }
    assert short(judge.judge(fenced("print()"), parse_suite(checker))) == "AC"


def test_b70_an_infra_error_has_no_reward_and_is_not_kept(pool: JudgePool) -> None:
    """What the trainer does with it: tests/unit/test_learner_advantages.py and the coordinator's own."""
    result = pool.judge(program_of("call", GOOD), suite_of("call", limits={"memory_mib": 65536}))
    assert (result.verdict, result.reward) == (Verdict.INFRA_ERROR, None)


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


def test_b84_verdicts_do_not_depend_on_the_load(pool: JudgePool) -> None:
    """Known-good solutions, alone and 16 times over."""
    kinds = list(SUITES)
    alone = [pool.judge(program_of(kind, GOOD), suite_of(kind)) for kind in kinds]
    with ThreadPoolExecutor(32) as threads:
        jobs = [(program_of(kinds[n % 6], unique(GOOD, 9000 + n)), suite_of(kinds[n % 6])) for n in range(16 * 6)]
        loaded = list(threads.map(lambda job: pool.judge(*job), jobs))
    assert {short(result) for result in alone + loaded} == {"AC"}


def test_nothing_is_left_after_all_of_this(judge: Judge) -> None:
    assert guests_of(judge) == []
    assert set(TEXT_KINDS) <= set(SUITES)
