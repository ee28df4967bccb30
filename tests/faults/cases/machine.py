"""What a machine does to a run: a full disk, a clock that jumps, ports and journals that two want, a parent that is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.faults.case import Case, NotRun, Scene
from tests.faults.harness import Run
from tests.faults.processes import ROOT, Role, assert_gone, assert_none_of, descendants, free_port

CLOCK = Path(__file__).resolve().parents[1] / "clock"
# Of roles whose interpreters start for themselves, which takes as long as the machine needs.
COLD = {
    "coordinator.max_steps": 8,
    "learner.fake_step_s": 0.3,
    "coordinator.no_progress_timeout_s": 120.0,
    "run.join_timeout_s": 120.0,
    "run.weight_update_timeout_s": 120.0,  # a learner that wants to publish waits for a coordinator that starts again
}


class SmallDisk:
    """A tmpfs of some MiB on a folder of the run, in a mount namespace of its own: the real ENOSPC, without root.

    Roles that are started while ``run.prefix`` is set live in that namespace.
    """

    def __init__(self, run: Run, folder: Path, *, size_mib: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._run, self._folder = run, folder
        script = f'mount -t tmpfs -o size={size_mib}m forebay "$0" && echo ready && exec sleep 600'
        allowed = subprocess.run(["unshare", "-Urm", "true"], capture_output=True, text=True, check=False)
        if allowed.returncode:
            raise NotRun(f"no mount namespace for a small disk: {allowed.stderr.strip()}")
        self._holder = run.spawn("disk", ["unshare", "-Urm", "sh", "-c", script, str(folder)])
        deadline = time.monotonic() + 60
        while "ready" not in self._holder.output():
            if self._holder.process.poll() is not None or time.monotonic() > deadline:
                raise NotRun(f"no tmpfs in a mount namespace: {self._holder.output().strip()}")
            time.sleep(0.02)
        enter = ["nsenter", "-t", str(self._holder.pid), "-U", "-m", "--preserve-credentials", f"--wd={ROOT}"]
        run.prefix = [*enter, "setpriv", "--pdeathsig", "KILL"]  # entering drops the signal that the harness has set

    @property
    def inside(self) -> Path:
        """The folder as it is in the namespace, seen from here. Not for SQLite, which resolves the link to what is outside."""
        return Path(f"/proc/{self._holder.pid}/root{self._folder}")

    def fill(self) -> None:
        """Not a byte is left."""
        with (self.inside / "ballast").open("wb", buffering=0) as ballast:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while True:
                        ballast.write(b"\0" * size)
                except OSError:
                    continue

    def free(self) -> None:
        """There is room again."""
        (self.inside / "ballast").unlink()

    def copy_out(self) -> None:
        """What is on it, to where it would be without it."""
        shutil.copytree(self.inside, self._folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("ballast"))


def _disk_fills_and_is_freed(scene: Scene) -> None:
    """The coordinator waits for room, and nothing is acknowledged meanwhile."""
    run = scene.run
    disk = SmallDisk(run, run.folder / "runs", size_mib=48)
    run.hold_commits(after=2)
    roles = run.start_all()
    with run.held_at(2):
        scene.inject()
        disk.fill()
        full_at = time.time()
    _await_event(roles["coordinator"], "disk_full")
    time.sleep(4)
    freed_at = time.time()
    disk.free()
    scene.finish(*roles.values())
    disk.copy_out()
    acks = [seen for seen in scene.proxy.seen if seen.re_kind == "step_committed" and full_at < seen.at < freed_at]
    assert not acks, f"{len(acks)} commits were acknowledged, and the disk was full"


def _disk_stays_full(scene: Scene) -> None:
    """An error that says what to do; with room again, the coordinator goes on where it was, and the nodes with it."""
    run = scene.run
    disk = SmallDisk(run, run.folder / "runs", size_mib=48)
    run.hold_commits(after=2)
    roles = run.start_all()
    with run.held_at(2):
        scene.inject()
        disk.fill()
    coordinator = roles["coordinator"]
    code = coordinator.exit_code()
    scene.detect()
    assert code == 1, f"it ended with {code}\n{coordinator.tail()}"
    assert "can't be written" in coordinator.error(), coordinator.tail()
    disk.free()
    roles["coordinator"] = run.again(coordinator)
    scene.finish(*roles.values())
    disk.copy_out()


def _await_event(role: Role, name: str) -> None:
    """Until ``role`` has logged it."""
    deadline = time.monotonic() + 120
    while not role.events(name):
        assert role.process.poll() is None, role.tail()
        assert time.monotonic() < deadline, f"no {name}\n{role.tail()}"
        time.sleep(0.05)


def _with_full_checkpoint_disk(scene: Scene) -> tuple[Role, SmallDisk, dict[str, Role]]:
    """(learner, disk, the other roles): after its first step the disk of its checkpoints fills up."""
    run = scene.run
    roles = run.start_all_but("learner")
    disk = SmallDisk(run, run.run_dir / "checkpoints", size_mib=1)
    run.hold_commits(after=1)
    learner = run.start("learner")
    run.prefix = []
    with run.held_at(1):
        scene.inject()
        disk.fill()
    return learner, disk, roles


def _checkpoint_disk_full(scene: Scene) -> None:
    """The learner can't save, three times: it ends with an error, and its successor trains the same batches again."""
    learner, disk, roles = _with_full_checkpoint_disk(scene)
    code = learner.exit_code()
    scene.detect()
    assert code not in (0, 143), f"it ended with {code}"
    disk.free()
    scene.finish(scene.run.again(learner), *roles.values())
    disk.copy_out()


