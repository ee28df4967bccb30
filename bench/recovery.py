"""How long a run stands still when a role is killed: from kill -9 until the next step is committed.

    python -m bench.recovery [--rounds 5]

One run of fakes with one process of each role and no staleness, so that every role is needed for every step. In each round each role,
and then the whole run, is killed with SIGKILL while it works and started again at once. Beside it stands how long the processes need to
start alone: from the start until the coordinator listens, or until it has the node. Prints a Markdown table of medians and ranges.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from tests.faults.harness import Run, task_lines
from tests.faults.processes import Role, seconds

FLEET = {"coordinator": "coordinator", "rollout": "rollout", "reward": "reward", "learner": "learner"}
WHOLE = "the whole run"
CHANGES = {
    "coordinator.max_steps": 1_000_000,
    "coordinator.max_staleness": 0,
    "coordinator.bypass_window": 0,
    "coordinator.node_timeout_s": 2.0,
    "coordinator.generate_timeout_s": 5.0,
    "run.weight_update_timeout_s": 6.0,
    "learner.fake_step_s": 0.02,
    "learner.checkpoint_interval_steps": 5,
}


def measure(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(seconds until the next step, seconds of starting) of each victim and round."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in (*FLEET, WHOLE)}
    with (
        tempfile.TemporaryDirectory(prefix="forebay-recovery-") as folder,
        Run(Path(folder), CHANGES, tasks=task_lines(100)) as run,
    ):
        roles = {name: run.start(role, name) for name, role in FLEET.items()}
        run.wait_for_step(3)
        for _ in range(rounds):
            for victim in found:
                found[victim].append(_kill(run, roles, list(FLEET) if victim == WHOLE else [victim]))
                run.wait_for_step(len(run.commits()) + 2)
        run.assert_all_exit(run.stop(), *roles.values())
        run.assert_stopped()
    return found


def _kill(run: Run, roles: dict[str, Role], victims: list[str]) -> tuple[float, float]:
    killed_at = time.time()
    for name in victims:
        roles[name].signal(9)
    for name in victims:
        roles[name].process.wait()
        roles[name] = run.again(roles[name])
    deadline = time.monotonic() + 60
    while run.commits()[-1] <= killed_at:
        assert time.monotonic() < deadline, f"no step within 60 s\n{run.logs()}"
        time.sleep(0.01)
    next_step = min(at for at in run.commits() if at > killed_at)
    started = max(_started(roles, name) for name in victims)
    return next_step - killed_at, started - killed_at


def _started(roles: dict[str, Role], name: str) -> float:
    """When the process was ready for work, by the log of who knows first."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        events = roles[name].events("serving" if name == "coordinator" else "joined")
        if not events and name == "learner":
            joins = [event for event in roles["coordinator"].events("node_joined") if event["node"] == name]
            events = joins[-1:]
        if events:
            return seconds(events[-1])
        time.sleep(0.02)
    raise AssertionError(f"{name} never started\n{roles[name].tail()}")


def table(found: dict[str, list[tuple[float, float]]]) -> str:
    """Markdown."""
    rows = [
        "| killed | next step after, median | range | of it: starting the process, median | share |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for victim, times in found.items():
        recovery, start = [total for total, _ in times], [starting for _, starting in times]
        share = statistics.median(starting / total for total, starting in times)
        rows.append(
            f"| {victim} | {statistics.median(recovery):.2f} s | {min(recovery):.2f} to {max(recovery):.2f} s | "
            f"{statistics.median(start):.2f} s | {share:.0%} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    load_1, _, _ = os.getloadavg()
    print(f"{rounds} rounds on {os.cpu_count()} cores, load average {load_1:.1f} at the start\n")
    print(table(measure(rounds)))


if __name__ == "__main__":
    main()
