"""Hostile programs against the judge: each line of SANDBOX 2.3, and each line of the list in ``sandbox/host.py``.

``attack_programs.py`` has those that are one piece of Python, whatever the kind of suite, ``attack_native_programs.py`` those in other
languages, ``attack_calls.py`` the system calls; here are the rest: probes that say what they can reach, attacks that need a suite of their
own, several processes, or two judges. After each the next honest job on the same worker must be accepted in an empty box, with no process
left.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from attack_calls import FORBIDDEN, PRELUDE, REFUSED
from attack_native_programs import COMPILE, CPP, HEADERS, JS
from attack_programs import ATTACKS, kinds_of
from judge_harness import (
    GOOD,
    HONEST_NATIVE,
    LEVELS,
    OVERSHOOT_S,
    SUITES,
    TEXT_KINDS,
    assert_clean,
    children_of,
    fenced,
    guests_of,
    judge_at,
    program_of,
    short,
    suite_of,
    verdict_of,
)

from protocol.suites import Limits, parse_suite
from services.reward.judge import Judge
from services.reward.sandbox import host
from services.reward.sandbox.cgroups import WorkerGroups

QUICK = {"cpu_s": 0.1}
PROBE_LIMITS = Limits(cpu_s=2, wall_s=6, memory_mib=256)


@pytest.fixture(scope="module")
def judges() -> Iterator[dict[str, Judge]]:
    """Started when first asked for, so that all tests of a level share one."""
    started: dict[str, Any] = {}
    yield started
    for context, _ in started.values():
        context.__exit__(None, None, None)


@pytest.fixture
def judge(request: pytest.FixtureRequest, judges: dict[str, Any], level: str) -> Judge:
    if level not in judges:
        context = judge_at(level)
        judges[level] = (context, context.__enter__())
    found: Judge = judges[level][1]
    return found


each_level = pytest.mark.parametrize("level", LEVELS)


def said(judge: Judge, code: str, *, stdin: bytes = b"", limits: Limits = PROBE_LIMITS) -> list[str]:
    """The lines that a program prints in the sandbox."""
    run = judge.lab.run_python(code, b"", limits, stdin, keep=False, cap_bytes=1 << 20)
    assert run.report.exit_code == 0, (run.report, run.stderr.decode(errors="replace"))
    return run.stdout.decode().splitlines()


# --- one piece of Python against every kind ---

CASES = [(level, kind, name) for level in LEVELS for name in ATTACKS for kind in kinds_of(name, level)]


@pytest.mark.parametrize(
    ("level", "kind", "name"), CASES, ids=[f"{name}-{kind}-{level}" for level, kind, name in CASES]
)
def test_an_attack_earns_nothing_and_leaves_nothing(judge: Judge, kind: str, name: str) -> None:
    attack = ATTACKS[name]
    allowed = attack.run if kind in TEXT_KINDS else attack.called
    # What ends by itself has time for its imports, on a slow machine too.
    endless = "TLE" in allowed
    suite = suite_of(kind, limits=(QUICK if endless else {"cpu_s": 2.0}) | attack.limits)
    result = judge.judge(program_of(kind, attack.code), suite)
    assert short(result) in allowed.split(), result
    assert result.reward == 0.0
    assert result.cpu_s < suite.limits.cpu_s + OVERSHOOT_S
    assert_clean(judge, kind, attack.code)


# --- each line of the list in host.py ---

_COVERED = {  # how a line begins: what covers it, here or in attack_programs.py
    "exit paths": "S01 S02 S03 S19",
    "lying objects": "S04 S05 S06 S13",
    "reading the tests": "S09 test_nothing_expected_can_be_found",
    "fork bombs": "S22 S23 test_several_processes_end_with_the_program",
    "killing or tracing the worker": "S33 S34 test_forbidden_calls_answer_that_they_are_forbidden",
    "network and local sockets": "S46 test_no_kind_of_socket_opens",
    "files of the host": "S35 test_files_of_the_host_are_out_of_reach",
    "CPU (threads and processes": "S20 S21 S26 S27 S28 S29 test_a_chain_of_forks_shares_one_cpu_limit",
    "state between runs": "S50 test_global_state_does_not_reach_the_next_test",
    "compilers": "test_a_compiler_is_as_confined_as_what_it_makes",
    "the node dying": "test_a_killed_node_leaves_no_process_and_no_folder",
}


def test_every_line_of_the_list_in_host_has_its_attacks() -> None:
    lines = re.findall(r"^- (.+)", host.__doc__ or "", re.MULTILINE)
    assert len(lines) == len(_COVERED)
    tests = (
        set(globals()) | {name.split()[0] for name in ATTACKS} | {"test_a_killed_node_leaves_no_process_and_no_folder"}
    )
    for line, (start, covers) in zip(lines, _COVERED.items(), strict=True):
        assert line.startswith(start)
        assert set(covers.split()) <= tests


# --- S09 to S12: what is expected, and where a program could look for it ---

_MARK = "canary"
_SEARCH = r'''
import gc, os, re, sys, ctypes
MARK = re.compile("can" + "ary-[0-9a-f]{32}")
def found_in(text):
    hit = MARK.search(text)
    return hit and hit.group()
def frames():
    frame, seen = sys._getframe(), []
    while frame:
        seen += [frame.f_locals, frame.f_globals, frame.f_code.co_consts]
        frame = frame.f_back
    return repr(seen)
def objects():
    return repr([o for o in gc.get_objects() if isinstance(o, (str, bytes, list, dict, tuple)) and len(o) < 10**5])
def modules():
    return repr([vars(m) for m in list(sys.modules.values()) if hasattr(m, "__dict__")])
def process():
    return repr((dict(os.environ), sys.argv, sys.path, sys.orig_argv))
def files():
    text = ""
    for top in (".", "/tmp", "/dev/shm", "/proc", "/proc/1", "/proc/self", "/work", "/root", "/home", "/etc", "/run", "/var"):
        try:
            names = os.listdir(top)
        except OSError:
            continue
        for name in names[:300]:
            try:
                fd = os.open(os.path.join(top, name), os.O_RDONLY | os.O_NONBLOCK)
                text += os.read(fd, 1 << 16).decode("latin-1")
                os.close(fd)
            except OSError:
                pass
    return text
def descriptors():
    text = ""
    for fd in range(4, 256):
        try:
            text += os.pread(fd, 1 << 16, 0).decode("latin-1")
        except OSError:
            pass
    return text
def memory():
    """All pages around what this process knows addresses of: a fork's memory is its parent's."""
    libc = ctypes.CDLL(None)
    raw, page, pages = b"", 4096, set()
    starts = [id(o) for o in gc.get_objects()[::50]] + [id(object()), id("x" * 999), id(bytearray(10**6))]
    for start in {s & ~0xFFFFF for s in starts}:
        for address in range(start, start + (1 << 20), page):
            vector = (ctypes.c_char * 1)()
            if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(page), vector) == 0 and vector[0] != b"\0":
                raw += ctypes.string_at(address, page)
                if len(raw) > 24 << 20:
                    break
    return raw.decode("latin-1")
def f(a, b):
    for place in (frames, objects, modules, process, files, descriptors, memory):
        if hit := found_in(place()):
            return hit
    return "nothing"
'''
_CANARY_LIMITS = {"cpu_s": 4.0, "wall_s": 20.0, "memory_mib": 512}


def _canary_suite(kind: str, canary: str) -> Any:
    fields: dict[str, dict[str, Any]] = {
        "inline": {"code": f"assert f(1, 2) == {canary!r}"},
        "remote": {"code": f"def check(candidate):\n    wanted = {canary!r}\n    for _ in range(1):\n        assert candidate(1, 2) == wanted"},
        "call": {"cases": [{"args": [1, 2], "expected": canary}]},
        "reference": {"reference": f"def f(a, b): return {canary!r}", "num_cases": 1},
        "stdin": {"cases": [{"input": "1 2\n", "output": canary}]},
        "checker": {"checker": "def check(i, o, a): return o.strip() == a", "cases": [{"input": "1 2\n", "answer": canary}]},
    }  # fmt: skip
    return suite_of(kind, limits=_CANARY_LIMITS, solution=f"# {canary}", **fields[kind])


@each_level
@pytest.mark.parametrize("kind", SUITES)
def test_nothing_expected_can_be_found(judge: Judge, kind: str) -> None:
    canary = f"{_MARK}-{secrets.token_hex(16)}"
    suite = _canary_suite(kind, canary)
    knows = "def f(a, b):\n    return " + repr(canary)
    assert (
        verdict_of(judge, program_of(kind, knows), suite) == "AC"
    )  # also puts it into the judge's memory, and into the box's worker
    result = judge.judge(program_of(kind, _SEARCH), suite)
    assert short(result) == "WA", result
    if kind in ("call", "reference", "stdin"):
        assert "'nothing'" in result.message
    assert_clean(judge, kind, _SEARCH)


@each_level
def test_the_environment_is_an_allow_list(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = {
        *("PATH", "HOME", "TMPDIR", "LANG", "TZ", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONINTMAXSTRDIGITS"),
        *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX"),
    }
    assert set(said(judge, "import os\nfor name in os.environ: print(name)")) == allowed
    code = "#include <unistd.h>\n#include <cstdio>\nint main() { for (char **e = environ; *e; e++) puts(*e); }"
    toolchain = judge.lab.toolchain("cpp")
    native = judge.lab.run_native(toolchain, code, PROBE_LIMITS, b"", cap_bytes=1 << 16).stdout.decode().splitlines()
    assert {line.partition("=")[0] for line in native} <= {"PATH", "HOME", "TMPDIR", "LANG", "TZ", "OPENSSL_CONF"}


@each_level
def test_descriptors_are_the_three_streams_and_the_channel_where_there_is_one(judge: Judge) -> None:
    look = "import os, fcntl\ndef fds():\n    found = []\n    for fd in range(1024):\n        try: fcntl.fcntl(fd, 1); found.append(fd)\n        except OSError: pass\n    return found\n"
    assert said(judge, look + "print(fds())") == ["[0, 1, 2]"]
    suite = {"kind": "call", "entry_point": "fds", "cases": [{"expected": [0, 1, 2, 3]}]}
    assert verdict_of(judge, fenced(look), suite) == "AC"
    code = '#include <fcntl.h>\n#include <cstdio>\nint main() { for (int i = 0; i < 256; i++) if (fcntl(i, F_GETFD) >= 0) printf("%d ", i); }'
    suite = {"kind": "stdin", "language": "cpp", "cases": [{"input": "x", "output": "0 1 2"}]}
    assert verdict_of(judge, fenced(code, "cpp"), suite) == "AC"


# --- S33 to S35, S46 to S49: the kernel and the host ---


@each_level
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
def test_forbidden_calls_answer_that_they_are_forbidden(judge: Judge) -> None:
    calls = "".join(f"call({name!r}, {arguments})\n" for name, arguments in FORBIDDEN.items())
    answers = dict(line.rsplit(" ", 1) for line in said(judge, PRELUDE + calls))
    assert answers == dict.fromkeys(FORBIDDEN, "EPERM")
    calls = "".join(f"call({name!r}, {arguments})\n" for name, arguments in REFUSED.items())
    answers = dict(line.rsplit(" ", 1) for line in said(judge, PRELUDE + calls))
    assert answers.keys() == REFUSED.keys()
    assert "succeeded" not in answers.values(), answers
    assert answers["clone3"] == "ENOSYS"


@each_level
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x32 and int 0x80 exist on x86_64 only")
@pytest.mark.parametrize("number", [0x40000000 + 39, 0x40000000 + 57, 0x40000000 + 520])
def test_a_call_by_the_numbers_of_x32_is_a_security_violation(judge: Judge, number: int) -> None:
    for kind in ("inline", "call", "stdin"):
        code = f"import ctypes\ndef f(a, b): ctypes.CDLL(None).syscall({number})"
        assert verdict_of(judge, program_of(kind, code), suite_of(kind)) == "SV"
        assert_clean(judge, kind, code)


@each_level
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="int 0x80 exists on x86_64 only")
def test_a_32_bit_call_is_a_security_violation_or_a_crash(judge: Judge) -> None:
    code = '#include <cstdio>\nint main() { int r; asm volatile("int $0x80" : "=a"(r) : "a"(20)); printf("%d", r); }'
    suite = suite_of("stdin", language="cpp")
    assert verdict_of(judge, fenced(code, "cpp"), suite) in ("SV", "RE")
    assert_native_clean(judge, "cpp")


@each_level
def test_no_kind_of_socket_opens(judge: Judge) -> None:
    code = (
        "import socket\nopened = []\nfor family in range(0, 46):\n    for kind in (1, 2, 3, 5):\n"
        "        try: socket.socket(family, kind); opened.append((family, kind))\n        except OSError as error: assert error.errno == 1, error\n"
        "print(opened)\na, b = socket.socketpair()\na.send(b'x'); print(b.recv(1))"
    )
    assert said(judge, code) == ["[]", "b'x'"]  # a pair leads nowhere, and asyncio needs one


@each_level
def test_files_of_the_host_are_out_of_reach(judge: Judge) -> None:
    code = r"""
