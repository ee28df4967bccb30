"""A real Slurm cluster on this machine: munged, slurmctld and a slurmd for each node.

Everything lies in one folder (key, sockets, state, spool, logs), and all ports are free ones, so it meets no other Slurm or munge of
the machine. "Nodes" are slurmd processes of one machine: their names (n1, n2, ...) are in no name service, and their address is 127.0.0.1.
Each daemon has a PID namespace, with the jobs that it starts: they end with it, and it ends with the tests, however those end.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.requirements import find_program, require_programs, require_root
from harness.runs import tie_to_parent

from tests.faults.processes import free_port

START_TIMEOUT_S = 200.0
STOP_TIMEOUT_S = 60.0
CPUS_PER_NODE = 4  # what the nodes say that they have: jobs are placed by it, and nothing is pinned

# Process 1 of the namespace only waits: it reaps what jobs leave, and when it is killed the kernel ends all the others.
NAMESPACE = ["unshare", "--fork", "--kill-child", "--pid", "--mount-proc", "bash", "-c", '"$@" & wait $!', "daemon"]

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmUser=root
SlurmdUser=root
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=15
SchedulerParameters=sched_interval=2,bf_interval=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def require_slurm() -> None:
    """Skip (or fail, in CI) where no cluster can be started."""
    require_root()
    require_programs(
        "unshare", "slurmctld", "slurmd", "munged", "sbatch", "srun", "scancel", "scontrol", "squeue", "sinfo"
    )


class SlurmCluster:
    """``with SlurmCluster(3) as cluster``: a cluster that takes jobs; afterwards no process of it or of its jobs is left."""

    def __init__(self, num_nodes: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: sockets are in it, and their paths are bounded
        self.env = {
            key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH", "FOREBAY"))
        }
        self.env["PATH"] += ":/usr/sbin:/sbin"
        self.env["SLURM_CONF"] = str(self.folder / "slurm.conf")
        self._names = [f"n{index}" for index in range(1, num_nodes + 1)]
        self._daemons: list[subprocess.Popen[bytes]] = []  # in order of their start

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = self._stop()
        if error is None:
            assert not left, f"jobs left processes behind: {left}"

    def run(self, *command: str, env: dict[str, str] | None = None) -> str:
        """Run a command of Slurm, or one that uses them; its output.

        Raises:
            AssertionError: it fails; with what it said.
        """
        done = subprocess.run(command, env={**self.env, **(env or {})}, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, job_id: str) -> list[dict[str, str]]:
        """What Slurm says of a job: one dict for each job of an array."""
        lines = self.run("scontrol", "--oneliner", "show", "job", job_id).splitlines()
        return [dict(item.split("=", 1) for item in line.split() if "=" in item) for line in lines]

    def wait_until_idle(self, timeout_s: float) -> None:
        """Until no job is queued or running.

        Raises:
            TimeoutError: with the queue.
        """
        deadline = time.monotonic() + timeout_s
        while queue := self.run("squeue", "--noheader"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"After {timeout_s:.0f} s jobs are still there:\n{queue}")
            time.sleep(0.5)

    def _of_jobs(self) -> list[int]:
        """Live processes that jobs started: they carry this cluster's ``SLURM_CONF`` and a job's id."""
        mark = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                variables = path.read_bytes().split(b"\0")
                if mark in variables and any(variable.startswith(b"SLURM_JOB_ID=") for variable in variables):
                    found.append(int(path.parent.name))
        return found

    def _start(self) -> None:
        self.folder.chmod(0o711)  # munge wants its socket to be reachable
        (self.folder / "state").mkdir()
        host = socket.gethostname().split(".")[0]
        ports = [free_port() for _ in range(len(self._names) + 1)]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_PER_NODE} RealMemory=1000"
            for name, port in zip(self._names, ports[1:], strict=True)
        )
        config = CONFIG.format(host=host, folder=self.folder, port=ports[0], nodes=nodes)
        (self.folder / "slurm.conf").write_text(config)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))

        files = {name: f"{self.folder}/munge.{name}" for name in ("socket", "pid", "seed", "log")}
        options = [f"--{name}-file={files[name]}" for name in ("pid", "seed", "log")]
        self._spawn("munged", "--foreground", "--force", f"--socket={files['socket']}", f"--key-file={key}", *options)
        self._await(lambda: Path(files["socket"]).exists(), "munged")
        self._spawn("slurmctld", "-D")
        for name in self._names:
            self._spawn("slurmd", "-D", "-N", name)
        self._await(self._all_idle, "the nodes")

    def _all_idle(self) -> bool:
        done = subprocess.run(
            ["sinfo", "--noheader", "--states=idle", "--format=%D"], env=self.env, capture_output=True, text=True
        )
        return done.stdout.strip() == str(len(self._names))

    def _spawn(self, program: str, *arguments: str) -> None:
        path = find_program(program)
        assert path is not None, f"{program}: call require_slurm() first"
        with (self.folder / f"{len(self._daemons)}-{program}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    [*NAMESPACE, path, *arguments],
                    env=self.env,
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=tie_to_parent,
                )
            )

    def _await(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready():
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self._daemons):
                logs = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in self.folder.glob("*.log"))
                raise AssertionError(f"Slurm did not come up (waiting for {what}):\n{logs}")
            time.sleep(0.1)

    def _stop(self) -> list[int]:
        """Jobs first, while there is someone to end them; then the daemons. Returns what the jobs had left running."""
        left: list[int] = []
        if len(self._daemons) > 1 and self._daemons[1].poll() is None:
            subprocess.run(["scancel", "--user=root"], env=self.env, capture_output=True, timeout=30)
            with contextlib.suppress(TimeoutError, AssertionError):
                self.wait_until_idle(STOP_TIMEOUT_S)
                left = self._of_jobs()
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()
        shutil.rmtree(self.folder)
        return left
