"""``forebay judge FILE --tests T``: judge one completion at a terminal, and say what the verdict means.

FILE is a completion: text as a model writes it. With the suffix of a language (.py, .cpp, .js, ...) it is the program itself. ``-`` is a
completion on stdin. T is JSON: a suite, or an object with a suite in ``tests`` (a line of a task file, or of ``forebay reward --once``);
or JSONL of such objects, of which ``--task-id`` names one by its ``task_id`` or ``id``.

Exit codes: 0 accepted; 1 any other verdict; 2 FILE or T can't be used; 8 infra_error: the judge could not say.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.errors import EXIT_NOT_JUDGED, ConfigError
from protocol.suites import TestSuite, parse_suite
from protocol.verdicts import JudgeResult, TestResult, Verdict
from services.reward.config import RewardConfig
from services.reward.extraction import extract_code
from services.reward.pool import JudgePool

MEANINGS = {
    Verdict.ACCEPTED: "The program passed every test.",
    Verdict.WRONG_ANSWER: "The program ran to its end, and at least one answer was not the expected one.",
    Verdict.RUNTIME_ERROR: "The program ended with an exception, a signal or an exit code other than 0.",
    Verdict.TIME_LIMIT: "The program used up the CPU time or the wall time of limits.cpu_s or limits.wall_s.",
    Verdict.MEMORY_LIMIT: "The program wanted more memory than limits.memory_mib.",
    Verdict.OUTPUT_LIMIT: "The program wrote more than limits.output_kib.",
    Verdict.COMPILE_ERROR: "The code is no program of its language, so nothing was run.",
    Verdict.NO_CODE: "No code was found in the completion, so nothing was run.",
    Verdict.SECURITY_VIOLATION: "The program did what a sandboxed program must not, and was ended for it.",
    Verdict.INFRA_ERROR: "The judge could not say: this is no word on the program, and gives no reward.",
}
_SUFFIXES = {".py": "python", ".js": "javascript", ".mjs": "javascript", ".cjs": "javascript"} | dict.fromkeys(
    (".cpp", ".cc", ".cxx", ".c++"), "cpp"
)
_HEAD = 12  # lines of the code
_ROWS = 50  # of the table of tests
_MAX_BYTES = 320 << 20


def main(config: RewardConfig, file: str, tests: Path, *, task_id: str, show_code: bool, as_json: bool) -> int:
    """Judge and explain; returns the exit code.

    Raises:
        ConfigError: FILE or T can't be used, or no sandbox works here.
    """
    completion = read_completion(file)
    suite = read_suite(tests, task_id)
    pool = JudgePool(config.model_copy(update={"workers": 1}))
    try:
        pool.start()
        result = pool.judge(completion, suite)
    finally:
        pool.close()
    code = code_in(completion, suite)
    if as_json:
        record = result.model_dump(mode="json", warnings=False) | {"code": code, "meaning": MEANINGS[result.verdict]}
        print(json.dumps(record, indent=1))
    else:
        _print(Console(highlight=False), result, code, show_code=show_code)
    if result.verdict is Verdict.INFRA_ERROR:
        return EXIT_NOT_JUDGED
    return 0 if result.verdict is Verdict.ACCEPTED else 1


def read_completion(file: str) -> str:
    """The completion in FILE; a bare program in the fence that a model would have put it in.

    Raises:
        ConfigError: no such file, or no text.
    """
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        text = data.decode()
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no UTF-8 text (byte {error.start}).") from None
    language = _SUFFIXES.get(Path(file).suffix.lower())
    if language is None:
        return text
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def read_suite(path: Path, task_id: str = "") -> TestSuite:
    """The suite in T.

    Raises:
        ConfigError: says what is wrong, and where.
    """
    try:
        if path.stat().st_size > _MAX_BYTES and not task_id:
            raise ConfigError(
                f"{path} is larger than {_MAX_BYTES >> 20} MiB. If it has many tasks, name one with --task-id."
            )
        record, where = _one_of(path, task_id) if task_id else (_whole(path), str(path))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text (byte {error.start}).") from None
    prefix = ""
    if isinstance(record, dict) and "kind" not in record and "tests" in record:
        record, prefix = record["tests"], "tests."
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: {prefix or 'it '}must be an object with a kind, not {type(record).__name__}.")
    try:
        return parse_suite(record)
    except ValueError as error:
        raise ConfigError(
            f"{where} is no test suite: {prefix}{error}. services/reward/README.md shows every kind."
        ) from None


def _whole(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        lines = [line for line in text.split("\n") if line.strip()]
        if error.msg == "Extra data" and len(lines) > 1 and lines[0].lstrip().startswith("{"):
            raise ConfigError(f"{path} has {len(lines)} lines: say which task with --task-id ID.") from None
        raise ConfigError(f"{path} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from None


def _one_of(path: Path, task_id: str) -> tuple[Any, str]:
    """The object of that id, and where it stands."""
    ids = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}:{number} is not JSON: {error}.") from None
            if isinstance(record, dict):
                found = record.get("task_id", record.get("id"))
                if str(found) == task_id:
                    return record, f"{path}:{number}"
                ids.append(str(found))
    listing = ", ".join(ids[:5]) + (", ..." if len(ids) > 5 else "")
    raise ConfigError(f"{path} has no task {task_id!r}; it has {len(ids)}: {listing or 'none'}.")


def code_in(completion: str, suite: TestSuite) -> str | None:
    """What the judge takes for the program."""
    return extract_code(completion, getattr(suite, "entry_point", ""), suite.language)


def _print(console: Console, result: JudgeResult, code: str | None, *, show_code: bool) -> None:
    good = result.verdict is Verdict.ACCEPTED
    console.print(Text(f"{result.verdict}", style="bold green" if good else "bold red"), Text(MEANINGS[result.verdict]))
    if result.message:
        console.print(Text(result.message))
    console.print()
    facts = Table.grid(padding=(0, 2))
    parts = ", ".join(f"{name} {value:.3f}" for name, value in result.parts.items())
    facts.add_row(
        "reward", "none" if result.reward is None else f"{result.reward:.3f}" + (f"  ({parts})" if parts else "")
    )
    facts.add_row("tests", f"{result.tests_passed} of {result.tests_total} passed")
    facts.add_row("cost", f"{result.cpu_s:.3f} s CPU, {result.wall_s:.3f} s wall, {result.memory_mib:.1f} MiB")
    trust = "" if result.trust == "full" else ", tests in the program's own process"
    facts.add_row("isolation", result.isolation + trust)
    console.print(facts)
    if result.tests:
        console.print()
        console.print(_tests(result))
    console.print()
    _print_code(console, code, whole=show_code)


def _tests(result: JudgeResult) -> Table:
    """Failures first where there are too many for one screen."""
    rows = list(enumerate(result.tests, start=1))
    if len(rows) > _ROWS:
        rows = sorted(sorted(rows, key=lambda row: row[1].verdict is Verdict.ACCEPTED)[:_ROWS])
    table = Table(title_justify="left", caption_justify="left")
    for name in ("test", "verdict", "CPU", "wall", "memory", "message"):
        table.add_column(
            name, justify="right" if name in ("test", "CPU", "wall", "memory") else "left", overflow="fold"
        )
    for number, test in rows:
        table.add_row(
            str(number),
            Text(str(test.verdict), style="green" if test.verdict is Verdict.ACCEPTED else "red"),
            *_costs(test),
            Text(test.message),
        )
    if len(rows) < result.tests_total:
        table.caption = f"{len(rows)} of {result.tests_total} tests; --json has all that ran"
    return table


def _costs(test: TestResult) -> tuple[str, str, str]:
    """CPU, wall and memory of a test that had a process of its own."""
    if not test.wall_s:
        return "-", "-", "-"
    return f"{test.cpu_s:.3f} s", f"{test.wall_s:.3f} s", f"{test.memory_mib:.1f} MiB"


def _print_code(console: Console, code: str | None, *, whole: bool) -> None:
    if code is None:
        console.print("Nothing in the completion was taken for code.")
        return
    lines = code.rstrip().split("\n")
    shown = lines if whole else lines[:_HEAD]
    console.print(Text(f"The code ({len(lines)} lines):", style="bold"))
    for line in shown:
        console.print(Text("  " + line), soft_wrap=True)
    if len(shown) < len(lines):
        console.print(f"  ... {len(lines) - len(shown)} more lines: --code prints them")