import os, sys, json
for path in ("/etc/passwd", "/etc/hostname", "/etc/ld.so.cache", "/root", "/home", "/work", "/var/lib", "/proc/1/mem", "/proc/1/environ",
             "/proc/self/mem", "/proc/self/maps", "/proc/self/fd", "/proc/cpuinfo", "/proc/sys/kernel/core_pattern", "/sys", "/sys/fs/cgroup",
             "/dev/kvm", "/dev/sda", "/dev/tty", "/dev/mem", "/dev/ptmx", "/usr/bin/python3", "/bin/sh", "/boot", "/run"):
    try:
        entries = os.listdir(path) if os.path.isdir(path) else [open(path, "rb").read(1)]
        if entries: print("readable", path)
    except OSError:
        pass
for path in ("/x", "/usr/x", "/usr/lib/x", "/dev/x", "/etc/x", os.path.dirname(json.__file__) + "/x", sys.prefix + "/x", "/proc/sys/kernel/hostname",
             "/var/tmp/x", "/dev/shm/../x"):
    try:
        open(path, "w"); print("writable", path)
    except OSError:
        pass
for path in (json.__file__, os.__file__, "/usr/lib"):
    for action in (lambda: open(path, "a"), lambda: os.truncate(path, 0), lambda: os.unlink(path), lambda: os.rename(path, path + "x"),
                   lambda: os.link(path, "hard")):
        try:
            action(); print("changed", path)
        except OSError:
            pass
