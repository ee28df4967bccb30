"""What the run waits for, as the coordinator sees it: its own waits, those that it knows nodes to have, and what nodes report.

    leases             samples of groups, verdicts          from each node that holds some
    the batch at hand  the commit of its step               from the learner
    the weight update     ready, or done                       from the members that it misses
    engines            to hold the current version          a node without it waits for the learner; all of them: the coordinator waits
    roles              a node to join                       from a role that has none

Functions of the state, except for ``FirstSeen``, which remembers since when something without a time of its own has been so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from common.errors import WaitTimeout
from common.wait_graph import WaitRow, cycle_text, find_cycles, longest_first
from services.coordinator.core.membership import ROLES, Lease, Node, is_current
from services.coordinator.core.weight_updates import UPDATE_AGAIN_S

if TYPE_CHECKING:
    from services.coordinator.core.core import Core

ME = "coordinator"


class FirstSeen:
    """Since when each of a changing set of things has been there."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def ages(self, keys: list[str], now: float) -> dict[str, float]:
        """Age of each key in seconds; those that are not named any more are forgotten."""
        self._since = {key: self._since.get(key, now) for key in keys}
        return {key: now - since for key, since in self._since.items()}


def coordinator_waits(core: Core, now: float) -> list[WaitRow]:
    """The coordinator's own waits and those that it knows of, in no order."""
    rows = [*_leases(core, now), *_step(core, now), *_weight_update(core, now)]
    limit_s = core.config.no_progress_timeout_s
    return rows + [
        WaitRow(who, what, on, age_s, limit_s, "coordinator.no_progress_timeout_s", onward=True)
        for who, what, on, age_s in observe(core, now)
    ]


def observe(core: Core, now: float) -> list[tuple[str, str, str, float]]:
    """Waits that have no time of their own, (who, what, on, age in seconds). Called at every tick, so that their ages are right."""
    undated = [*_engines(core, now), *_roles(core)] if core.state == "running" else []
    undated += _leaving(core)
    ages = core.first_seen.ages([f"{who} {what}" for who, what, _ in undated], now)
    return [(who, what, on, ages[f"{who} {what}"]) for who, what, on in undated]


def all_waits(core: Core, now: float) -> list[WaitRow]:
    """Every open wait of the run, longest first: the coordinator's, and what the nodes last reported."""
    reported = [
        WaitRow(
            node.node_id,
            wait.what,
            wait.on,
            wait.age_s + now - node.seen_at,
            wait.deadline_s or 0.0,
            wait.limit_key,
            wait.onward,
            known_s_ago=now - node.seen_at,
        )
        for node in core.members.nodes.values()
        for wait in node.waits
    ]
    return longest_first([*coordinator_waits(core, now), *reported])


def cycles(core: Core, rows: list[WaitRow]) -> list[list[str]]:
    """Circles in ``rows``; see ``find_cycles``."""
    roles = {node.node_id: node.role for node in core.members.nodes.values()}
    return find_cycles(rows, roles)


def waits_text(core: Core, now: float) -> str:
    """All waits and circles, as sentences for an error."""
    rows = all_waits(core, now)
    lines = [row.text for row in rows] + [cycle_text(cycle) for cycle in cycles(core, rows)]
    return "; ".join(lines) or "none"


def step_overdue(core: Core, now: float) -> WaitTimeout | None:
    """The error of a batch that the learner has had for too long."""
    batch, limit_s = core.steps.handed_out, core.config.step_timeout_s
    if batch is None or now - batch.since <= limit_s:
        return None
    return WaitTimeout(
        f"The learner {batch.node_id} was given the batch of step {batch.step} {now - batch.since:.0f} s ago and has not committed it "
        f"within coordinator.step_timeout_s = {limit_s:g}. Waits: {waits_text(core, now)}. Raise the limit if a step takes so "
        "long; else look at the learner's log and report (forebay postmortem RUN), then resume: the step's batch is in the journal."
    )


def standstill(core: Core, now: float) -> WaitTimeout | None:
    """The error of a run in which nothing has happened for too long."""
    age_s, limit_s = now - core.progress_at, core.config.no_progress_timeout_s
    if age_s <= limit_s:
        return None
    roles = ", ".join(f"{len(core.members.of_role(role))} {role}" for role in ROLES)
    return WaitTimeout(
        f"Nothing has happened for {age_s:.0f} s (coordinator.no_progress_timeout_s). Live nodes: {roles}. "
        f"Waits: {waits_text(core, now)}. Start the missing role and resume the run; the journal has everything."
    )


def _leases(core: Core, now: float) -> Iterator[WaitRow]:
    config = core.config
    held: dict[tuple[str, bool], list[Lease]] = {}
    for lease in core.members.leases.values():
        held.setdefault((lease.node_id, lease.sample_index is None), []).append(lease)
    for (node_id, generates), leases in held.items():
        limit_s = config.generate_timeout_s if generates else config.score_timeout_s
        key = f"coordinator.{'generate' if generates else 'score'}_timeout_s"
        what = f"samples of {len(leases)} groups" if generates else f"verdicts of {len(leases)} samples"
        age_s = max(0.0, now - (min(lease.deadline for lease in leases) - limit_s))
        yield WaitRow(ME, what, node_id, age_s, limit_s, key, onward=True)


def _step(core: Core, now: float) -> Iterator[WaitRow]:
    if batch := core.steps.handed_out:
        what, limit_s = f"the commit of step {batch.step}", core.config.step_timeout_s
        yield WaitRow(ME, what, batch.node_id, now - batch.since, limit_s, "coordinator.step_timeout_s", onward=True)


def _weight_update(core: Core, now: float) -> Iterator[WaitRow]:
    if (update := core.updates.current) is None:
        return
    missing = ", ".join(update.missing())
    on, what = (
        (missing, "to be loaded" if update.transfers else "to be awaited") if missing else ("learner", "to be sent")
    )
    limit_s = update.deadline - update.started_at
    yield WaitRow(
        ME, f"weights {update.tag} {what}", on, now - update.started_at, limit_s, "run.weight_update_timeout_s", True
    )


def _engines(core: Core, now: float) -> Iterator[tuple[str, str, str]]:
    """Nodes without valid weights, (who, what, on). One that takes them just now, or is tried again soon, is in no circle."""
    version, update = core.pool.version, core.updates.current
    nodes = core.members.of_role("rollout")
    without = [node for node in nodes if not is_current(node, version)]
    for node in without:
        if (update is None or node.node_id not in update.members) and now - node.failed_at > UPDATE_AGAIN_S:
            yield node.node_id, f"weights v{version}", "learner"
    if without and len(without) == len(nodes):
        yield ME, f"an engine with weights v{version}", _names(without)


def _roles(core: Core) -> Iterator[tuple[str, str, str]]:
    for role in ROLES:
        if not core.members.of_role(role):
            yield ME, f"a {role} node to join", role


def _leaving(core: Core) -> list[tuple[str, str, str]]:
    nodes = list(core.members.nodes.values())
    return [(ME, "the nodes to leave", _names(nodes))] if nodes and core.state != "running" else []


def _names(nodes: list[Node]) -> str:
    return ", ".join(node.node_id for node in nodes)
