"""The first page of a post-mortem: what happened, in plain words, from what is known. Pure: the clock and the files are elsewhere."""

from __future__ import annotations

import itertools
import textwrap
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from common.wait_graph import WaitRow, cycle_text

if TYPE_CHECKING:
    from services.tools.postmortem import Known

SHOWN_WAITS = 12


@dataclass(frozen=True)
class Story:
    """``text`` is the page; the waits are those of the run's last known moment, ``waits_at`` in words."""

    text: str
    waits: list[dict[str, Any]]
    cycles: list[list[str]]
    waits_at: str


def tell(known: Known) -> Story:
    """The whole page."""
    # At its end a run waits for nothing but its nodes to leave: the status before that has what people look for.
    last = known.status if known.status.get("waits") else known.summary or known.status
    waits, cycles = ([], []) if _finished(known) else (last.get("waits", []), last.get("cycles", []))
    waits_at = _when(last.get("at"))
    parts = [
        f"Post-mortem of run {_run_id(known)}\n",
        _state(known),
        _failures(known),
        _waits(waits, cycles, waits_at),
        _blocked(last),
        _work(known),
        _roles(known),
        _list("What this archive lacks:", known.notes),
        _CONTENT,
    ]
    return Story("\n".join(part for part in parts if part), waits, cycles, waits_at)


def _run_id(known: Known) -> str:
    return str(
        known.config.get("run", {}).get("id") or known.journal.meta.get("run_id") or known.run_dir.resolve().name
    )


def _finished(known: Known) -> bool:
    return not known.live and known.summary.get("state") == "finished"


def _last_error(log: str) -> str:
    """The error paragraph with which the last life of a process ended, as its log has it; '' if there is none."""
    lines = log.splitlines()
    started = max((i for i, line in enumerate(lines) if '"event": "starting"' in line), default=-1)
    said = [i for i, line in enumerate(lines) if i > started and line.startswith("error: ")]
    if not said:
        return ""
    paragraph = itertools.takewhile(lambda line: not line.startswith("{"), lines[said[-1] :])
    return "\n".join(paragraph).removeprefix("error: ")


def _state(known: Known) -> str:
    last = known.summary or known.status
    version, of = known.journal.version or last.get("version", 0), last.get("max_steps")
    step = f"The last committed step is {version}" + (f" of {of}." if of else ".")
    if known.live:
        return f"The run is ALIVE: its coordinator answered. {step}"
    if known.summary:
        ended = (
            f"The run {_ENDS.get(known.summary['state'], known.summary['state'])} at {_when(known.summary.get('at'))}"
        )
        reason = str(known.summary.get("end_reason") or "no reason was given")
        return textwrap.fill(f"{ended}: {reason.partition('. ')[0].rstrip('.')}. {step}", 118)
    if said := _last_error(known.logs.get("coordinator.log", "")):
        return textwrap.fill(f"The run FAILED, and left no summary. The coordinator's last words: {said} {step}", 118)
    if known.status:
        return textwrap.fill(
            "The coordinator ended WITHOUT A WORD (killed, out of memory, or its machine went away): it left no summary. It was last "
            f"seen at {_when(known.status.get('at'))}, when the run was {known.status.get('state')}. {step}",
            118,
        )
    return f"How the run ended is not known: there is neither a summary nor a status. {step}"


_ENDS = {"failed": "FAILED", "stopped": "was stopped in order", "finished": "finished"}


def _failures(known: Known) -> str:
    """The processes that ended with an error or vanished, the first of this life of the run first."""
    since = known.status.get("started_at", 0.0) - 1.0
    bad = [report for report in known.reports if report.get("error") or report.get("gone")]
    recent = [report for report in bad if report["at"] >= since]
    lines = [
        f"{_when(r['at'])}  {r['node_id']} ({r['role']}): {r.get('error') or 'vanished: ' + r['gone']}" for r in recent
    ]
    if not lines:
        said = {name.removesuffix(".log"): _last_error(text) for name, text in known.logs.items()}
        found = [f"{name}: {words}" for name, words in said.items() if words]
        head = "\nNo process left a report, but logs end with errors:" if found else "No process reported an error."
        return (_list(head, found) or head) + _earlier(len(bad))
    first = recent[0]
    head = f"\nFailed first: {first['node_id']} ({first['role']}) on {first.get('host', 'an unknown host')}"
    return (
        f"{head}, as far as clocks of different machines can be compared.\n"
        + _list("", lines)
        + _earlier(len(bad) - len(lines))
    )


