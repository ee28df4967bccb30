"""The shipped job scripts, unchanged, on a real Slurm of three nodes."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
from harness.requirements import require_programs
from harness.runs import FOREBAY, ROOT, require_finished
from harness.slurm_cluster import SlurmCluster, require_slurm

from tests.faults.processes import free_port

SLURM = ROOT / "deploy/slurm"
SCRIPTS = sorted([*SLURM.glob("*.sh"), *SLURM.glob("*.sbatch")])
PLACES = {
    "COORDINATOR_SBATCH": "--nodelist=n1",
    "LEARNER_SBATCH": "--nodelist=n2",
    "REWARD_SBATCH": "--nodelist=n2 --cpus-per-task=1",
    "ROLLOUT_SBATCH": "--nodelist=n3",
}


def start_run(
    cluster: SlurmCluster, folder: Path, *overrides: str, **variables: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Submit the run of fake.toml into ``folder``: the job id of each role, and the environment of ``submit.sh``."""
    if not FOREBAY.exists():
        pytest.fail(f"{FOREBAY} is missing: the jobs start the checkout's own .venv (make setup)")
    port = free_port()
    env = {
        **PLACES,
        "FOREBAY_PORT": str(port),
        "FOREBAY_BIND": f"tcp://127.0.0.1:{port}",  # all "nodes" are this machine: nothing of a test listens outside
        "FOREBAY_LOGS": str(folder / "logs"),
        "FOREBAY_ROLLOUTS": "2",
        **variables,
    }
    sets = [part for item in (f"run.dir={folder}/runs", *overrides) for part in ("--set", item)]
    said = cluster.run(str(SLURM / "submit.sh"), str(ROOT / "deploy/configs/fake.toml"), *sets, env=env)
    return dict(line.split() for line in said.splitlines()), env


def logs(folder: Path) -> str:
    """What all jobs said, for a failure's message."""
    return "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted((folder / "logs").iterdir()))


def until_rollouts(wanted: int, address: str, folder: Path) -> set[str]:
    """Wait until so many rollout nodes are in the run at ``address``: their names."""

    def rollouts() -> set[str]:
        command = [str(FOREBAY), "status", "--address", address, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        nodes = json.loads(done.stdout)["nodes"] if done.returncode == 0 else []
        return {node["node_id"] for node in nodes if node["role"] == "rollout"}

    deadline = time.monotonic() + 240
    while len(names := rollouts()) != wanted:
        assert time.monotonic() < deadline, f"{names}, not {wanted} rollout nodes\n{logs(folder)}"
        time.sleep(0.5)
    return names


@pytest.mark.slow
def test_a_run_by_the_job_scripts_finishes_with_its_roles_on_different_nodes(tmp_path: Path) -> None:
    require_slurm()
    with SlurmCluster(3) as cluster:
        held = PLACES["LEARNER_SBATCH"] + " --hold"  # the run must not end before its second rollout node is up
        jobs, env = start_run(cluster, tmp_path, "coordinator.max_steps=4", LEARNER_SBATCH=held)
        assert list(jobs) == ["coordinator", "learner", "rollout", "reward"]
        until_rollouts(2, env["FOREBAY_BIND"], tmp_path)
        cluster.run("scontrol", "release", jobs["learner"])
        cluster.wait_until_idle(timeout_s=400)
        ended = {role: cluster.job(job_id) for role, job_id in jobs.items()}
        assert [len(tasks) for tasks in ended.values()] == [1, 1, 2, 1]
        for role, tasks in ended.items():
            for task in tasks:
                assert (task["JobState"], task["ExitCode"]) == ("COMPLETED", "0:0"), f"{role}: {logs(tmp_path)}"
        nodes = {role: {task["NodeList"] for task in tasks} for role, tasks in ended.items()}
        assert nodes == {"coordinator": {"n1"}, "learner": {"n2"}, "rollout": {"n3"}, "reward": {"n2"}}
    require_finished(tmp_path / "runs/fake")


@pytest.mark.slow
def test_a_megatron_world_has_its_ranks_on_two_nodes(tmp_path: Path) -> None:
    require_slurm()
    with SlurmCluster(3) as cluster:
        overrides = [
            "learner.policy=megatron",
            "learner.parallel.tensor=2",  # no rank could start alone
            "learner.num_threads=1",
            "learner.logprob_gap_alarm=1e9",  # a fake engine's log-probs are no model's
            "coordinator.max_steps=2",
            "run.max_prompt_tokens=96",
        ]
        world = "--nodelist=n1,n2 --nodes=2 --ntasks-per-node=1"
        jobs, _ = start_run(cluster, tmp_path, *overrides, LEARNER_SBATCH=world)
        cluster.wait_until_idle(timeout_s=400)
        learner = cluster.job(jobs["learner"])[0]
        assert (learner["JobState"], learner["ExitCode"]) == ("COMPLETED", "0:0"), logs(tmp_path)
        assert learner["NodeList"] == "n[1-2]"
    require_finished(tmp_path / "runs/fake")


@pytest.mark.slow
def test_rollout_nodes_are_added_and_cancelled_while_the_run_goes_on(tmp_path: Path) -> None:
    require_slurm()
    with SlurmCluster(3) as cluster:
        jobs, env = start_run(cluster, tmp_path, "coordinator.max_steps=100000")
        address = f"tcp://127.0.0.1:{env['FOREBAY_PORT']}"
        first = until_rollouts(2, address, tmp_path)
        more = cluster.run(
            "sbatch",
            "--parsable",
            "--array=0-0",
            f"--output={tmp_path}/logs/%x-%j.out",
            f"--chdir={ROOT}",
            str(SLURM / "rollout.sbatch"),
            env={
                "FOREBAY_CONFIG": str(ROOT / "deploy/configs/fake.toml"),
                "FOREBAY_HOME": str(ROOT),
                "FOREBAY_ADDRESS": address,
            },
        ).strip()
        assert first < until_rollouts(3, address, tmp_path)
        cluster.run("scancel", more)
        assert until_rollouts(2, address, tmp_path) == first
        log = (tmp_path / f"logs/forebay-coordinator-{jobs['coordinator']}.out").read_text()
        left = [line for line in log.splitlines() if '"event": "node_left"' in line]
        assert [json.loads(line)["reason"] for line in left] == ["drained"]  # it said goodbye, and was not missed later

        cluster.run(str(FOREBAY), "stop", "--address", address)
        cluster.wait_until_idle(timeout_s=240)
        assert cluster.job(jobs["coordinator"])[0]["JobState"] == "COMPLETED", logs(tmp_path)
    assert json.loads((tmp_path / "runs/fake/summary.json").read_text())["state"] == "stopped"


def test_a_wrong_config_is_refused_before_anything_is_submitted(tmp_path: Path) -> None:
    require_programs("bash", "realpath")
    config = str(ROOT / "deploy/configs/fake.toml")
    done = subprocess.run(
        [str(SLURM / "submit.sh"), config, "--set", "run.sede=1"],
        env={"PATH": "/usr/bin:/bin", "FOREBAY_LOGS": str(tmp_path / "logs")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "run.sede: unknown key" in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_bash_can_read_the_script(path: Path) -> None:
    require_programs("bash")
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
