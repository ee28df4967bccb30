"""What people see of a run: ``forebay status``, and the live view and final tables of ``forebay up``."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from statistics import fmean
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from common.errors import PeerError
from common.wait_graph import cycle_text
from protocol.client import ask
from protocol.messages import StatusReply, StatusRequest
from protocol.security import Keys

Status = dict[str, Any]
PLAIN_WIDTH = 160  # columns in a file or a pipe, where nothing has to be broken
_WORK = {"rollout": "generated_tokens", "reward": "judged"}  # the counter that is a node's output


def fetch(address: str, run_id: str = "", *, timeout_s: float = 5.0, keys: Keys | None = None) -> Status:
    """The coordinator's status.

    Raises:
        PeerError: nobody answers.
    """
    reply = ask(address, run_id, StatusRequest(), timeout_s=timeout_s, keys=keys)
    assert isinstance(reply, StatusReply)
    return dict(json.loads(reply.status_json))


def main(address: str, *, keys: Keys | None, as_json: bool) -> int:
    """Body of ``forebay status``."""
    status = fetch(address, keys=keys)
    if as_json:
        print(json.dumps(status, indent=1))
        return 0
    rates = Rates()
    rates.add(status)
    time.sleep(Rates.SHORTEST_S)  # a rate takes two looks
    with contextlib.suppress(PeerError):  # it ended meanwhile
        status = fetch(address, keys=keys)
    plain_console().print(render(status, rates))
    return 0


def plain_console() -> Console:
    """The terminal, or a wide page where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


class Rates:
    """Per-second rates from the growth of counters between looks, over the last 15 s or so."""

    WINDOW_S = 15.0
    SHORTEST_S = 1.0

    def __init__(self) -> None:
        self._looks: deque[tuple[float, dict[str, float]]] = deque()

    def add(self, status: Status) -> dict[str, float]:
        """Rates of each node (by id) and of the learner's trained tokens (``trained``)."""
        counters = {node["node_id"]: node["counters"].get(_WORK.get(node["role"]), 0.0) for node in status["nodes"]}
        counters["trained"] = float(status["ledger"]["trained"])
        now = float(status["uptime_s"])
        self._looks.append((now, counters))
        while self._looks[0][0] < now - self.WINDOW_S:
            self._looks.popleft()
        rates = {}
        for name, value in counters.items():
            then, old = next((at, look[name]) for at, look in self._looks if name in look)
            if now - then >= self.SHORTEST_S:
                rates[name] = (value - old) / (now - then)
        return rates


def _show(row: dict[str, Any], key: str, form: str) -> str:
    """A metric of a step; what the step didn't measure is a dash."""
    return form.format(row[key]) if key in row else "-"


def step_line(row: dict[str, Any]) -> str:
    """One committed step as one line of text."""
    trained = row.get("train/num_tokens", 0.0) / max(row.get("time/train_s", 0.0), 1e-9)
    return (
        f"step {row['step']:>4}  reward {_show(row, 'reward/mean', '{:.3f}')}  "
        f"no-signal {_show(row, 'reward/no_signal_groups', '{:4.0%}')}  "
        f"staleness {_show(row, 'staleness/mean', '{:.2f}')} (max {_show(row, 'staleness/max', '{:.0f}')})  "
        f"log-prob gap {_show(row, 'train/logprob_gap_mean', '{:.4f}')}  grad {_show(row, 'train/grad_norm', '{:.3f}')}  "
        f"train {_show(row, 'time/train_s', '{:.2f}')} s ({trained:.0f} tok/s)  "
        f"publish {_show(row, 'time/weight_update_s', '{:.2f}')} s"
    )


def render(status: Status, rates: Rates) -> RenderableType:
    """The whole state as tables."""
    rate = rates.add(status)
    return Group(_headline(status), _ledger_line(status), _troubles(status), _nodes(status, rate), _waits(status))


def _headline(status: Status) -> RenderableType:
    groups, ledger, steps = status["groups"], status["ledger"], status["steps"]
    last = steps[-1] if steps else {}
    table = Table.grid(padding=(0, 2))
    table.add_row(
        Text(f"run {status['run_id']}", style="bold"),
        f"step {status['version']}/{status['max_steps']}",
        f"{status['state']}, up {status['uptime_s']:.0f} s",
    )
    table.add_row(
        f"reward {_show(last, 'reward/mean', '{:.3f}')}",
        f"staleness {_show(last, 'staleness/mean', '{:.2f}')} (max {_show(last, 'staleness/max', '{:.0f}')}, "
        f"cap {status['max_staleness']})",
        f"log-prob gap {_show(last, 'train/logprob_gap_mean', '{:.4f}')}",
    )
    table.add_row(
        f"buffer: {groups['ready']} ready, {groups['open']} open, {groups['batched']} in training",
        f"groups: {ledger['groups_admitted']:,} admitted, {ledger['groups_trained']:,} trained, "
        f"{ledger['groups_filtered']:,} filtered, {ledger['groups_failed']:,} failed",
        routing(last),
    )
    return table


