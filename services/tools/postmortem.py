"""``forebay postmortem RUN``: one archive of all that is known of a run, dead or alive, without its secrets.

It reads the run's folder and nothing else, except that a coordinator which still answers is asked to have every process write its report
first. Nothing of the run is changed, and whatever is missing or damaged is a line in ``README.txt``, not an error.
"""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from common.errors import ConfigError, ForebayError, PeerError
from common.recorder import versions
from common.scrub import scrub_config, scrub_text, secrets_of_environment
from protocol.client import ask
from protocol.messages import Ack, CollectReports
from protocol.security import Keys, read_keys
from services.journal_reader import JournalFacts, read_journal
from services.tools.postmortem_story import Story, tell

LOG_LINES = 2000
LOG_BYTES = 4 << 20  # of the end of a log file, in which those lines are looked for
COLLECT_TIMEOUT_S = 6.0  # the coordinator gives the nodes 2.5 s
ASK_TIMEOUT_S = 2.0

Facts = dict[str, Any]


def main(run_dir: Path, out: Path | None) -> int:
    """Body of ``forebay postmortem``.

    Raises:
        ConfigError: ``run_dir`` is not the folder of a run, or ``out`` is there already or can't be written.
    """
    if out is not None and out.exists():
        raise ConfigError(f"{out} is there already, and is not overwritten. Give another name with --out.")
    known = gather(run_dir)
    story = tell(known)
    path = out or Path(f"{run_dir.resolve().name}-postmortem-{datetime.now():%Y%m%d-%H%M%S}.tar.gz")
    try:
        _pack(path, run_dir.resolve().name, dict(_members(known, story)))
    except OSError as error:
        raise ConfigError(f"The archive {path} can't be written: {error.strerror}. Give another with --out.") from None
    Console(highlight=False).print(known.scrub(story.text), soft_wrap=True, markup=False)
    print(f"\nArchive: {path}")
    return 0


@dataclass
class Known:
    """What the folder of a run says. ``status`` is of the run's last moment before its end, ``summary`` of its end; {} if not there.

    ``notes`` are sentences on what is missing or damaged; ``live`` is whether its coordinator answered.
    """

    run_dir: Path
    config: Facts = field(default_factory=dict)
    status: Facts = field(default_factory=dict)
    summary: Facts = field(default_factory=dict)
    journal: JournalFacts = field(default_factory=JournalFacts)
    reports: list[Facts] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    live: bool = False

    def scrub(self, text: str) -> str:
        """``text`` without secrets."""
        return scrub_text(text, self.secrets)


def gather(run_dir: Path) -> Known:
    """Read everything; ask a live coordinator for reports before that.

    Raises:
        ConfigError: it is not the folder of a run.
    """
    if not any((run_dir / name).exists() for name in ("journal.sqlite", "config.json", "status.json", "logs")):
        raise ConfigError(f"{run_dir.resolve()} is not the folder of a run: it has no journal, config, status or logs.")
    known = Known(run_dir)
    known.config = _read_json(known, "config.json")
    keys = _keys(known)
    known.secrets = _secrets(keys)
    known.live = _collect(known, keys)
    known.status, known.summary = _read_json(known, "status.json"), _read_json(known, "summary.json", needed=False)
    if known.summary.get("at", 0.0) < known.status.get("started_at", 0.0):
        known.summary = {}  # of an earlier life of the coordinator
    known.journal = read_journal(run_dir / "journal.sqlite")
    known.notes += known.journal.problems
    known.reports = _read_reports(known)
    if not known.config:
        known.config = next((r["config"] for r in known.reports if r.get("config")), {})
    known.logs = {path.name: _tail(known, path) for path in sorted((run_dir / "logs").glob("*.log"))}
    for report in known.reports:  # of processes whose log is elsewhere: another host, a service manager
        name = f"{report['node_id']}.log"
        if report.get("log") and name not in known.logs:
            known.logs[name] = "\n".join(report["log"]) + "\n"
    return known


def _read_json(known: Known, name: str, *, needed: bool = True) -> Facts:
    path = known.run_dir / name
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        if needed:
            known.notes.append(f"There is no {name} in the run's folder.")
    except (OSError, ValueError, TypeError) as error:
        known.notes.append(f"{name} can't be read: {error}.")
    return {}


