"""A long run of a judge pool with known verdicts, and proof that nothing piles up.

    python -m bench.soak [--jobs 100000] [--hostile 0.01]

Programs of several kinds with distinct sources, a share of them hostile, go through one ``JudgePool``. At checkpoints, with nothing in
flight, processes, descriptors, memory, files and mounts are counted. Exit code 1: a wrong verdict, an infra error, more of anything
than after the first tenth of the run (memory may grow by 5%), or anything left after ``close``.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import sys
import tempfile
import time
from collections import Counter, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from protocol.suites import TestSuite, parse_suite
from protocol.verdicts import JudgeResult
from services.reward.config import RewardConfig
from services.reward.pool import JudgePool

GROWTH = 1.05  # of resident memory, from the first tenth of the run on
_CHECKPOINTS = 20
_IN_FLIGHT = 256
_SHOWN = 50  # problems
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20

# ---- jobs ----

_LIMITS = {"cpu_s": 0.5, "wall_s": 3, "memory_mib": 128, "output_kib": 64}
_SUITES = {
    "stdin": {"kind": "stdin", "cases": [{"input": "1 2\n", "output": "3\n"}, {"input": "40 2", "output": "42"}]},
    "asserts": {"kind": "asserts", "entry_point": "f", "code": "assert f(1, 2) == 3\nassert f(40, 2) == 42"},
    "call": {"kind": "call", "entry_point": "f", "cases": [{"args": [1, 2], "expected": 3}, {"args": [40, 2], "expected": 42}]},
    "check": {"kind": "check", "entry_point": "f", "code": "def check(f):\n    for a, b in ((1, 2), (40, 2)):\n        assert f(a, b) == a + b"},
}  # fmt: skip
_MAIN = "\nprint(f(*map(int, input().split())))"  # of programs for ``stdin``

_ORDINARY = {
    "accepted": "def f(a, b):\n    return a + b",
    "wrong_answer": "def f(a, b):\n    return a + b if a == 1 else a - b",
    "runtime_error": "def f(a, b):\n    return [a][b]",
    "compile_error": "def f(a, b):\n    return a +",
}
# What each comes to, whatever the kind. Those that end well do so because what they leave behind is nobody's business.
_HOSTILE = {
    "forks": ("runtime_error", "import os\ndef f(a, b):\n    os.fork()\n    return a + b"),
    "fork bomb": ("runtime_error", "import os\ndef f(a, b):\n    while True: os.fork()"),
    "daemon": ("runtime_error", "import os\ndef f(a, b):\n    if os.fork() == 0:\n        os.setsid()\n        while True: pass\n    return a + b"),
    "executes": ("runtime_error", "import os\ndef f(a, b):\n    os.execv('/bin/sh', ['sh', '-c', 'echo 3'])"),
    "floods": ("output_limit", "def f(a, b):\n    while True: print('x' * 10**5)"),
    "floods stderr": ("output_limit", "import os\ndef f(a, b):\n    while True: os.write(2, b'x' * 65536)"),
    "memory at once": ("memory_limit", "def f(a, b):\n    return bytearray(10**10)"),
    "memory by and by": ("memory_limit", "def f(a, b):\n    x = []\n    while True: x.append(bytearray(1 << 20))"),
    "kills itself": ("runtime_error", "import os\ndef f(a, b):\n    os.kill(os.getpid(), 9)"),
    "kills its parent": ("wrong_answer runtime_error", "import os\ndef f(a, b):\n    os.kill(os.getppid(), 9)\n    return 0"),
    "kills all": ("wrong_answer runtime_error", "import os\ndef f(a, b):\n    for p in (1, -1):\n        try: os.kill(p, 9)\n        except OSError: pass\n    return 0"),
    "fills the box": ("runtime_error", "def f(a, b):\n    for i in range(10**6):\n        with open(f'{a}-{i}', 'w') as file: file.write('x' * 10**6)"),
    "leaves files": ("accepted", "import os\ndef f(a, b):\n    for i in range(50): os.makedirs(f'{a}/d{i}'); os.symlink('/', f'{a}/l{i}')\n    return a + b"),
    "leaves threads": ("accepted", "import threading, time\ndef f(a, b):\n    for _ in range(4): threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n    return a + b"),
    "leaves descriptors": ("accepted", "import os\nkept = []\ndef f(a, b):\n    kept.extend(os.pipe() for _ in range(40))\n    return a + b"),
    "exits": ("runtime_error", "import sys\ndef f(a, b):\n    sys.exit(1)"),
    "exits at once": ("runtime_error wrong_answer", "import os\ndef f(a, b):\n    os._exit(0)"),
    "aborts": ("runtime_error", "import os\ndef f(a, b):\n    os.abort()"),
    "recurses": ("runtime_error", "def f(a, b):\n    return f(a, b)"),
    "runs on": ("time_limit", "def f(a, b):\n    while True: pass"),
    "opens a socket": ("runtime_error", "import socket\ndef f(a, b):\n    socket.create_connection(('127.0.0.1', 80))"),
    "foreign call": ("security_violation", "import ctypes\ndef f(a, b):\n    ctypes.CDLL(None).syscall(0x40000000 | 39)\n    return a + b"),
    "forges answers": ("runtime_error wrong_answer", "import os\ndef f(a, b):\n    for d in range(3, 64):\n        try: os.write(d, b'\\xff' * 64)\n        except OSError: pass\n    return 0"),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One completion and the verdicts that are right for it."""

    name: str
    completion: str
    suite: TestSuite
    right: frozenset[str]