print("end")
"""
    assert said(judge, code) == ["end"]


@each_level
def test_attributes_of_the_hosts_files_stay_as_they_are(judge: Judge, tmp_path: Any) -> None:
    """Landlock does not restrict these calls, and where there is no root of its own the host's files can be named."""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    target = tmp_path / "file"
    target.write_text("mine")
    target.chmod(0o640)
    os.utime(target, (1e9, 1e9))
    code = f"""
import os
path = {str(target)!r}
for action in (lambda: os.chmod(path, 0o777), lambda: os.chmod(path, 0o777, follow_symlinks=False), lambda: os.utime(path),
               lambda: os.utime(path, (0, 0), follow_symlinks=False), lambda: os.chown(path, 1, 1), lambda: os.lchown(path, 1, 1),
               lambda: os.setxattr(path, "user.x", b"y"), lambda: os.removexattr(path, "user.x"), lambda: os.truncate(path, 0),
               lambda: os.unlink(path), lambda: os.rename(path, "x"), lambda: os.link(path, "y"), lambda: open(path, "a"), lambda: open(path)):
    try:
        action()
    except (OSError, NotImplementedError):
        pass
import ctypes
libc = ctypes.CDLL(None)
for number in (90, 132, 235):  # chmod, utime, utimes
    libc.syscall(number, path.encode(), 0)
for number in (268, 280, 261, 452):  # fchmodat, utimensat, futimesat, fchmodat2
    libc.syscall(number, -100, path.encode(), 0, 0)
"""
    said(judge, code)
    status = target.stat()
    assert (status.st_mode & 0o777, status.st_mtime, status.st_uid) == (0o640, 1e9, os.getuid())
    assert os.listxattr(target) == []
    assert target.read_text() == "mine"


