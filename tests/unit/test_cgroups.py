"""Where control groups may be made, on made-up hierarchies; and real ones where this machine lets us."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from protocol.suites import Limits
from services.reward.sandbox.cgroups import WorkerGroups
from services.reward.sandbox.control import Report
from services.reward.sandbox.host import Worker

KILLED = Report(killed="", signal=9, exit_code=0, cpu_s=0.1, wall_s=0.1, memory_mib=1.0, clean=True)


def a_process(folder: Path, *, mounts: list[str], groups: list[str]) -> Path:
    proc = folder / "proc"
    proc.mkdir()
    (proc / "mountinfo").write_text("".join(f"{line}\n" for line in mounts))
    (proc / "cgroup").write_text("".join(f"{line}\n" for line in groups))
    return proc


def version_2(folder: Path, *, controllers: str, shared: str = "") -> tuple[Path, Path]:
    root = folder / "a folder"  # mountinfo writes a blank as a number
    group = root / "node.service"
    group.mkdir(parents=True)
    (group / "cgroup.controllers").write_text(controllers)
    (group / "cgroup.subtree_control").write_text(shared)
    (group / "cgroup.procs").write_text("41\n42\n")
    where = str(root).replace("\\", "\\134").replace(" ", "\\040")
    mounts = [f"30 25 0:26 / {where} rw,nosuid - cgroup2 cgroup2 rw"]
    return a_process(folder, mounts=mounts, groups=["0::/node.service"]), group


def worker(pid: int) -> Worker:
    return SimpleNamespace(pid=pid)  # type: ignore[return-value]


def test_a_delegated_group_of_version_2_is_used_and_its_own_processes_move_down(tmp_path):
    proc, group = version_2(tmp_path, controllers="cpu memory pids")
    (group / "forebay-node").mkdir()
    (group / "forebay-node" / "cgroup.procs").write_text("")
    groups = WorkerGroups.find(proc)
    assert (group / "cgroup.subtree_control").read_text() == "+memory +pids"
    assert (
        group / "forebay-node" / "cgroup.procs"
    ).read_text() == "42"  # one write a process, the last of them is left in a plain file
    assert groups.add(worker(os.getpid()))
    made = [path for path in group.iterdir() if path.name.startswith(f"forebay-{os.getpid()}-")]
    assert (made[0] / "pids.max").read_text() == "160"
    groups.limit(worker(os.getpid()), Limits(memory_mib=100))
    assert int((made[0] / "memory.max").read_text()) >= 100 << 20


def test_the_next_process_of_the_node_makes_its_groups_beside_the_first_ones(tmp_path):
    proc, group = version_2(tmp_path, controllers="memory pids", shared="memory pids")
    (proc / "cgroup").write_text("0::/node.service/forebay-node\n")
    (group / "forebay-node").mkdir()
    assert WorkerGroups.find(proc).add(worker(os.getpid()))
    assert [path for path in group.iterdir() if path.name.startswith(f"forebay-{os.getpid()}-")]


@pytest.mark.parametrize("controllers", ["", "cpu", "memory"])
def test_a_group_without_the_controllers_is_no_use(tmp_path, controllers):
    proc, _ = version_2(tmp_path, controllers=controllers)
    assert not WorkerGroups.find(proc).add(worker(os.getpid()))


def test_without_any_hierarchy_all_is_as_before(tmp_path):
    groups = WorkerGroups.find(a_process(tmp_path, mounts=[], groups=[]))
    assert not groups.add(worker(1))
    groups.limit(worker(1), Limits())
    assert groups.corrected(worker(1), KILLED) == KILLED


def test_groups_of_a_process_that_is_gone_are_removed_and_others_kept(tmp_path):
    proc, group = version_2(tmp_path, controllers="memory pids", shared="memory pids")
    (group / "forebay-999999999-0").mkdir()
    (group / "forebay-1-0").mkdir()
    WorkerGroups.find(proc)
    assert not (group / "forebay-999999999-0").exists()
    assert (group / "forebay-1-0").exists()


def test_a_sigkill_that_was_the_kernels_for_want_of_memory_becomes_a_memory_limit(tmp_path):
    proc, group = version_2(tmp_path, controllers="memory pids", shared="memory pids")
    groups = WorkerGroups.find(proc)
    assert groups.add(worker(os.getpid()))
    made = next(path for path in group.iterdir() if path.name.startswith(f"forebay-{os.getpid()}-"))
    assert groups.corrected(worker(os.getpid()), KILLED).killed == ""
    (made / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
    assert groups.corrected(worker(os.getpid()), KILLED).killed == "memory"
    assert groups.corrected(worker(os.getpid()), KILLED).killed == ""


@pytest.mark.parametrize(
    ("ended", "processes"),
    [
        ({"killed": "wall"}, 1),
        ({"killed": "judge", "signal": 9}, 1),
        ({"signal": 0, "exit_code": 1}, 1),
        ({"signal": 0}, 4),
    ],
)
def test_no_run_answers_for_a_kill_of_an_earlier_one(tmp_path, ended, processes):
    proc, group = version_2(tmp_path, controllers="memory pids", shared="memory pids")
    groups = WorkerGroups.find(proc)
    assert groups.add(worker(os.getpid()))
    made = next(path for path in group.iterdir() if path.name.startswith(f"forebay-{os.getpid()}-"))
    groups.limit(worker(os.getpid()), Limits(processes=processes))
    (made / "memory.events").write_text("oom_kill 1\n")
    earlier = replace(KILLED, **ended)
    assert groups.corrected(worker(os.getpid()), earlier) == earlier
    assert groups.corrected(worker(os.getpid()), KILLED).killed == ""