def routing(row: dict[str, Any]) -> str:
    """Of a step whose samples came with routed_experts: how many tokens went where the engine sent them, and what that changed; else ''."""
    if "train/routing_replayed_share" not in row:
        return ""
    replayed, changed = (_show(row, f"train/routing_{which}_share", "{:.1%}") for which in ("replayed", "changed"))
    return f"routed_experts replayed: {replayed} of the tokens; other experts than the trainer's own: {changed}"


def _nodes(status: Status, rate: dict[str, float]) -> RenderableType:
    table = Table(title_justify="left")
    for name in ("node", "role", "host", "weights or sandbox", "leases", "rate", "seen", "loop lag (max)"):
        justify: Any = "right" if name in ("leases", "rate", "seen", "loop lag (max)") else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name in ("node", "role"))
    units = {"rollout": "tok/s", "reward": "judged/s", "learner": "tok/s"}
    for node in sorted(status["nodes"], key=lambda node: (node["role"], node["node_id"])):
        value = rate.get("trained" if node["role"] == "learner" else node["node_id"])
        holds = (
            node["holds"] or node["isolation"] or ("v" + str(status["version"]) if node["role"] == "learner" else "-")
        )
        table.add_row(
            node["node_id"],
            node["role"],
            node["host"],
            holds if node["current"] else f"{holds} (fenced)",
            f"{node['leases']}/{node['capacity']}" if node["capacity"] else "-",
            "-" if value is None else f"{value:,.0f} {units[node['role']]}",
            f"{node['seen_s_ago']:.1f} s",
            f"{node['loop_lag_ms']:.0f} ({node['loop_lag_max_ms']:.0f}) ms",
        )
    return table


def _waits(status: Status) -> RenderableType:
    """Waits of the nodes, whose event loop stood still and where, and circles. ``forebay waits`` has all of it."""
    lines = [
        f"{wait['who']} waits {wait['age_s']:.1f} s for {wait['what']} from {wait['on']}"
        for wait in status["waits"]
        if wait["age_s"] > 1.0 and wait["who"] != "coordinator"
    ]
    blocked = {"coordinator": status["blocked_at"]} | {node["node_id"]: node["blocked_at"] for node in status["nodes"]}
    lines += [f"{name}: the event loop was blocked by {culprit}" for name, culprit in blocked.items() if culprit]
    return Text("\n".join([*lines, *map(cycle_text, status["cycles"])]), style="dim")


def final_tables(summary: Status, *, log_dir: str) -> RenderableType:
    """The end of a run: reward first and last, ledger, staleness, weight updates, where the checkpoint lies."""
    return Group(_outcome(summary, log_dir), _ledger(summary), _staleness(summary))


