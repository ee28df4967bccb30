"""Run cases one after the other and print a line for each: fault, detected after, recovered after, lost, duplicated."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from common.errors import ConfigError
from tests.faults.case import Case, Result, run_case
from tests.faults.cases.table import STAGES, all_cases

_COLUMNS = (
    ("fault", 72),
    ("detected after", 14),
    ("recovered after", 15),
    ("lost", 4),
    ("duplicated", 10),
    ("result", 7),
)


def select(names: Sequence[str], stages: Sequence[str], *, real: bool) -> list[Case]:
    """The cases of these names, or else of these stages, or else all; ``real`` adds those with real vLLM and Megatron.

    Raises:
        ConfigError: there is no such name or stage.
    """
    cases = all_cases()
    known = {case.name for case in cases}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"There is no case {', '.join(unknown)}. make faults --list has them all.")
    if unknown := [stage for stage in stages if stage not in STAGES]:
        raise ConfigError(f"There is no stage {', '.join(unknown)}. The stages are: {', '.join(STAGES)}.")
    if names:
        return [case for case in cases if case.name in names]
    return [case for case in cases if (real or not case.real) and (not stages or case.stage in stages)]


def list_table(cases: Sequence[Case]) -> str:
    """The cases as a Markdown table; ``README.md`` has it."""
    rows = ["| stage | case | fault | reported as |", "| --- | --- | --- | --- |"]
    for case in cases:
        numbers = ", ".join(map(str, case.covers))
        rows.append(f"| {case.stage} | `{case.name}` | {case.fault}{' (real)' if case.real else ''} | {numbers} |")
    return "\n".join(rows) + "\n"


def main(
    *,
    names: Sequence[str] = (),
    stages: Sequence[str] = (),
    real: bool = False,
    seed: int = 0,
    json_path: Path | None = None,
    keep: Path | None = None,
) -> int:
    """Body of ``make faults``: 0 only if every case that could run has passed."""
    cases = select(names, stages, real=real)
    if json_path is not None and not json_path.parent.is_dir():
        raise ConfigError(f"--json {json_path}: there is no folder {json_path.parent}.")
    console = Console()
    results: list[Result] = []
    console.print(_line([name for name, _ in _COLUMNS]), soft_wrap=True)
    with _logs_in(keep) as folder, _ended_by_sigterm():
        stopped = False
        try:
            for case in cases:
                results.append(result := run_case(case, folder / case.name, seed=seed))
                console.print(_row(result), soft_wrap=True)
                if not result.passed:
                    console.print(Text("    " + result.why[:2000].replace("\n", "\n    "), style="dim"), soft_wrap=True)
                elif keep is None:
                    shutil.rmtree(folder / case.name)
        except KeyboardInterrupt:  # ``Run`` has ended its processes on the way here
            stopped = True
        failed = [result for result in results if not result.passed and not result.not_run]
        console.print(_summary(results, len(cases)))
        if json_path is not None:
            json_path.write_text(json.dumps([result.as_dict() for result in results], indent=1))
        if failed or keep is not None:
            console.print(f"Logs and journals: {folder}", soft_wrap=True)
        elif keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return 130 if stopped else 1 if failed else 0


@contextlib.contextmanager
def _logs_in(keep: Path | None) -> Iterator[Path]:
    """Where the runs go. The caller deletes it if nothing in it is wanted."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    yield keep.resolve() if keep is not None else Path(tempfile.mkdtemp(prefix="forebay-faults-"))


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the suite as a Ctrl-C does: in order."""

    def stop(_signum: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _line(cells: Sequence[str]) -> str:
    first, *others = (
        _cut(cell, width).ljust(width) if index == 0 else cell.rjust(width)
        for index, (cell, (_, width)) in enumerate(zip(cells, _COLUMNS, strict=True))
    )
    return " ".join([first, *others]).rstrip()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _row(result: Result) -> Text:
    word, style = (
        ("not run", "yellow") if result.not_run else ("passed", "green") if result.passed else ("FAILED", "red")
    )
    numbers = [str(result.lost), str(result.duplicated)] if not result.not_run else ["", ""]
    cells = [f"{result.case.name}: {result.case.fault}", _s(result.detected_s), _s(result.recovered_s), *numbers, word]
    return Text(_line(cells), style=style if not result.passed else "")


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _summary(results: Sequence[Result], num_cases: int) -> str:
    counts: dict[str, Any] = {
        "passed": sum(result.passed for result in results),
        "failed": sum(not result.passed and not result.not_run for result in results),
        "not run": sum(result.not_run for result in results) + num_cases - len(results),
    }
    outcome = ", ".join(f"{count} {word}" for word, count in counts.items())
    lost, twice = sum(r.lost for r in results), sum(r.duplicated for r in results)
    wall_s = sum(result.wall_s for result in results)
    return f"{num_cases} cases: {outcome}; lost {lost}, duplicated {twice}; {wall_s:.0f} s on {os.cpu_count()} cores"