@each_level
def test_a_link_in_the_box_leads_the_wipe_nowhere(judge: Judge, tmp_path: Any) -> None:
    target = tmp_path / "folder"
    target.mkdir(mode=0o700)
    (target / "file").write_text("mine")
    (target / "file").chmod(0o600)
    code = f"import os\nos.symlink({str(target)!r}, 'd')\nos.symlink({str(target / 'file')!r}, 'f')\nos.mkdir('x'); os.symlink({str(target)!r}, 'x/y')\n{GOOD}"
    assert verdict_of(judge, program_of("inline", code), suite_of("inline")) == "AC"
    assert_clean(judge, "inline", code)
    assert (target / "file").read_text() == "mine"
    assert (target / "file").stat().st_mode & 0o777 == 0o600
    assert target.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("level", ["namespaces"])
@pytest.mark.parametrize(
    "filler",
    [
        "for i in range(100): open(str(i), 'wb').write(bytes(1 << 20))",
        "for i in range(10**5): open(str(i), 'wb').close()",
        "for i in range(10**5): os.mkdir(str(i))",
        "for i in range(10**5): os.symlink('x' * 4000, str(i))",
        "fd = os.open('/dev/shm/x', os.O_CREAT | os.O_RDWR)\nfor _ in range(99): os.write(fd, bytes(1 << 20))",
    ],
    ids=["bytes", "files", "folders", "links", "shm"],
)
def test_a_box_can_be_filled_and_is_empty_afterwards(judge: Judge, filler: str) -> None:
    code = f"import os\ntry:\n    exec({filler!r})\n    print('no end')\nexcept OSError as error:\n    print(error.strerror)"
    assert said(judge, code)[0] in ("No space left on device", "File too large")
    assert_clean(judge, "stdin", code)