def _outcome(summary: Status, log_dir: str) -> RenderableType:
    rewards = [row["reward/mean"] for row in summary["steps"] if "reward/mean" in row]
    table = Table(title=f"Run {summary['run_id']}: {summary['state']}", show_header=False, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    first, last = summary["first_rewards"][:5], rewards[-5:]
    if first:
        table.add_row("reward, first 5 steps", f"{fmean(first):.3f}")
        table.add_row("reward, last 5 steps", f"{fmean(last):.3f}  ({fmean(last) - fmean(first):+.3f})")
    resumed = summary["steps"] and summary["steps"][0]["at"] < summary["started_at"]
    took = f"; {summary['uptime_s']:.0f} s since it was resumed" if resumed else f" in {summary['uptime_s']:.0f} s"
    table.add_row("steps", f"{summary['version']} of {summary['max_steps']}{took}")
    syncs = [sync for sync in summary["weight_updates"] if "total_s" in sync]
    if syncs:
        table.add_row(
            "weight updates",
            f"{summary['num_weight_updates']}: {fmean(s['total_s'] for s in syncs):.2f} s each, of which generation paused "
            f"{fmean(s['pause_s'] for s in syncs):.2f} s; {syncs[-1]['bytes'] / 1e6:.1f} MB",
        )
    if times := learner_time(summary["steps"]):
        table.add_row("learner's time", times)
    gaps = [row["train/logprob_gap_mean"] for row in summary["steps"] if "train/logprob_gap_mean" in row]
    if gaps:
        table.add_row("log-prob gap", f"{fmean(gaps):.4f} nats per token on average, {max(gaps):.4f} at most")
    if replayed := routing(summary["steps"][-1] if summary["steps"] else {}):
        table.add_row("routing, last step", replayed)
    if summary["num_tasks_out"]:
        task_id, reason = [*summary["tasks_out"].items()][-1]
        table.add_row("tasks that are out", f"{summary['num_tasks_out']}; the last one, {task_id}: {reason[:200]}")
    if summary["state"] != "running":
        table.add_row("ended", summary["end_reason"])
    table.add_row("trained checkpoint", summary["export_dir"] or "none: the run did not reach its end")
    table.add_row("logs", log_dir)
    return table


def learner_time(steps: list[dict[str, Any]]) -> str:
    """What the learner did with its time in ``steps``; '' if no step measured it."""
    parts = {
        "training": "time/train_s",
        "waiting for batches": "time/wait_batch_s",
        "publishing": "time/weight_update_s",
    }
    sums = {name: sum(row.get(key, 0.0) for row in steps) for name, key in parts.items()}
    total = sum(sums.values())
    return ", ".join(f"{seconds / total:.0%} {name}" for name, seconds in sums.items()) if total else ""


# Row of the ledger -> (its counter of groups, if groups can be there; what it means)
_LEDGER_ROWS = {
    "generated": ("groups_admitted", "the engines' own count; groups: admitted"),
    "trained": ("groups_trained", "in a committed step"),
    "buffered": ("groups_live", "in groups that wait for a step"),
    "in_flight": ("", "in engines, not yet delivered"),
    "filtered": ("groups_filtered", "groups without signal that were refilled"),
    "failed": ("groups_failed", "of groups or samples that were given up"),
    "duplicate": ("", "second results of a sample"),
    "lost": ("", "in flight in a node when it left"),
}
_PARTS = [name for name in _LEDGER_ROWS if name != "generated"]


def unaccounted(status: Status) -> tuple[int, int]:
    """(tokens, groups) that the ledger of a status or summary doesn't account for: (0, 0), or something is wrong."""
    ledger = _with_live(status)
    tokens = ledger["generated"] - sum(ledger[name] for name in _PARTS)
    ended = ("groups_trained", "groups_live", "groups_filtered", "groups_failed")
    return tokens, ledger["groups_admitted"] - sum(ledger[key] for key in ended)


def _with_live(status: Status) -> dict[str, int]:
    return status["ledger"] | {"groups_live": sum(status["groups"].values())}


def _ledger(summary: Status) -> RenderableType:
    ledger = _with_live(summary)
    table = Table(title="Ledger: completion tokens and groups", title_justify="left")
    for name in ("", "tokens", "groups", ""):
        table.add_column(name, justify="right" if name else "left")
    for name, (key, meaning) in _LEDGER_ROWS.items():
        groups = f"{ledger[key]:,}" if key else ""
        row = (name.replace("_", " "), f"{ledger[name]:,}", groups, meaning)
        table.add_row(*row, end_section=name == "generated")
    tokens, groups = unaccounted(summary)
    table.caption = (
        "closes: every generated token and every group is accounted for"
        if not tokens and not groups
        else f"DOES NOT CLOSE: {tokens:,} tokens and {groups:,} groups are unaccounted for"
    )
    return table


def _ledger_line(status: Status) -> RenderableType:
    """The same for the live view."""
    ledger = _with_live(status)
    parts = " + ".join(f"{ledger[name]:,} {name.replace('_', ' ')}" for name in _PARTS if ledger[name])
    tokens, groups = unaccounted(status)
    line = Text(f"ledger: {ledger['generated']:,} tokens generated = {parts or '0'}")
    if tokens or groups:
        line.append(f"; DOES NOT CLOSE by {tokens:,} tokens, {groups:,} groups", style="bold red")
    return line


def _troubles(status: Status) -> RenderableType:
    """What a person should see to."""
    lines = []
    if status["disk_full_s"]:
        lines.append(
            f"THE DISK of the journal has been full for {status['disk_full_s']:.0f} s: nothing is acknowledged until there is space"
        )
    if status["num_tasks_out"]:
        task_id, reason = [*status["tasks_out"].items()][-1]
        lines.append(f"{status['num_tasks_out']} tasks are out for good; the last one, {task_id}: {reason[:200]}")
    return Text("\n".join(lines), style="yellow")


def _staleness(summary: Status) -> RenderableType:
    counts = {int(age): count for age, count in summary["staleness_counts"].items()}
    total = sum(counts.values()) or 1
    table = Table(
        title=f"Staleness of trained samples, in versions (cap {summary['max_staleness']})", title_justify="left"
    )
    table.add_column("versions", justify="right")
    table.add_column("samples", justify="right")
    table.add_column("share")
    for age in range(max(counts, default=0) + 1):
        share = counts.get(age, 0) / total
        table.add_row(str(age), f"{counts.get(age, 0):,}", f"{'#' * round(share * 40):<40} {share:.0%}")
    return table