def _checkpoint_disk_full_for_a_while(scene: Scene) -> None:
    """The learner goes on without a checkpoint, says so, and writes the next one."""
    checkpoint = scene.run.hold_commits(after=scene.run.config["learner"]["checkpoint_interval_steps"])
    learner, disk, roles = _with_full_checkpoint_disk(scene)
    _await_event(learner, "checkpoint_failed")
    disk.free()
    scene.proxy.release(checkpoint)
    scene.finish(learner, *roles.values())
    disk.copy_out()


def _clock_jumps(scene: Scene) -> None:
    scene.run.env = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(CLOCK), os.environ.get("PYTHONPATH", "")])),
        "FOREBAY_FAULT_CLOCK": "5,6.5,8",
    }
    started = time.time()
    scene.inject(started + 5)
    last = scene.run.hold_commits(after=2)
    roles = scene.run.start_all()
    time.sleep(max(0.0, started + 9 - time.time()))  # the last jump is over, and the run is not
    scene.proxy.release(last)
    scene.finish(*roles.values())
    steps = roles["coordinator"].events("step")
    assert len(steps) == scene.run.config["coordinator"]["max_steps"]


def _two_on_one_journal(scene: Scene) -> None:
    scene.run.hold_commits(after=1)
    roles = scene.run.start_all()
    other = f"coordinator.bind=tcp://127.0.0.1:{free_port()}"
    with scene.run.held_at(1):
        scene.inject()
        second = scene.run.start("coordinator", "second-coordinator", overrides=(other,))
        assert second.exit_code() == 2
        assert "Another coordinator has the journal" in second.error()
        scene.detect()
    scene.finish(*roles.values())


def _two_on_one_port(scene: Scene) -> None:
    """Another run's coordinator is refused the port, and another run's node is refused by this run's coordinator."""
    scene.run.hold_commits(after=1)
    roles = scene.run.start_all()
    with scene.run.held_at(1):
        scene.inject()
        second = scene.run.start("coordinator", "other-coordinator", overrides=("run.id=other",))
        stranger = scene.run.start("reward", "stranger", overrides=("run.id=other",))
        assert second.exit_code() == 2
        assert "can't listen on" in second.error()
        scene.detect()
        assert stranger.exit_code() == 3
        assert "serves run 'loop'" in stranger.error(), stranger.error()
    scene.finish(*roles.values())


def _killed_parent(scene: Scene) -> None:
    """``forebay up`` is killed: its children end and free all they held; the run is resumed."""
    run = scene.run
    run.hold_commits(after=2)
    up = run.forebay("up", str(run.config_path))
    with run.held_at(2):
        children = descendants(up.pid)
        assert len(children) >= 4
        scene.inject()
        up.signal(signal.SIGKILL)
    assert up.exit_code() == -signal.SIGKILL
    assert_gone(children, within_s=60)
    scene.detect()
    assert_none_of(run.folder, within_s=60)  # those, too, that the children had just started
    run.run_dir = next(path for path in (run.folder / "runs").iterdir() if path.is_dir())
    run.config["run"]["id"] = run.run_dir.name
    scene.finish(run.forebay("up", "--resume", str(run.run_dir)))


CASES = [
    Case("disk-full-for-a-while", "machine", "the disk of the journal is full for 4 s", _disk_fills_and_is_freed, changes=COLD),
    Case("disk-full-for-good", "machine", "the disk of the journal stays full: an error; then there is room, and the run goes on", _disk_stays_full, changes={**COLD, "coordinator.disk_timeout_s": 3.0}),
    Case("checkpoint-disk-full-for-a-while", "machine", "the disk of the checkpoints is full, and then has space again", _checkpoint_disk_full_for_a_while, (30,), COLD),
    Case("checkpoint-disk-full", "machine", "the disk of the checkpoints is full", _checkpoint_disk_full, (30,), COLD),
    Case("clock-jumps", "machine", "the wall clock of every role jumps a day ahead, a day behind, and back (Python's clock only)", _clock_jumps, changes=COLD, noticed=False),
    Case("two-coordinators-one-journal", "machine", "a second coordinator is started on the same journal", _two_on_one_journal, (57,)),
    Case("two-runs-one-port", "machine", "another run's coordinator and node come to this run's port", _two_on_one_port, (57,)),
    Case("kill-forebay-up", "machine", "kill -9 of forebay up; the run is resumed", _killed_parent, (54,), COLD),
]  # fmt: skip
