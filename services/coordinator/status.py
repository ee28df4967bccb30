"""The state of a run as plain data, for ``forebay status``, ``forebay up`` and anyone who asks with ``StatusRequest``."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from services.coordinator.core.groups import GroupStatus
from services.coordinator.core.membership import Node, is_current
from services.coordinator.core.waits import all_waits, cycles

if TYPE_CHECKING:
    from services.coordinator.core.core import Core
    from services.coordinator.service import Coordinator

RECENT_TASKS_OUT = 50
OLDEST_GROUPS = 20


def build_status(coordinator: Coordinator) -> dict[str, Any]:
    """A JSON-able dict. Tokens are completion tokens; ages and durations are seconds; ``steps`` has the last 200."""
    core, now = coordinator.core, time.monotonic()
    pool, members = core.pool, core.members
    in_flight = sum(node.tokens_in_flight for node in members.nodes.values())
    ledger = pool.ledger.model_dump()
    by_status = {str(status): 0 for status in (GroupStatus.OPEN, GroupStatus.READY, GroupStatus.BATCHED)}
    for group in pool.groups.values():
        by_status[str(group.status)] += 1
    waits = all_waits(core, now)
    return {
        "at": time.time(),
        "started_at": time.time() - (time.monotonic() - core.started_at),
        "run_id": coordinator.run.id,
        "run_dir": str(coordinator.run.run_dir),
        "pid": os.getpid(),
        "state": core.state,
        "end_reason": core.end_reason,
        "uptime_s": time.monotonic() - core.started_at,
        "version": pool.version,
        "incarnation": core.membership.tag.incarnation,
        "max_steps": coordinator.config.max_steps,
        "groups": by_status,
        "ledger": {
            **ledger,
            "buffered": pool.buffered_tokens,
            "in_flight": in_flight,
            "generated": ledger["received"] + in_flight,
        },
        "staleness_counts": {str(age): count for age, count in sorted(pool.staleness_counts.items())},
        "max_staleness": coordinator.config.max_staleness,
        "verdicts": dict(core.leases.verdicts),
        "verdicts_copied": core.leases.num_copied,
        "waits": [wait.as_dict() for wait in waits],
        "cycles": cycles(core, waits),
        "loop_lag_max_ms": coordinator.loop_watch.max_lag_ms,
        "blocked_at": coordinator.loop_watch.blocked_at,
        "oldest_groups": _oldest_groups(core),
        "nodes": [_node(node, pool.version) for node in members.nodes.values()],
        "steps": [{"step": step, "at": at, **metrics} for step, at, metrics in core.steps.recent],
        "first_rewards": core.steps.first_rewards,
        "weight_updates": list(core.updates.finished),
        "num_weight_updates": core.updates.num_finished,
        "export_dir": core.export_dir,
        "tasks_out": {
            coordinator.tasks[index].task_id: reason
            for index, reason in [*pool.quarantine.tasks.items()][-RECENT_TASKS_OUT:]
        },
        "num_tasks_out": len(pool.quarantine.tasks),
        "disk_full_s": 0.0
        if coordinator.journal.full_since is None
        else time.monotonic() - coordinator.journal.full_since,
    }


def _oldest_groups(core: Core) -> list[dict[str, Any]]:
    """The live groups that were admitted first: if the run is stuck, on one of these."""
    size = core.config.group_size
    groups = sorted(core.pool.groups.values(), key=lambda group: group.group_id)[:OLDEST_GROUPS]
    return [
        {
            "group_id": group.group_id,
            "task_id": core.tasks[group.task_index].task_id,
            "status": str(group.status),
            "step": group.step,
            "admitted_version": group.admitted_version,
            "not_generated": len(group.missing(size)),
            "not_judged": sum(s.result is None and not s.lost for s in group.samples.values()),
            "generate_attempts": group.generate_attempts,
            "score_attempts": max((s.score_attempts for s in group.samples.values()), default=0),
            "failed_on": sorted(group.avoid_nodes.union(*(s.avoid_nodes for s in group.samples.values()))),
        }
        for group in groups
    ]


def _node(node: Node, version: int) -> dict[str, Any]:
    now = time.monotonic()
    return {
        "node_id": node.node_id,
        "role": node.role,
        "host": node.host,
        "pid": node.pid,
        "capacity": node.capacity,
        "leases": len(node.leases),
        "holds": None if node.holds is None else str(node.holds),
        "isolation": node.isolation,
        "current": node.role != "rollout" or is_current(node, version),
        "fenced_reason": node.fenced_reason,
        "seen_s_ago": now - node.seen_at,
        "joined_s_ago": now - node.joined_at,
        "loop_lag_ms": node.loop_lag_ms,
        "loop_lag_max_ms": node.loop_lag_max_ms,
        "blocked_at": node.blocked_at,
        "counters": node.counters,
        "waits": [wait.model_dump() for wait in node.waits],
    }