@each_level
def test_two_judges_share_nothing_with_each_other(judge: Judge, level: str) -> None:
    write = (
        "import os, fcntl\nfor top in ('/dev/shm', '/tmp', os.environ['TMPDIR'], '.'):\n    try: open(top + '/shared', 'w').write('here')\n    except OSError: pass\n"
        "lock = open('lock', 'w'); fcntl.flock(lock, fcntl.LOCK_EX)\ndef f(): return sorted(os.listdir())"
    )
    look = "import os\nfor top in ('/dev/shm', '/tmp', os.environ['TMPDIR'], '.'):\n    try: print(*os.listdir(top))\n    except OSError: print()\n"
    with judge_at(level) as other:
        functions = other.lab.functions(write, PROBE_LIMITS)
        try:
            assert functions.loaded
            assert said(judge, look) == ["", "", "", ""]
        finally:
            functions.finish()
        assert said(other, look) == ["", "", "", ""]


# --- S20 to S25: several processes ---

_GREEDY_CHILDREN = "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        x = bytearray(60 << 20); time.sleep(5)\nprint(input() or 3)\ntime.sleep(5)"
_BOMB_S = 2.0
SEVERAL = {"processes": 8, "cpu_s": 0.3, "wall_s": 3.0, "memory_mib": 200}


@pytest.fixture
def several(judges: dict[str, Any], request: pytest.FixtureRequest) -> Judge:
    """The judge that can count processes."""
    if "namespaces" not in judges:
        context = judge_at("namespaces")
        judges["namespaces"] = (context, context.__enter__())
    found: Judge = judges["namespaces"][1]
    return found


@pytest.mark.parametrize("kind", ["inline", "call", "stdin"])
def test_a_chain_of_forks_shares_one_cpu_limit(several: Judge, kind: str) -> None:
    """S24: each link burns less than the limit, and is waited for by nobody but the init, or by its parent."""
    for waits in ("os.waitpid(pid, 0)", "os._exit(0)"):
        code = (
            "import os, time\ndef f(a, b):\n    for _ in range(20):\n        start = time.process_time()\n"
            f"        while time.process_time() < start + 0.15: pass\n        pid = os.fork()\n        if pid: {waits}; break\n    return a + b"
        )
        result = several.judge(program_of(kind, code), suite_of(kind, limits=SEVERAL))
        assert result.reward == 0.0
        assert short(result) in (("TLE",) if "wait" in waits else ("TLE", "RE", "WA")), result
        assert result.cpu_s < SEVERAL["cpu_s"] + OVERSHOOT_S
        assert_clean(several, kind, code)


def test_parallel_burners_share_one_cpu_limit(several: Judge) -> None:
    code = "import os\nfor _ in range(5): os.fork() or exec('while True: pass')\nwhile True: pass"
    result = several.judge(fenced(code), suite_of("stdin", limits=SEVERAL))
    assert short(result) == "TLE", result
    assert result.cpu_s < SEVERAL["cpu_s"] + OVERSHOOT_S
    assert_clean(several, "stdin")


