"""What the tests of launch files share: the checkout, and what a finished run looks like."""

from __future__ import annotations

import ctypes
import json
import signal
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOREBAY = ROOT / ".venv/bin/forebay"


def tie_to_parent() -> None:
    """``preexec_fn`` of a child that must not outlive the tests, however those end: it is killed with them (prctl(2))."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def require_finished(run_dir: Path) -> None:
    """Assert that the run in ``run_dir`` came to its end, and that its ledger closes."""
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["state"] == "finished", summary["end_reason"]
    assert summary["version"] == summary["max_steps"]
    ledger = summary["ledger"]
    ends = ("trained", "buffered", "in_flight", "filtered", "failed", "duplicate", "lost")
    assert ledger["generated"] == sum(ledger[end] for end in ends) > 0, ledger