class Jobs:
    """Job ``number``: always the same one, and a source that no other has."""

    def __init__(self, hostile: float) -> None:
        self._suites = {kind: parse_suite({**suite, "limits": _LIMITS}) for kind, suite in _SUITES.items()}
        self._every = round(1 / hostile) if hostile else 0

    def one_of_each(self) -> list[Job]:
        """Every program with every kind."""
        named = [*((f"ordinary, {v}", v, code) for v, code in _ORDINARY.items())]
        named += [(name, right, code) for name, (right, code) in _HOSTILE.items()]
        return [
            self._made(f"each-{name}", kind, right, code, name) for name, right, code in named for kind in self._suites
        ]

    def job(self, number: int) -> Job:
        """The job; every ``1 / hostile``-th is hostile."""
        kind = list(self._suites)[number % len(self._suites)]
        if self._every and number % self._every == 0:
            index = number // self._every
            name = list(_HOSTILE)[index % len(_HOSTILE)]
            kind = list(self._suites)[index // len(_HOSTILE) % len(self._suites)]
            right, code = _HOSTILE[name]
            return self._made(str(number), kind, right, code, name)
        index = number // len(self._suites) % 8  # mostly right ones
        verdict = list(_ORDINARY)[index] if index < len(_ORDINARY) else "accepted"
        return self._made(str(number), kind, verdict, _ORDINARY[verdict], f"ordinary, {verdict}")

    def _made(self, key: str, kind: str, right: str, code: str, name: str) -> Job:
        if kind == "stdin":
            code += _MAIN
        return Job(f"{kind}: {name}", f"```python\n{code}\n# {key}\n```", self._suites[kind], frozenset(right.split()))


# ---- counting ----


@dataclass
class Count:
    """What there is at one moment. Of each role (pool, judge, worker) the number of processes, descriptors, and the largest one's memory."""

    processes: Counter[str] = field(default_factory=Counter)
    descriptors: dict[str, int] = field(default_factory=dict)
    resident_mib: dict[str, float] = field(default_factory=dict)
    files: int = 0
    mounts: int = 0
    groups: int = 0


def _family(root: int) -> dict[int, int]:
    """Every live process under ``root`` and itself: how deep it lies."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            words = _read(f"/proc/{name}/stat").rpartition(")")[2].split()
            if words and words[0] != "Z":
                parents[int(name)] = int(words[1])
    depths = {root: 0}
    while more := {
        pid: depths[parent] + 1 for pid, parent in parents.items() if parent in depths and pid not in depths
    }:
        depths.update(more)
    return depths


def count() -> Count:
    """All of this process' and its children's."""
    gc.collect()
    found = Count()
    for pid, depth in _family(os.getpid()).items():
        role = _role(depth, _read(f"/proc/{pid}/cmdline"))
        try:
            num_descriptors = len(os.listdir(f"/proc/{pid}/fd")) - (pid == os.getpid())
            resident = int(_read(f"/proc/{pid}/statm").split()[1]) * _PAGE_MIB
        except (OSError, IndexError):  # it has just ended
            continue
        found.processes[role] += 1
        found.descriptors[role] = max(found.descriptors.get(role, 0), num_descriptors)
        found.resident_mib[role] = max(found.resident_mib.get(role, 0), resident)
    found.files = sum(len(folders) + len(files) for _, folders, files in os.walk(tempfile.gettempdir()))
    found.mounts = len(_read("/proc/self/mountinfo").splitlines())
    found.groups = _num_groups()
    return found


def _role(depth: int, command: str) -> str:
    """Of a process ``depth`` below the pool. Workers go by how much they have imported: they are of different sizes."""
    if depth < 2:
        return "judge" if "judge_process" in command else "pool"
    modules = next((len(word.split()) for word in command.split("\0") if word.startswith("typing ")), 0)
    return f"worker ({modules} modules)"


def _num_groups() -> int:
    """Control groups that this process' judges have made, by the pid in their names; whatever else runs here has its own."""
    mine = {str(pid) for pid in _family(os.getpid())}
    found = 0
    for line in _read("/proc/self/mountinfo").splitlines():
        mount = line.split()[4]
        if re.search(r" - cgroup2? ", line) and ("memory" in line or "cgroup2" in line):
            names = (path.name for path in Path(mount).glob("**/forebay-*-*") if path.is_dir())
            found += sum(name.split("-")[1] in mine for name in names)
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


# ---- the run ----


class Soak:
    """Jobs through a pool, their verdicts compared, and counts compared with the first."""

    def __init__(self, num_jobs: int, hostile: float, workers: int) -> None:
        self.jobs, self.num_jobs = Jobs(hostile), num_jobs
        self.problems: list[str] = []
        self.verdicts: Counter[str] = Counter()
        self.isolation = "none"
        self._pool = JudgePool(RewardConfig(workers=workers, cache_size=0))
        self._open: deque[tuple[Job, Future[JudgeResult]]] = deque()

    def run(self) -> tuple[Count, Count, Count]:
        """Counts after the first tenth, the largest later ones, and what is left after ``close``, less what was there before."""
        before = count()
        self._pool.start()
        self.isolation = self._pool.isolation
        try:
            for _ in range(3):  # so that every judge has every worker, and every worker has seen everything
                for job in self.jobs.one_of_each():
                    self._submit(job)
            self._drain()
            baseline, peak = self._judge_all()
        finally:
            self._pool.close()
        after = count()
        self._compare_end(before, after)
        return baseline, peak, after

    def _judge_all(self) -> tuple[Count, Count]:
        started, step = time.monotonic(), max(1, self.num_jobs // _CHECKPOINTS)
        baseline: Count | None = None
        peak = Count()
        for first in range(0, self.num_jobs, step):
            begun = time.monotonic()
            last = min(first + step, self.num_jobs)
            for number in range(first, last):
                self._submit(self.jobs.job(number))
            self._drain()
            now = count()
            resident = "  ".join(f"{role} {mib:.1f}" for role, mib in sorted(now.resident_mib.items()))
            rate = (last - first) / (time.monotonic() - begun)
            print(
                f"{last:7d} jobs  {rate:5.0f}/s  {time.monotonic() - started:6.0f} s  {sum(now.processes.values())} processes  "
                f"{sum(now.descriptors.values())} descriptors  MiB: {resident}  problems {len(self.problems)}",
                flush=True,
            )
            if first * 10 < self.num_jobs or baseline is None:
                baseline = now
                continue
            self._compare(baseline, now)
            peak = _largest(peak, now)
        assert baseline is not None
        return baseline, peak

    def _submit(self, job: Job) -> None:
        if len(self._open) >= _IN_FLIGHT:
            self._take()
        self._open.append((job, self._pool.submit(job.completion, job.suite)))

    def _drain(self) -> None:
        while self._open:
            self._take()

    def _take(self) -> None:
        """The oldest job's verdict."""
        job, future = self._open.popleft()
        result = future.result()
        self.verdicts[result.verdict.value] += 1
        if result.verdict.value not in job.right:
            self._problem(f"{job.name}: {result.verdict.value} ({result.message}), not {' or '.join(job.right)}")

    def _problem(self, text: str) -> None:
        self.problems.append(text)
        if len(self.problems) <= _SHOWN:
            print(f"PROBLEM {text}", flush=True)

    def _compare(self, first: Count, now: Count) -> None:
        for role, number in now.processes.items():
            if number > first.processes[role]:
                self._problem(f"{number} processes of {role}, {first.processes[role]} before")
        for role, number in now.descriptors.items():
            if number > first.descriptors.get(role, 0):
                self._problem(f"{number} descriptors of {role}, {first.descriptors.get(role, 0)} before")
        for role, mib in now.resident_mib.items():
            if mib > GROWTH * first.resident_mib.get(role, 0):
                self._problem(f"{mib:.1f} MiB of {role}, {first.resident_mib.get(role, 0):.1f} before")
        for name in ("files", "mounts", "groups"):
            if getattr(now, name) > getattr(first, name):
                self._problem(f"{getattr(now, name)} {name}, {getattr(first, name)} before")

    def _compare_end(self, before: Count, after: Count) -> None:
        if sum(after.processes.values()) != sum(before.processes.values()):
            self._problem(f"processes left after close: {dict(after.processes)}")
        if after.descriptors["pool"] > before.descriptors["pool"]:
            self._problem(f"descriptors left after close: {after.descriptors['pool'] - before.descriptors['pool']}")
        for name in ("files", "mounts", "groups"):
            if getattr(after, name) > getattr(before, name):
                self._problem(f"{name} left after close: {getattr(after, name) - getattr(before, name)}")


def _largest(one: Count, other: Count) -> Count:
    return Count(
        Counter({k: max(one.processes[k], other.processes[k]) for k in {*one.processes, *other.processes}}),
        {k: max(one.descriptors.get(k, 0), v) for k, v in other.descriptors.items()},
        {k: max(one.resident_mib.get(k, 0), v) for k, v in other.resident_mib.items()},
        *(max(getattr(one, name), getattr(other, name)) for name in ("files", "mounts", "groups")),
    )


def main() -> int:
    """Run and print: the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--hostile", type=float, default=0.01, help="share of hostile programs")
    parser.add_argument("--workers", type=int, default=0, help="judgements at a time; 0: one per core")
    args = parser.parse_args()
    soak = Soak(args.jobs, args.hostile, args.workers)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="forebay-soak-") as folder:  # nobody else's files
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        baseline, peak, after = soak.run()
    print(f"\n{args.jobs} jobs in {time.monotonic() - started:.0f} s, isolation {soak.isolation}")
    print(f"verdicts {dict(soak.verdicts)}")
    print(f"{'':<24} {'after a tenth':>14} {'largest later':>14}")
    for role in sorted(baseline.resident_mib):
        print(f"{role + ', MiB':<24} {baseline.resident_mib[role]:14.1f} {peak.resident_mib.get(role, 0):14.1f}")
        print(f"{role + ', descriptors':<24} {baseline.descriptors[role]:14d} {peak.descriptors.get(role, 0):14d}")
    for name in ("files", "mounts", "groups"):
        print(
            f"{name:<24} {getattr(baseline, name):14d} {getattr(peak, name):14d}   after close {getattr(after, name)}"
        )
    print(f"{'processes':<24} {sum(baseline.processes.values()):14d} {sum(peak.processes.values()):14d}   after close "
          f"{sum(after.processes.values())}")  # fmt: skip
    print(f"problems: {len(soak.problems)}")
    return int(bool(soak.problems))


if __name__ == "__main__":
    sys.exit(main())