def test_several_processes_share_one_memory_limit(several: Judge) -> None:
    """S25."""
    result = several.judge(fenced(_GREEDY_CHILDREN), suite_of("stdin", limits=SEVERAL | {"cpu_s": 2.0}))
    assert short(result) == "MLE", result
    assert_clean(several, "stdin", _GREEDY_CHILDREN)


@pytest.mark.parametrize("code", [
    "import os\nwhile True: os.fork()",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "import os, time\nfor _ in range(40):\n    if os.fork() == 0: time.sleep(9)\ntime.sleep(9)",
    "import os\nos.setsid()\nwhile True:\n    try:\n        if os.fork(): os._exit(0)\n    except OSError: pass",
], ids=["bomb", "stubborn", "sleepers", "runner"])  # fmt: skip
def test_more_processes_than_allowed_end_all_of_them(several: Judge, code: str) -> None:
    """S23, with processes allowed."""
    result = several.judge(fenced(code), suite_of("stdin", limits=SEVERAL))
    assert short(result) in ("RE", "TLE", "MLE", "WA"), result
    assert result.cpu_s < SEVERAL["cpu_s"] + _BOMB_S  # the worker competes with them all
    assert_clean(several, "stdin", code)


def test_several_processes_end_with_the_program(several: Judge) -> None:
    """S22: daemons of every make, that write into the box and hold the output open."""
    code = (
        "import os, time, signal\ndef f(a, b):\n    for _ in range(3):\n        if os.fork() == 0:\n            os.setsid()\n            signal.pthread_sigmask(0, range(1, 65))\n"
        "            if os.fork(): os._exit(0)\n            while True:\n                open(f'{os.getpid()}-{time.time()}', 'w'); time.sleep(0.002)\n"
        "    time.sleep(0.05)\n    return a + b"
    )
    for kind in ("inline", "call", "stdin"):
        assert verdict_of(several, program_of(kind, code), suite_of(kind, limits=SEVERAL)) in ("AC", "RE")
        assert_clean(several, kind, code)


def test_a_child_can_not_exec_nor_kill_the_init(several: Judge) -> None:
    code = (
        "import os, signal\nif os.fork() == 0:\n    for s in (9, 15, 19):\n        for p in (1, -1):\n            try: os.kill(p, s)\n            except OSError: pass\n"
        "try: os.execv('/bin/true', ['true'])\nexcept OSError: pass\nprint(3)"
    )
    assert verdict_of(several, fenced(code), suite_of("stdin", limits=SEVERAL)) in ("AC", "RE", "WA")
    assert_clean(several, "stdin", code)


@pytest.mark.parametrize("level", ["landlock"])
def test_without_a_pid_namespace_several_processes_are_refused(judge: Judge) -> None:
    result = judge.judge(program_of("stdin", GOOD), suite_of("stdin", limits=SEVERAL))
    assert short(result) == "IE"
    assert "processes" in result.message


@each_level
@pytest.mark.parametrize("kind", ["inline", "call", "stdin"])
def test_a_thread_that_outlives_the_answer_is_ended(judge: Judge, kind: str) -> None:
    """S21."""
    code = (
        "import threading, os\ndef g():\n    while True: os.getpid()\nthreading.Thread(target=g, daemon=True).start()\n"
        + GOOD
    )
    result = judge.judge(program_of(kind, code), suite_of(kind))
    assert short(result) == "AC", result
    assert_clean(judge, kind, code)


# --- S51, S53, S57, S58, S61: tricks on the suite ---


@each_level
@pytest.mark.parametrize("kind", ["call", "reference"])
def test_global_state_does_not_reach_the_next_test(judge: Judge, kind: str) -> None:
    """S51: the right answer only from the second call on, by a counter in memory, in a file, in the environment."""
    stores = {
        "memory": "n = [0]\ndef seen():\n    n[0] += 1\n    return n[0] > 1",
        "file": "import os\ndef seen():\n    if os.path.exists('n'): return True\n    open('n', 'w').close()",
        "environment": "import os\ndef seen():\n    return os.environ.setdefault('N', '') or os.environ.update(N='1')",
    }
    for store in stores.values():
        code = f"{store}\ndef f(a, b):\n    return a + b if seen() else 0"
        result = judge.judge(fenced(code), suite_of(kind, correctness="fraction"))
        assert (short(result), result.tests_passed, result.tests_total) == ("WA", 0, 3), result


