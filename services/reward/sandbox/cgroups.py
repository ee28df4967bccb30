"""Control groups, where this process may make some: one a worker, which bounds memory and processes of all that runs in it together.

Without them the limits of the processes themselves and the worker's own counting have to do. Version 2 needs the controllers
``memory`` and ``pids`` in a group that was delegated to this user (systemd: ``Delegate=memory pids``); version 1 needs root. Groups are
named after the process that made them, so that what a killed one left behind is found and removed. cgroups(7).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from dataclasses import replace
from pathlib import Path

from protocol.suites import Limits
from services.reward.sandbox.control import Report
from services.reward.sandbox.host import Worker

_PREFIX = "forebay-"
_NODE = "forebay-node"  # version 2: where the processes go that were in the delegated group itself
_WORKERS_OWN_BYTES = 48 << 20  # of a worker and its fork, besides what a program may use
_TASKS = 160  # threads and processes of one worker
_MIB = 1 << 20
_NUMBERS = itertools.count()  # of the groups that this process makes


class WorkerGroups:
    """The groups of one judge's workers. ``roots`` by controller: folders in which groups may be made; empty: there are none."""

    def __init__(self, roots: dict[str, Path], version: int) -> None:
        self._roots, self._version = roots, version
        self._of: dict[int, dict[str, Path]] = {}  # by the worker's pid
        self._limits: dict[int, int] = {}
        self._num_oom_kills: dict[int, int] = {}
        self._has_several: dict[int, bool] = {}  # whether its run may have several processes

    @classmethod
    def find(cls, proc: Path = Path("/proc/self")) -> WorkerGroups:
        """Groups if this process may make them. Removes those that are left of processes which are gone."""
        for version, roots in ((2, _roots_v2(proc)), (1, _roots_v1(proc))):
            if set(roots) == {"memory", "pids"} and all(_may_make(root) for root in roots.values()):
                for root in set(roots.values()):
                    _remove_stale(root)
                return cls(roots, version)
        return cls({}, 0)

    def add(self, worker: Worker) -> bool:
        """Put a worker and all that it will fork into a group of its own; whether there is one."""
        if not self._roots:
            return False
        name = f"{_PREFIX}{os.getpid()}-{next(_NUMBERS)}"
        groups = {controller: root / name for controller, root in self._roots.items()}
        try:
            for group in set(groups.values()):
                group.mkdir()
                for pid in _family(worker.pid):
                    (group / "cgroup.procs").write_text(str(pid))
            _write(groups["pids"] / "pids.max", _TASKS)
            if self._version == 2:
                _write(groups["memory"] / "memory.swap.max", 0)
        except OSError:
            _remove(groups)
            return False
        self._of[worker.pid] = groups
        self._num_oom_kills[worker.pid] = self._oom_kills(worker.pid)
        return True

    def limit(self, worker: Worker, limits: Limits) -> None:
        """Set the memory limit of the next run."""
        self._has_several[worker.pid] = limits.processes > 1
        groups = self._of.get(worker.pid)
        limit = limits.memory_mib * _MIB + _WORKERS_OWN_BYTES
        if groups is None or self._limits.get(worker.pid) == limit:
            return
        name = "memory.max" if self._version == 2 else "memory.limit_in_bytes"
        with contextlib.suppress(OSError):  # less than is in use right now: the next run sets it
            _write(groups["memory"] / name, limit)
            self._limits[worker.pid] = limit

    def corrected(self, worker: Worker, report: Report) -> Report:
        """The report, which knows of a SIGKILL but not that it was the kernel's, for want of memory in the group.

        Of each run that may have had such a kill the kernel's count is read, whatever it ended of: else a later run would answer for it. (Of
        others not; it is a system call or three.)
        """
        ended_well = not (report.signal or report.killed or report.exit_code)
        if worker.pid not in self._of or (ended_well and not self._has_several.get(worker.pid)):
            return report
        before, now = self._num_oom_kills[worker.pid], self._oom_kills(worker.pid)
        self._num_oom_kills[worker.pid] = now
        return replace(report, killed="memory") if now > before and report.signal == 9 and not report.killed else report

    def remove(self, worker: Worker) -> None:
        """Remove the group of a worker that has ended."""
        _remove(self._of.pop(worker.pid, {}))
        self._limits.pop(worker.pid, None)
        self._has_several.pop(worker.pid, None)

    def _oom_kills(self, pid: int) -> int:
        name = "memory.events" if self._version == 2 else "memory.oom_control"
        with contextlib.suppress(OSError, ValueError):
            lines = (self._of[pid]["memory"] / name).read_text().splitlines()
            return int(dict(line.split() for line in lines).get("oom_kill", 0))
        return 0


def _roots_v2(proc: Path) -> dict[str, Path]:
    mount = _mount(proc, "cgroup2", "")
    own = _own_group(proc, "")
    if mount is None or own is None:
        return {}
    group = mount / own.lstrip("/")
    if group.name == _NODE:  # another process of this node was here before
        return {"memory": group.parent, "pids": group.parent}
    try:
        if not {"memory", "pids"} <= set((group / "cgroup.controllers").read_text().split()):
            return {}
        if own == "/" or not os.access(group, os.W_OK):
            return {}
        if not {"memory", "pids"} <= set((group / "cgroup.subtree_control").read_text().split()):
            # A group with processes of its own can't share its controllers out, so they move one down.
            (group / _NODE).mkdir(exist_ok=True)
            for pid in (group / "cgroup.procs").read_text().split():
                (group / _NODE / "cgroup.procs").write_text(pid)
            (group / "cgroup.subtree_control").write_text("+memory +pids")
    except OSError:
        return {}
    return {"memory": group, "pids": group}


def _roots_v1(proc: Path) -> dict[str, Path]:
    roots = {}
    for controller in ("memory", "pids"):
        mount, own = _mount(proc, "cgroup", controller), _own_group(proc, controller)
        if mount is not None and own is not None and (mount / own.lstrip("/")).is_dir():
            roots[controller] = mount / own.lstrip("/")
    return roots


def _mount(proc: Path, kind: str, controller: str) -> Path | None:
    """Where a hierarchy is mounted (proc(5), mountinfo)."""
    with contextlib.suppress(OSError):
        for line in (proc / "mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            words = after.split()
            if words[0] == kind and (not controller or controller in words[2].split(",")):
                return Path(_unescaped(before.split()[4]))
    return None


def _unescaped(word: str) -> str:
    """A path of mountinfo, in which blanks and backslashes are octal numbers (proc(5))."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)


def _own_group(proc: Path, controller: str) -> str | None:
    with contextlib.suppress(OSError):
        for line in (proc / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == controller or (controller and controller in controllers.split(",")):
                return path
    return None


def _may_make(root: Path) -> bool:
    probe = root / f"{_PREFIX}{os.getpid()}-probe"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def _remove_stale(root: Path) -> None:
    for group in root.glob(f"{_PREFIX}*-*"):
        pid = group.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):
                group.rmdir()


def _remove(groups: dict[str, Path]) -> None:
    for group in set(groups.values()):
        with contextlib.suppress(OSError):
            group.rmdir()


def _family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            found += [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return found


def _write(path: Path, value: int) -> None:
    path.write_text(str(value))