def _keys(known: Known) -> Keys | None:
    path = known.config.get("run", {}).get("key_file")
    if not path:
        return None
    try:
        return read_keys(Path(path))
    except ConfigError as error:
        known.notes.append(f"The run's keys are not known here, so their text was not looked for in the logs: {error}")
        return None


def _secrets(keys: Keys | None) -> list[str]:
    return secrets_of_environment() + ([] if keys is None else list(keys.model_dump().values()))


def _collect(known: Known, keys: Keys | None) -> bool:
    """Have a live coordinator collect reports. Whether there is one."""
    run = known.config.get("run", {})
    if not run.get("address"):
        return False
    try:
        from services.tools.status import fetch

        if fetch(run["address"], run.get("id", ""), timeout_s=ASK_TIMEOUT_S, keys=keys)["state"] != "running":
            return False
        answer = ask(run["address"], run.get("id", ""), CollectReports(), timeout_s=COLLECT_TIMEOUT_S, keys=keys)
        if isinstance(answer, Ack) and answer.reason:
            known.notes.append(f"The run is alive, and this was asked of its nodes in vain: {answer.reason}.")
        return True
    except PeerError:
        return False
    except (ForebayError, OSError) as error:
        known.notes.append(f"The coordinator at {run['address']} could not be asked: {error}")
        return False


def _read_reports(known: Known) -> list[Facts]:
    """All reports, oldest first."""
    reports = []
    for path in sorted((known.run_dir / "reports").glob("*.json")):
        try:
            report = dict(json.loads(path.read_text()))
            reports.append({"node_id": path.stem, "role": "unknown", "at": 0.0, "file": path.name} | report)
        except (OSError, ValueError, TypeError) as error:
            known.notes.append(f"The report {path.name} can't be read: {error}.")
    return sorted(reports, key=lambda report: report["at"])


def _tail(known: Known, path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, io.SEEK_END)
            file.seek(max(0, file.tell() - LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        known.notes.append(f"The log {path.name} can't be read: {error.strerror}.")
        return ""
    return "\n".join(lines[-LOG_LINES:]) + "\n"


def _members(known: Known, story: Story) -> Iterator[tuple[str, str]]:
    """Every file of the archive with its text, scrubbed."""
    journal, last = known.journal, known.status or known.summary

    def as_json(data: Any) -> str:
        return known.scrub(json.dumps(data, indent=1, default=str)) + "\n"

    yield "README.txt", known.scrub(story.text) + "\n"
    yield "config.json", as_json(scrub_config(known.config))
    yield "summary.json", as_json(known.summary or known.status)
    yield "waits.json", as_json({"waits": story.waits, "cycles": story.cycles, "as_of": story.waits_at})
    yield "ledger.json", as_json({"journal": journal.ledger, "status": (known.summary or last).get("ledger")})
    yield (
        "queue.json",
        as_json(
            {
                "groups": journal.groups or last.get("groups"),
                "oldest_groups": last.get("oldest_groups"),
                "oldest_open_groups_in_journal": journal.oldest_open,
                "open_steps": journal.open_steps,
                "tasks_taken_out": journal.tasks_out,
            }
        ),
    )
    yield (
        "versions.json",
        as_json(
            {
                "policy": {name: journal.meta.get(name) for name in ("schema", "run_uid", "boots", "incarnation")}
                | {"version": journal.version if journal.readable else last.get("version")},
                "held": {node["node_id"]: node["holds"] for node in last.get("nodes", []) if node["holds"]},
                "software": {report["file"]: report["versions"] for report in known.reports if report.get("versions")},
                "postmortem": versions(),
            }
        ),
    )
    yield "metrics.jsonl", "".join(known.scrub(json.dumps(step)) + "\n" for step in journal.steps)
    yield "events.jsonl", "".join(known.scrub(json.dumps(event)) + "\n" for event in journal.events)
    for report in known.reports:
        yield f"reports/{report['file']}", as_json({key: value for key, value in report.items() if key != "file"})
    for name, text in known.logs.items():
        yield f"logs/{name}", known.scrub(text)


def _pack(path: Path, folder: str, members: dict[str, str]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        with tarfile.open(partial, "w:gz") as archive:
            for name, text in members.items():
                data = text.encode(errors="replace")
                info = tarfile.TarInfo(f"{folder}-postmortem/{name}")
                info.size, info.mtime = len(data), int(time.time())
                archive.addfile(info, io.BytesIO(data))
        partial.rename(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