@each_level
def test_a_lazy_answer_is_made_within_the_limits(judge: Judge) -> None:
    """S61: what computes when it is looked at does so in its own process, and its time counts."""
    slow = "import time\ndef busy():\n    start = time.process_time()\n    while time.process_time() < start + 0.15: pass\n    return 3\n"
    lazy = {
        "def f(a, b):\n    yield busy()": "assert list(f(1, 2)) == [3]",
        "def f(a, b): return map(lambda _: busy(), [0])": "assert list(f(1, 2)) == [3]",
        "class L(list):\n    def __iter__(self): busy(); return iter([3])\ndef f(a, b): return L([3])": "assert f(1, 2) == [3]",
    }
    for code, tests in lazy.items():
        result = judge.judge(fenced(slow + code), suite_of("inline", code=tests))
        assert short(result) == "AC", result
        assert result.cpu_s > 0.15 or "class" in code  # the base of a subclass is read: its own code never runs
        if "class" not in code:
            assert verdict_of(judge, fenced(slow + code), suite_of("inline", code=tests, limits=QUICK)) == "TLE"


@each_level
def test_forged_clocks_change_no_time(judge: Judge) -> None:
    """S08."""
    code = (
        "import time\nreal = time.process_time\ntime.time = time.perf_counter = time.process_time = time.monotonic = lambda: 0.0\n"
        "def f(a, b):\n    start = real()\n    while real() < start + 0.05: pass\n    return a + b"
    )
    for kind in ("inline", "call", "stdin"):
        result = judge.judge(program_of(kind, code), suite_of(kind))
        assert short(result) == "AC", result
        assert result.cpu_s > 0.14
        assert verdict_of(judge, program_of(kind, code), suite_of(kind, limits={"cpu_s": 0.04})) == "TLE"


# --- S44 against the tests' own process ---


@each_level
def test_answers_made_to_tire_the_tests_process_are_the_candidates_fault(judge: Judge) -> None:
    tests = "def check(candidate):\n    for i in range(400):\n        assert candidate(i, i) == 2 * i"
    code = (
        "import os\nbody = b'[\"value\",[\"l\",[' + b','.join([b'[\"l\",[]]'] * 150_000) + b']],null]'\nframe = len(body).to_bytes(4, 'big') + body\n"
        "def f(a, b):\n    while True:\n        view = memoryview(frame)\n        while view: view = view[os.write(3, view):]\n        size = int.from_bytes(os.read(3, 4), 'big'); os.read(3, size)"
    )
    result = judge.judge(fenced(code), suite_of("remote", code=tests, limits={"cpu_s": 1.0}))
    assert short(result) not in ("AC", "IE"), result
    assert_clean(judge, "remote", code)


# --- S62, and other languages ---


def assert_native_clean(judge: Judge, language: str) -> None:
    suite = suite_of("stdin", language=language, limits={"memory_mib": 512})
    result = judge.judge(fenced(HONEST_NATIVE[language], language), suite)
    assert short(result) == "AC", result
    assert guests_of(judge) == []


@each_level
@pytest.mark.parametrize("name", COMPILE)
def test_a_compiler_is_as_confined_as_what_it_makes(judge: Judge, name: str) -> None:
    code, verdict = COMPILE[name]
    result = judge.judge(fenced(code, "cpp"), suite_of("stdin", language="cpp"))
    assert short(result) == verdict, result
    assert "root:" not in result.message
    assert os.uname().nodename not in result.message
    assert_native_clean(judge, "cpp")


@each_level
def test_a_hostile_program_in_cpp_earns_nothing_and_leaves_nothing(judge: Judge) -> None:
    """One program with all of them: a compiler run takes a second."""
    cases = "".join(f"case {i}: {{ {body} }} break;\n" for i, (body, _) in enumerate(CPP.values()))
    includes = "".join(f"#include <{header}>\n" for header in HEADERS.split())
    code = f"{includes}int main() {{ long a, b; int which; std::cin >> which >> a >> b; switch (which) {{\n{cases}}} return 0; }}"
    wanted = {name: verdict for name, (_, verdict) in CPP.items()}
    found = {}
    for index, name in enumerate(CPP):
        limits = QUICK | {"wall_s": 0.4} if wanted[name] == "TLE" else {"cpu_s": 2.0, "wall_s": 9.0}
        cases_of = [{"input": f"{index} 1 2\n", "output": "3\n"}]
        result = judge.judge(fenced(code, "cpp"), suite_of("stdin", language="cpp", limits=limits, cases=cases_of))
        found[name] = short(result)
        assert guests_of(judge) == []
    assert {name: verdict for name, verdict in found.items() if verdict not in wanted[name].split()} == {}
    assert_native_clean(judge, "cpp")


