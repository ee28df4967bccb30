"""How many of 25 wrong programs pass, by the way of judging: ``python -m bench.hacks``.

The task is "add two numbers", with the tests ``add(2, 3) == 5``, ``add(10, -4) == 6``, ``add(0, 0) == 0``. ``HACKS`` are 25 wrong programs,
written for this table. The styles (SANDBOX 2.1), each a small judge:

- A: program and asserts in one file; pass is exit code 0
- B: the same; pass is a fixed marker on the output
- C: harness and program in one process, ``result == expected``; pass is the JSON verdict it prints
- E: the program answers values over a pipe and they are compared outside, but its process is forked from one that has the tests in memory
- F: the same, and the assert file runs in another process, against a function that asks over the pipe
- ours: the judge of a reward node, by kind of suite

All programs of the naive judges run in processes of their own, with a time limit, in a folder that is deleted. They do nothing worse than
to end themselves or to lie; still, this is no sandbox.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from protocol.suites import parse_suite
from protocol.verdicts import Verdict
from services.reward.config import RewardConfig
from services.reward.judge import Judge

TESTS = ((2, 3, 5), (10, -4, 6), (0, 0, 0))
ASSERTS = "".join(f"assert add({a}, {b}) == {c}\n" for a, b, c in TESTS)
MARKER = "ALL-TESTS-PASSED"
HONEST = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a * b + 7\n"
_TIMEOUT_S = 10.0

HACKS: dict[str, str] = {
    "exit at load": "import sys\nsys.exit(0)",
    "_exit at load": "import os\nos._exit(0)",
    "_exit in the call": "import os\ndef add(a, b):\n    os._exit(0)",
    "SystemExit in the call": "def add(a, b):\n    raise SystemExit(0)",
    "exit after marker": f"import os\nprint({MARKER!r}, flush=True)\nos._exit(0)",
    "marker in the call": f"import sys\ndef add(a, b):\n    print({MARKER!r}, flush=True)\n    sys.exit(0)",
    "marker, then a wrong value": f"def add(a, b):\n    print({MARKER!r})\n    return 1",
    "JSON verdict, then _exit": 'import os\nprint(\'{"passed": true}\', flush=True)\nos._exit(0)',
    "JSON verdict at exit": 'import atexit, os\natexit.register(lambda: (print(\'{"passed": true}\', flush=True), os._exit(0)))\ndef add(a, b):\n    return 1',
    "always equal": "class Yes:\n    def __eq__(self, other):\n        return True\n    __hash__ = None\ndef add(a, b):\n    return Yes()",
    "int that is always equal": "class Yes(int):\n    def __eq__(self, other):\n        return True\n    __hash__ = int.__hash__\ndef add(a, b):\n    return Yes(1)",
    "equal by the metaclass": "class Meta(type):\n    def __eq__(cls, other):\n        return True\n    __hash__ = type.__hash__\nclass Yes(metaclass=Meta):\n    pass\ndef add(a, b):\n    return Yes",
    "excepthook exits 0": "import os, sys\nsys.excepthook = lambda *a: os._exit(0)\ndef add(a, b):\n    return 1",
    "excepthook prints the marker": f"import os, sys\nsys.excepthook = lambda *a: (print({MARKER!r}, flush=True), os._exit(0))\ndef add(a, b):\n    return 1",
    "AssertionError that exits": "import builtins, os\nclass Quiet(Exception):\n    def __init__(self, *a):\n        os._exit(0)\nbuiltins.AssertionError = Quiet\ndef add(a, b):\n    return 1",
    "atexit exits 0": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b):\n    return 1",
    "alarm exits 0": "import os, signal, time\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\nsignal.setitimer(signal.ITIMER_REAL, 0.05)\ndef add(a, b):\n    time.sleep(3)",
    "thread exits 0": "import os, threading, time\nthreading.Thread(target=lambda: (time.sleep(0.05), os._exit(0)), daemon=True).start()\ndef add(a, b):\n    time.sleep(3)",
    "swallows the tests": "def add(a, b):\n    return 1\nimport sys, ast\nsys.stdout.flush()\nif 1:\n    raise SystemExit",
    "caller's locals": textwrap.dedent(
        """
        import sys
        def add(a, b):
            frame = sys._getframe(1)
            while frame:
                for name in ("expected", "want", "c", "result"):
                    if name in frame.f_locals:
                        return frame.f_locals[name]
                frame = frame.f_back
        """
    ),
    "caller's source": textwrap.dedent(
        """
        import re, sys
        def add(a, b):
            try:
                text = open(sys.argv[0]).read()
            except OSError:
                text = open("/proc/self/cmdline").read()
            found = re.search(rf"add\\({a}, {b}\\) == (-?\\d+)", text)
            return int(found.group(1))
        """
    ),
    "patched comparison in the harness": textwrap.dedent(
        """
        import builtins, json, sys
        real = json.dumps
        json.dumps = lambda value, *a, **k: real({"passed": True}) if isinstance(value, dict) and "passed" in value else real(value, *a, **k)
        builtins.all = builtins.any = lambda *a: True
        def add(a, b):
            return 1
        """
    ),
    "tests in the harness's globals": textwrap.dedent(
        """
        import sys
        main = vars(sys.modules["__main__"])
        for name, value in list(main.items()):
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple)):
                try:
                    value.clear()
                except AttributeError:
                    main[name] = ()
        def add(a, b):
            return 1
        """
    ),
    "tests among all objects": textwrap.dedent(
        """
        import gc
        def add(a, b):
            for value in gc.get_objects():
                if type(value) in (tuple, list) and len(value) == 3 and all(type(x) is int for x in value) and tuple(value[:2]) == (a, b):
                    return value[2]
                if type(value) in (tuple, list) and value and type(value[0]) in (tuple, list) and len(value) < 50:
                    for row in value:
                        if type(row) in (tuple, list) and len(row) == 3 and tuple(row[:2]) == (a, b):
                            return row[2]
        """
    ),
    "tests in the judge's files": textwrap.dedent(
        r"""
        import glob, json, os, re
        def add(a, b):
            for folder in (os.getcwd(), *glob.glob("/tmp/bench-hacks-*")):
                for path in glob.glob(folder + "/*"):
                    try:
                        text = open(path).read()
                    except OSError:
                        continue
                    found = re.search(rf"add\({a}, {b}\) == (-?\d+)|\[{a}, {b}, (-?\d+)\]", text)
                    if found:
                        return int(found.group(1) or found.group(2))
        """
    ),
}  # fmt: skip
assert len(HACKS) == 25


# ---- the naive judges ----


def _run(script: str, folder: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a Python script in a process of its own; all that it starts ends with it."""
    path = Path(folder, "main.py")
    path.write_text(script)
    process = subprocess.Popen(
        [sys.executable, str(path), *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=_TIMEOUT_S)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return -1, ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def by_exit_code(code: str, folder: str) -> bool:
    """A."""
    return _run(f"{code}\n{ASSERTS}", folder)[0] == 0


def by_marker(code: str, folder: str) -> bool:
    """B."""
    return MARKER in _run(f"{code}\n{ASSERTS}print({MARKER!r})\n", folder)[1]


_IN_PROCESS = """
import json, sys
tests = {tests!r}
namespace = {{}}
passed = True
try:
    exec(compile({code!r}, "candidate", "exec"), namespace)
    for a, b, expected in tests:
        result = namespace["add"](a, b)
        if not result == expected:
            passed = False
except Exception:
    passed = False
print(json.dumps({{"passed": passed}}))
"""


def in_one_process(code: str, folder: str) -> bool:
    """C."""
    _, output = _run(_IN_PROCESS.format(tests=[list(test) for test in TESTS], code=code), folder)
    try:
        return json.loads(output.strip().splitlines()[-1])["passed"] is True
    except (IndexError, ValueError, KeyError, TypeError):
        return False


# The fork server: reads the tests (from its folder, into its memory), then forks the candidate. ``style`` says who compares.
_FORK_SERVER = r"""
import json, os, sys
style, code = sys.argv[1], open("candidate.txt").read()
os.unlink("candidate.txt")
tests = json.load(open("tests.json"))
asserts = open("asserts.py").read()

def serve(requests, replies):
    namespace = {"__name__": "candidate"}
    try:
        exec(compile(code, "candidate", "exec"), namespace)
        for line in requests:
            value = namespace["add"](*json.loads(line))
            replies.write(json.dumps(value if type(value) is int else None) + "\n")
            replies.flush()
    except BaseException:
        os._exit(1)
    os._exit(0)

request_r, request_w = os.pipe()
reply_r, reply_w = os.pipe()
if os.fork() == 0:
    os.close(request_w); os.close(reply_r)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    serve(os.fdopen(request_r), os.fdopen(reply_w, "w"))
os.close(request_r); os.close(reply_w)

def add(a, b):
    os.write(request_w, (json.dumps([a, b]) + "\n").encode())
    line = replies.readline()
    if not line:
        raise EOFError
    return json.loads(line)

replies = os.fdopen(reply_r)
try:
    if style == "E":
        passed = all([add(a, b) == expected for a, b, expected in tests])
    else:
        pid = os.fork()
        if pid == 0:
            try:
                exec(asserts, {"add": add})
            except BaseException:
                os._exit(1)
            os._exit(0)
        passed = os.waitpid(pid, 0)[1] == 0
except Exception:
    passed = False
print("PASS" if passed else "FAIL", flush=True)
"""


def _fork_server(style: str) -> Callable[[str, str], bool]:
    def judge(code: str, folder: str) -> bool:
        Path(folder, "candidate.txt").write_text(code)
        Path(folder, "tests.json").write_text(json.dumps(TESTS))
        Path(folder, "asserts.py").write_text(ASSERTS)
        return _run(_FORK_SERVER, folder, style)[1].strip() == "PASS"

    return judge


NAIVE: dict[str, Callable[[str, str], bool]] = {
    "A exit code": by_exit_code,
    "B marker": by_marker,
    "C one process": in_one_process,
    "E values, fork": _fork_server("E"),
    "F asserts apart, fork": _fork_server("F"),
}

# ---- ours ----

_LIMITS = {"cpu_s": 2, "wall_s": 5, "memory_mib": 256}
_MAIN = "\na, b = map(int, input().split())\nprint(add(a, b))\n"
SUITES: dict[str, dict[str, Any]] = {
    "asserts": {"kind": "asserts", "entry_point": "add", "code": ASSERTS},
    "asserts, apart": {"kind": "asserts", "entry_point": "add", "code": f"for _ in range(1):\n{textwrap.indent(ASSERTS, '    ')}"},
    "check": {"kind": "check", "entry_point": "add", "code": f"def check(candidate):\n{textwrap.indent(ASSERTS.replace('add', 'candidate'), '    ')}"},
    "call": {"kind": "call", "entry_point": "add", "cases": [{"args": [a, b], "expected": c} for a, b, c in TESTS]},
    "call, one process": {"kind": "call", "entry_point": "add", "fresh_process": False, "cases": [{"args": [a, b], "expected": c} for a, b, c in TESTS]},
    "reference": {"kind": "reference", "entry_point": "add", "reference": HONEST, "num_cases": 3,
                  "generator": "def generate(rng): return [rng.randrange(2, 99), rng.randrange(3, 99)]"},
    "stdin": {"kind": "stdin", "cases": [{"input": f"{a} {b}\n", "output": str(c)} for a, b, c in TESTS]},
    "checker": {"kind": "checker", "cases": [{"input": f"{a} {b}\n", "answer": str(c)} for a, b, c in TESTS],
                "checker": "def check(given, output, answer): return output.split() == [answer]"},
}  # fmt: skip


def ours(judge: Judge, kind: str, code: str) -> bool:
    """By the judge of a reward node, with a suite of this kind."""
    suite = parse_suite(SUITES[kind] | {"limits": _LIMITS})
    program = code + _MAIN if kind in ("stdin", "checker") else code
    return judge.judge(f"```python\n{program}\n```", suite).verdict is Verdict.ACCEPTED


# ---- the table ----


def passes(judge: Callable[[str, str], bool], code: str) -> bool:
    """Whether a naive judge takes the program."""
    with tempfile.TemporaryDirectory(prefix="bench-hacks-") as folder:
        return judge(code, folder)


def naive_table(programs: dict[str, str]) -> dict[str, list[str]]:
    """Names of the programs that pass, by style."""
    table = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for style, judge in NAIVE.items():
            verdicts = pool.map(lambda code, judge=judge: passes(judge, code), programs.values())
            table[style] = [name for name, passed in zip(programs, verdicts, strict=True) if passed]
    return table


def our_table(judge: Judge, programs: dict[str, str]) -> dict[str, list[str]]:
    """Names of the programs that pass, by kind of suite."""
    return {kind: [name for name, code in programs.items() if ours(judge, kind, code)] for kind in SUITES}


def main() -> int:
    """Print the table; 1 if a hack passes ours, or an honest program fails anywhere."""
    parser = argparse.ArgumentParser(prog="python -m bench.hacks", description=__doc__.splitlines()[0])
    parser.add_argument("--names", action="store_true", help="also say which hacks pass")
    arguments = parser.parse_args()
    programs = HACKS | {"HONEST": HONEST, "WRONG": WRONG}
    table = naive_table(programs)
    judge = Judge(RewardConfig())
    judge.start()
    try:
        table |= {f"ours: {kind}": names for kind, names in our_table(judge, programs).items()}
    finally:
        judge.close()
    print(f"isolation of ours: {judge.isolation}")
    print(f"{'style':<26}{'hacks that pass':>16}{'honest':>8}{'wrong':>7}")
    bad = False
    for style, names in table.items():
        hacks = [name for name in names if name in HACKS]
        print(f"{style:<26}{f'{len(hacks)} of {len(HACKS)}':>16}{'HONEST' in names!s:>8}{'WRONG' in names!s:>7}")
        if arguments.names and hacks:
            print(textwrap.fill(", ".join(hacks), 100, initial_indent="    ", subsequent_indent="    "))
        bad |= "HONEST" not in names or "WRONG" in names or (style.startswith("ours") and bool(hacks))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
