"""The shipped unit files, unchanged, under a real systemd: installed as deploy/systemd/README.md says, in a box of its own."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from harness.requirements import require_programs
from harness.runs import FOREBAY, ROOT, require_finished
from harness.systemd_box import require_systemd_box, run_in_box

from services.tools import up
from tests.faults.processes import free_port

UNITS = ROOT / "deploy/systemd"
SERVICES = sorted(UNITS.glob("*.service"))

INSTALL = """
set -eux
cd {root}
install -D -m 644 deploy/systemd/forebay.sysusers /etc/sysusers.d/forebay.conf
systemd-sysusers
install -m 644 deploy/systemd/forebay*.service deploy/systemd/forebay.target /etc/systemd/system/
install -D -m 644 {config} /etc/forebay/run.toml
cat > /etc/forebay/forebay.env << 'ENV'
FOREBAY_HOME={root}
FOREBAY_CONFIG=/etc/forebay/run.toml
FOREBAY_ARGS=--set run.dir=/var/lib/forebay/runs {args}
ENV
systemctl daemon-reload
nodes='forebay-rollout@0 forebay-rollout@1 forebay-reward@0'
all="forebay-coordinator forebay-learner $nodes"
forebay=.venv/bin/forebay
address=tcp://127.0.0.1:{port}
trap 'journalctl --no-pager -o cat -u "forebay*" > /run/exchange/journal; cp -r /var/lib/forebay/runs /run/exchange/runs' EXIT

# What systemd says of the unit $1 about $2.
says() {{ systemctl show --value -p "$2" "$1"; }}
# Wait until no unit of $* runs, stops or is about to.
until_over() {{ while systemctl show --value -p ActiveState "$@" | grep -qE '^(re|de)?activ' || systemctl list-jobs | grep -q forebay; do sleep 0.3; done; }}
# Wait until a run at step $1 answers.
until_step() {{ until [ "$($forebay status --address $address --json 2> /dev/null | grep -oP '^ "version": \\K\\d+')" -ge "$1" ]; do sleep 0.3; done; }}
# Wait until the run has so many rollout nodes: it must not end before.
until_rollouts() {{ until [ "$($forebay status --address $address --json 2> /dev/null | grep -c '"role": "rollout"')" -ge "$1" ]; do sleep 0.3; done; }}
# One line for each unit; then the number of processes of the units' user.
report() {{
  for unit in $all $*; do
    echo "UNIT $unit $(says $unit ActiveState) $(says $unit Result) $(says $unit ExecMainStatus) $(says $unit NRestarts)"
  done
  echo "LEFT $(find /proc -maxdepth 1 -user forebay | wc -l)"
}}
"""


def run_script(tmp_path: Path, body: str, *args: str, timeout_s: float = 400.0) -> tuple[dict[str, list[str]], Path]:
    """Install the units, run ``body``: what systemd says of each unit (state, result, exit status, restarts), and the box's folder."""
    require_systemd_box()
    if not FOREBAY.exists():
        pytest.fail(f"{FOREBAY} is missing: the units start the checkout's own .venv (make setup)")
    port = free_port()
    sets = " ".join(f"--set {item}" for item in (f"run.address=tcp://127.0.0.1:{port}", *args))
    script = INSTALL.format(root=ROOT, config="deploy/configs/fake.toml", args=sets, port=port) + body
    done = run_in_box(script, checkout=ROOT, exchange=tmp_path, timeout_s=timeout_s)
    journal = tmp_path / "journal"
    said = journal.read_text(errors="replace") if journal.exists() else ""
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{said[-6000:]}"
    assert re.search(r"^LEFT 0$", done.stdout, re.MULTILINE), done.stdout
    return {
        line.split()[1]: line.split()[2:] for line in done.stdout.splitlines() if line.startswith("UNIT ")
    }, tmp_path