@each_level
@pytest.mark.parametrize("name", JS)
def test_a_hostile_program_in_javascript_earns_nothing_and_leaves_nothing(judge: Judge, name: str) -> None:
    code, verdict = JS[name]
    cases = [{"input": "1 2\n", "output": "3\n"}]
    slow = "TLE" in verdict
    limits = {"memory_mib": 256, "cpu_s": 0.3 if slow else 2.0, "wall_s": 0.8 if slow else 5.0}
    result = judge.judge(
        fenced(code, "javascript"), suite_of("stdin", language="javascript", cases=cases, limits=limits)
    )
    assert short(result) in verdict.split(), result
    assert guests_of(judge) == []


@each_level
def test_javascript_memory_is_limited(judge: Judge) -> None:
    limits = {"memory_mib": 64, "cpu_s": 5.0, "wall_s": 20.0}
    for code in (
        "const a = []; for (;;) a.push(new Array(1000).fill(1))",
        "const a = []; for (;;) a.push(Buffer.alloc(1 << 20, 1))",
    ):
        result = judge.judge(fenced(code, "javascript"), suite_of("stdin", language="javascript", limits=limits))
        assert short(result) == "MLE", result
        assert result.memory_mib < 1200  # where there are no control groups; see ``Worker._limit``
    assert_native_clean(judge, "javascript")


@each_level
def test_memory_is_limited_without_control_groups_too(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S25 to S27, as on a node whose service may make no groups."""
    monkeypatch.setattr(WorkerGroups, "find", classmethod(lambda cls: cls({}, 0)))
    limits = {"memory_mib": 64, "cpu_s": 5.0, "wall_s": 20.0}
    with judge_at(level) as judge:
        assert "cgroup" not in judge.isolation
        for name in ("S26 bytearray", "S26 grows", "S27 shared mapping", "S27 malloc of libc"):
            result = judge.judge(program_of("inline", ATTACKS[name].code), suite_of("inline"))
            assert short(result) in ATTACKS[name].called.split(), result
            assert result.memory_mib < 200
        for body in ("new Array(1000).fill(1)", "Buffer.alloc(1 << 20, 1)"):
            code = f"const a = []; for (;;) a.push({body})"
            result = judge.judge(fenced(code, "javascript"), suite_of("stdin", language="javascript", limits=limits))
            assert short(result) == "MLE", result
            assert result.memory_mib < 1200  # node's threads may have that much of stack: see ``Worker._limit``
        code = "#include <vector>\nint main() { std::vector<long> v; for (;;) v.push_back(1); }"
        assert verdict_of(judge, fenced(code, "cpp"), suite_of("stdin", language="cpp", limits=limits)) == "MLE"
        if level == "namespaces":
            several = SEVERAL | {"cpu_s": 2.0}
            assert verdict_of(judge, fenced(_GREEDY_CHILDREN), suite_of("stdin", limits=several)) == "MLE"
        assert guests_of(judge) == []


# --- S54: the worker is never the candidate, and knows nothing ---


@each_level
def test_the_candidate_is_never_pid_1_and_the_worker_is_all_there_is(judge: Judge) -> None:
    assert said(judge, "import os\nprint(os.getpid() != 1, os.getuid() != 0 or os.getppid() != 1)") == ["True True"]
    for worker in judge.lab._workers.values():
        assert len(children_of(worker.pid)) == (1 if worker.level == "namespaces" else 0)


def test_suites_of_every_kind_are_attacked() -> None:
    kinds = {kind for level in LEVELS for name in ATTACKS for kind in kinds_of(name, level)}
    assert kinds | {"reference"} == set(SUITES)
    assert all(parse_suite(suite) for suite in SUITES.values())
