"""Random kills over all roles for a given time or number: ``make faults --kills N`` or ``--soak SECONDS``.

One run of fakes that goes on all the time. Every half second or so a victim is drawn: the coordinator, a rollout node, a reward node,
the learner, or the whole run at once; it is killed with SIGKILL, or (one time in five) frozen and let go on some seconds later. What was
killed is started again at once. A fault counts as recovered with the first step that is committed after it. At the end the run is
stopped in order and every account is compared, as for the cases.
"""

from __future__ import annotations

import random
import signal
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.faults.case import LIMITS
from tests.faults.evidence import Verdict
from tests.faults.harness import Run, task_lines
from tests.faults.processes import Role
from tests.faults.suite import _ended_by_sigterm, _logs_in

FLEET = {"coordinator": "coordinator", "judge": "reward", "judge-2": "reward", "a": "rollout", "b": "rollout", "learner": "learner"}  # fmt: skip
WEIGHTS = {"coordinator": 2, "judge": 1, "judge-2": 1, "a": 1, "b": 1, "learner": 2, "whole run": 1}
FREEZE_SHARE = 0.2
FROZEN_S = (0.5, 4.0)  # beyond coordinator.node_timeout_s and below it
PAUSE_S = (0.0, 1.0)  # between the recovery of a fault and the next one
IMPATIENT_SHARE = 0.3  # of the faults come without waiting for the recovery of the last
RECOVERY_LIMIT_S = 120.0


@dataclass
class Kill:
    """One fault. Times in seconds since the epoch."""

    victim: str
    frozen: bool
    at: float
    recovered_at: float | None = None


@dataclass
class Soak:
    """A soak under way: ``run`` gives it ``kills``, ``verdict`` and ``steps``."""

    folder: Path
    seed: int
    kills: list[Kill] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)
    steps: int = 0
    problem: str = ""

    def run(self, *, num_kills: int | None, seconds: float | None, console: Console) -> None:
        """Kill until there were ``num_kills`` or ``seconds`` are over; then stop the run and judge it."""
        chance = random.Random(self.seed)
        self.folder.mkdir(parents=True, exist_ok=True)
        changes = {**LIMITS, "coordinator.max_steps": 1_000_000, "learner.checkpoint_interval_steps": 5}
        changes |= {"run.join_timeout_s": 60.0, "coordinator.no_progress_timeout_s": RECOVERY_LIMIT_S}
        ends_at = float("inf") if seconds is None else time.monotonic() + seconds
        with Run(self.folder, changes, tasks=task_lines(100), proxied=True, seed=self.seed, warm=True) as run:
            roles = {name: run.start(role, name) for name, role in FLEET.items()}
            try:
                run.wait_for_step(1, RECOVERY_LIMIT_S)
                while time.monotonic() < ends_at and (num_kills is None or len(self.kills) < num_kills):
                    kill = self._strike(run, roles, chance)
                    if chance.random() >= IMPATIENT_SHARE:
                        self._await_recovery(run, roles, kill)
                        time.sleep(chance.uniform(*PAUSE_S))
                    if len(self.kills) % 10 == 0:
                        console.print(f"{len(self.kills):5d} kills, {len(run.commits())} steps", highlight=False)
                self._await_recovery(run, roles, self.kills[-1] if self.kills else Kill("", False, time.time()))
                self._stop(run, roles)
            except AssertionError as error:
                self.problem = str(error)[-4000:]
                return
            commits = run.commits()
            self.steps = len(commits)
            for kill in self.kills:
                kill.recovered_at = next((at for at in commits if at > kill.at), None)
            self.verdict = run.verdict()

    def _strike(self, run: Run, roles: dict[str, Role], chance: random.Random) -> Kill:
        victim = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        names = list(roles) if victim == "whole run" else [victim]
        kill = Kill(victim, chance.random() < FREEZE_SHARE, time.time())
        self.kills.append(kill)
        for name in names:
            roles[name].process.send_signal(signal.SIGSTOP if kill.frozen else signal.SIGKILL)
        if kill.frozen:
            time.sleep(chance.uniform(*FROZEN_S))
            for name in names:
                roles[name].process.send_signal(signal.SIGCONT)
        else:
            for name in names:
                roles[name].process.wait()
                roles[name] = run.again(roles[name])
        return kill

    def _await_recovery(self, run: Run, roles: dict[str, Role], kill: Kill) -> None:
        """A step is committed after the fault; meanwhile a role that ends by itself is an error."""
        deadline = time.monotonic() + RECOVERY_LIMIT_S
        while not any(at > kill.at for at in run.commits()[-1:]):
            for name, role in roles.items():
                code = role.process.poll()
                assert code is None, f"{name} ended with {code}, and nobody had killed it\n{role.tail()}"
            assert time.monotonic() < deadline, f"no step within {RECOVERY_LIMIT_S} s of {kill}\n{run.logs()}"
            time.sleep(0.05)

    def _stop(self, run: Run, roles: dict[str, Role]) -> None:
        # The processes of now: one that has just been killed may still count as in, and its successor would find the run over.
        living = {(name, role.pid) for name, role in roles.items() if name != "coordinator"}
        run.wait_until(lambda status: living <= {(node["node_id"], node["pid"]) for node in status["nodes"]})
        stop = run.stop()
        run.assert_all_exit(stop, *roles.values(), timeout_s=60)

    @property
    def passed(self) -> bool:
        """Nothing lost, nothing twice, no account that differs, and every fault was recovered from."""
        return not self.problem and not self.verdict.problems and all(kill.recovered_at for kill in self.kills)


def main(*, kills: int | None, seconds: float | None, seed: int, keep: Path | None) -> int:
    """Body of ``make faults --kills N`` or ``--soak SECONDS``: its exit code."""
    console = Console()
    with _logs_in(keep) as folder, _ended_by_sigterm():
        soak = Soak(folder / f"soak-{seed}", seed)
        started = time.monotonic()
        soak.run(num_kills=kills, seconds=seconds, console=console)
        console.print(table(soak))
        console.print(
            f"{len(soak.kills)} kills in {time.monotonic() - started:.0f} s (seed {seed}): {soak.steps} steps committed, "
            f"lost {soak.verdict.lost}, duplicated {soak.verdict.duplicated}: {'passed' if soak.passed else 'FAILED'}",
            highlight=False,
        )
        for line in [soak.problem, *soak.verdict.problems[:50]]:
            if line:
                console.print(line, soft_wrap=True, markup=False)
        if not soak.passed or keep is not None:
            console.print(f"Logs and journal: {soak.folder}", soft_wrap=True)
        else:
            import shutil

            shutil.rmtree(folder, ignore_errors=True)
    return 0 if soak.passed else 1


def table(soak: Soak) -> Table:
    """Faults by victim, with the seconds from each to the next committed step."""
    found = Table("victim", "killed", "frozen", "recovered after, median", "longest", title_justify="left")
    by_victim: dict[str, list[Kill]] = defaultdict(list)
    for kill in soak.kills:
        by_victim[FLEET.get(kill.victim, kill.victim)].append(kill)
    for victim, kills in sorted(by_victim.items()):
        times = [kill.recovered_at - kill.at for kill in kills if kill.recovered_at is not None]
        frozen = sum(kill.frozen for kill in kills)
        middle, most = (f"{statistics.median(times):.2f} s", f"{max(times):.2f} s") if times else ("-", "-")
        found.add_row(victim, str(len(kills) - frozen), str(frozen), middle, most)
    return found
