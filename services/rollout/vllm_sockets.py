"""Where vLLM's processes have their sockets: in a folder of this node's own, for vLLM removes none of them.

The folder goes when the engine is closed, and where the node was killed, when the next one starts on this machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

_PREFIX = "forebay-vllm-"


class SocketFolder:
    """Made on construction, and named to vLLM. A lock in it says that somebody lives: a pid would not, across containers."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock: IO[str] = (self.path / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        _remove_orphans(self.path.parent, self.path)
        os.environ["VLLM_RPC_BASE_PATH"] = str(self.path)

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_orphans(root: Path, own: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*"):
        if folder == own:
            continue
        with contextlib.suppress(OSError):  # another user's, one that lives, or one that is gone by now
            with (folder / "lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
