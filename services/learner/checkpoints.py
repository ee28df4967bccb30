"""Which checkpoints a run has: ``ROOT/step-XXXXXXXX``, a folder that gets its name when it is complete. No torch."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from common.errors import ForebayError

PARTIAL_PREFIX = ".partial-step-"


class CheckpointError(ForebayError):
    """A checkpoint could not be written. Those before it are as they were."""


_NAME = re.compile(r"step-\d{8}")


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` optimizer steps is."""
    return root / f"step-{step:08d}"


def latest_checkpoint(root: Path) -> Path | None:
    """The complete checkpoint of the most steps under ``root``, or none."""
    return max(_complete(root), default=None)


def oldest_step(root: Path) -> int:
    """Steps of the oldest complete checkpoint under ``root``: nothing before it will be trained again. -1: there is none."""
    oldest = min(_complete(root), default=None)
    return -1 if oldest is None else int(oldest.name.removeprefix("step-"))


def prune_checkpoints(root: Path, *, keep: int) -> list[Path]:
    """Delete all but the ``keep`` latest checkpoints, and the remains of unfinished ones; returns what went.

    One rank calls it, and not while a checkpoint is being written.
    """
    assert keep >= 1
    old = sorted(_complete(root))[:-keep] + sorted(root.glob(f"{PARTIAL_PREFIX}*"))
    for path in old:
        shutil.rmtree(path)
    return old


def _complete(root: Path) -> list[Path]:
    """Each has a JSON file of its own making, written last."""
    return [path for path in root.glob("step-*") if _NAME.fullmatch(path.name) and any(path.glob("*.json"))]
