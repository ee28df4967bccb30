"""A real systemd as process 1 of its own namespaces, on a machine whose own process 1 may be anything.

Inside, ``/tmp``, ``/var/tmp``, ``/run``, ``/etc``, ``/var/lib`` and ``/var/log`` are private: files can be installed, users made and units
enabled as on a machine of one's own. The rest of the root file system is the machine's, read-only. The network is the machine's.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from harness.requirements import require_programs, require_root, unavailable
from harness.runs import ROOT, tie_to_parent

BOOT_SCRIPT = Path(__file__).with_name("systemd_box.sh")
SYSTEMD = "/lib/systemd/systemd"  # where Debian's and, through the merged /usr, all others' package has it
BOOT_TIMEOUT_S = 100.0  # for all but the script: boot and shut-down take half a second on an idle machine
NAMESPACES = ["--fork", "--kill-child", "--pid", "--mount", "--mount-proc", "--cgroup", "--uts", "--ipc"]


def require_systemd_box() -> None:
    """Skip (or fail, in CI) where no box can be booted."""
    require_root()
    require_programs("unshare", "systemctl", "journalctl", "systemd-sysusers")
    if not os.access(SYSTEMD, os.X_OK):
        unavailable(f"no systemd at {SYSTEMD}")
    if ROOT.stat().st_mode & 0o005 != 0o005:
        unavailable(f"the units run as a user of their own, and {ROOT} is closed to others: chmod o+rx")
    probe = subprocess.run(["unshare", *NAMESPACES, "true"], capture_output=True, text=True)
    if probe.returncode != 0:
        unavailable(f"this root may not make namespaces: {probe.stderr.strip()}")


def run_in_box(script: str, *, checkout: Path, exchange: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Boot, run ``script`` with bash as root, shut down; its output and exit status. Nothing of the box outlives the call.

    A script that takes longer than ``timeout_s`` gets SIGTERM, and its exit status is 124.
    ``exchange`` is a folder of this machine that the script sees as ``/run/exchange``. ``checkout`` has the same path inside, even
    under ``/tmp``, and so has the interpreter of its ``.venv``; both can be reached by every user of the box.
    """
    needed = [checkout, Path(sys.base_prefix)]
    (exchange / "script").write_text(script)
    paths = {
        "BOX_EXCHANGE": str(exchange),
        "BOX_NEEDED": " ".join(shlex.quote(str(path)) for path in needed),
        "BOX_HIDDEN": " ".join(shlex.quote(str(path)) for path in sorted({p for n in needed for p in _closed(n)})),
        "BOX_SYSTEMD": SYSTEMD,
        "BOX_SECONDS": str(timeout_s),
    }
    with (exchange / "boot.log").open("wb") as log:
        process = subprocess.Popen(
            ["unshare", *NAMESPACES, "bash", str(BOOT_SCRIPT)],
            env={"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", **paths},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=tie_to_parent,
        )
        try:
            process.wait(timeout_s + BOOT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass  # there is no status then, which is reported below
        finally:
            process.kill()  # --kill-child: systemd goes too, and with process 1 the kernel ends all of its namespace
            process.wait()
    output, status = exchange / "output", exchange / "status"
    said = output.read_text(errors="replace") if output.exists() else ""
    if not status.exists():
        boot_log = (exchange / "boot.log").read_text(errors="replace")
        raise TimeoutError(f"The systemd box neither ran its script nor ended.\n{boot_log[-2000:]}\n{said[-8000:]}")
    return subprocess.CompletedProcess(["systemd-box"], int(status.read_text()), said, "")


def _closed(path: Path) -> list[Path]:
    """The outermost folder on the way to ``path`` that other users can't pass, if there is one."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & 0o001:
            return [folder]
    return []