@pytest.mark.slow
def test_a_run_by_the_unit_files_finishes_and_every_unit_ends_well(tmp_path: Path) -> None:
    body = """
    systemctl enable $all
    systemctl start forebay-coordinator $nodes
    until_rollouts 2
    systemctl start forebay.target
    until_over $all
    report
    """
    units, box = run_script(tmp_path, body, "coordinator.max_steps=4")
    assert len(units) == 5
    for unit, state in units.items():
        assert state == ["inactive", "success", "0", "0"], unit
    require_finished(box / "runs/fake")
    if unprivileged_namespaces_work():  # then the unit must not take them away from the reward node
        assert {name.partition("+")[0] for name in isolations(box / "runs/fake")} == {"namespaces"}


def unprivileged_namespaces_work() -> bool:
    """Whether this kernel lets a user without privileges make namespaces (sysctl or AppArmor may forbid it)."""
    command = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "unshare",
        "--user",
        "--mount",
        "--pid",
        "--fork",
        "true",
    ]
    return subprocess.run(command, capture_output=True).returncode == 0


def isolations(run_dir: Path) -> set[str]:
    """How the completions of a run were isolated (services/reward/README.md)."""
    with closing(sqlite3.connect(run_dir / "journal.sqlite")) as journal:
        return {json.loads(result)["isolation"] for (result,) in journal.execute("SELECT result FROM results")}


@pytest.mark.slow
def test_units_are_scaled_restarted_after_a_crash_and_stopped_in_order(tmp_path: Path) -> None:
    body = """
    echo FOREBAY_LEARNER_PROCS=2 > /etc/forebay/learner.env
    systemctl enable $all
    systemctl start forebay.target
    until_step 1

    systemctl enable --now forebay-rollout@2              # one more, while the run goes on
    systemctl kill -s KILL --kill-who=main forebay-rollout@0
    until [ "$(says forebay-rollout@0 NRestarts)" = 1 ] && systemctl is-active -q forebay-rollout@0; do sleep 0.3; done
    systemctl stop forebay-rollout@1                      # and one less
    step=$($forebay status --address $address --json | grep -oP '^ "version": \\K\\d+')
    until_step $((step + 3))

    echo FOREBAY_ARGS=--set no.such=key > /etc/forebay/reward-9.env
    systemctl start forebay-reward@9
    until_over forebay-reward@9

    systemctl stop forebay.target
    report forebay-rollout@2 forebay-reward@9
    """
    units, box = run_script(tmp_path, body, "coordinator.max_steps=100000")
    assert units.pop("forebay-reward@9") == ["failed", "exit-code", "2", "0"]  # a wrong config is not tried again
    assert units.pop("forebay-rollout@0")[3] == "1"
    for unit, (active, result, status, restarts) in units.items():
        assert (active, result, restarts) == ("inactive", "success", "0"), unit
        assert status == "143", unit
    summary = json.loads((box / "runs/fake/summary.json").read_text())
    assert summary["state"] == "stopped"


def test_systemd_finds_no_fault_in_the_unit_files() -> None:
    require_programs("systemd-analyze")
    paths = [str(path) for path in [*SERVICES, *UNITS.glob("*.target")]]
    assert len(paths) == 5
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *paths], capture_output=True, text=True)
    about_ours = [
        line for line in done.stderr.splitlines() if "forebay" in line
    ]  # it also reports the machine's own units
    assert (done.returncode, about_ours) == (0, [])


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_a_unit_is_restarted_after_the_same_exits_as_under_forebay_up(path: Path) -> None:
    keys = dict(line.split("=", 1) for line in path.read_text().splitlines() if re.match(r"[A-Z]\w+=", line))
    final = up.RUN_IS_OVER if "coordinator" in path.name else up.NOT_RESTARTED
    assert {int(code) for code in keys["RestartPreventExitStatus"].split()} == set(final)
    assert {0, *(int(code) for code in keys["SuccessExitStatus"].split())} == set(up.DONE)