def _earlier(count: int) -> str:
    return f"\n{count} report(s) are of earlier lives of this run." if count else ""


def _waits(waits: list[dict[str, Any]], cycles: list[list[str]], at: str) -> str:
    # Who only waits for work, or for a peer's answer, comes last: it holds nobody up.
    rows = [
        row.text for row in sorted((WaitRow(**wait) for wait in waits), key=lambda row: (not row.onward, -row.age_s))
    ]
    more = [f"and {len(rows) - SHOWN_WAITS} more, in waits.json"] if len(rows) > SHOWN_WAITS else []
    head = f"\nWho waited on whom at {at}, the longest first, idle ones last:"
    return _list(
        head, rows[:SHOWN_WAITS] + more + [cycle_text(cycle).upper()[:5] + cycle_text(cycle)[5:] for cycle in cycles]
    )


def _blocked(last: dict[str, Any]) -> str:
    nodes = {"coordinator": last.get("blocked_at")} | {n["node_id"]: n.get("blocked_at") for n in last.get("nodes", [])}
    return _list("\nEvent loops that were held up, and where:", [f"{name}: {at}" for name, at in nodes.items() if at])


def _work(known: Known) -> str:
    groups = ", ".join(f"{count} {status}" for status, count in sorted(known.journal.groups.items()))
    lines = [f"Groups in the journal: {groups}."] if groups else []
    may_live = known.journal.groups.keys() & {"open", "ready", "batched"} or not known.journal.readable
    if may_live and not _finished(known) and (oldest := known.status.get("oldest_groups")):
        group = oldest[0]
        lines.append(
            f"The oldest live group is {group['group_id']} (task {group['task_id']}), {group['status']}: {group['not_generated']} "
            f"completions to be generated, {group['not_judged']} to be judged; {group['generate_attempts']} generation attempts failed."
        )
    if known.journal.tasks_out:
        indices = ", ".join(str(task["task_index"]) for task in known.journal.tasks_out)
        lines.append(
            f"Tasks that were taken out because they failed too often: number {indices}; reasons in queue.json."
        )
    if known.journal.open_steps:
        steps = ", ".join(str(step["step"]) for step in known.journal.open_steps)
        lines.append(
            f"Handed to the learner and not committed: step {steps}. It is trained on the same batch when the run goes on."
        )
    if known.journal.readable and known.config and not known.live and not _finished(known):
        lines.append(
            f"Nothing acknowledged is lost. Go on with: forebay up --resume {known.run_dir} (or start the roles again)."
        )
    return _list("\nThe work:", lines)


def _roles(known: Known) -> str:
    """Of which processes there is what."""
    names = {node["node_id"]: node["role"] for node in known.status.get("nodes", [])}
    names |= {report["node_id"]: report["role"] for report in known.reports}
    names = {"coordinator": "coordinator"} | {name.removesuffix(".log"): "" for name in known.logs} | names
    lines = []
    for name in sorted(names):
        has = [f"reports/{r['file']}" for r in known.reports if r["node_id"] == name]
        has += [f"logs/{name}.log"] if f"{name}.log" in known.logs else []
        lines.append(f"{name}: {', '.join(has) if has else 'its last heartbeat, in summary.json'}")
    return _list("\nWhat there is of each process:", lines)


def _list(head: str, lines: list[str]) -> str:
    """``head`` and the lines, wrapped; '' without lines."""
    if not lines:
        return ""
    wrapped = [textwrap.fill(line, 116, initial_indent="  ", subsequent_indent="      ") for line in lines]
    return "\n".join([head, *wrapped] if head else wrapped)


def _when(at: float | None) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if at else "a time that is not known"


_CONTENT = """
In this archive:
  config.json     the resolved config, without secrets      waits.json    who waited on whom, and circles
  summary.json    the last state of the run                 queue.json    groups by status, the oldest with their tasks
  ledger.json     where every token went                    versions.json policy versions and software
  metrics.jsonl   every committed step                      events.jsonl  the journal's last 200 events
  reports/        stacks, waits and last log lines of each process when it failed or was asked
  logs/           the last 2,000 lines of each log"""
