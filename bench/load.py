"""Load beside a measurement: processes that do nothing but burn CPU."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

# Ends with its parent, whatever becomes of that.
_BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(10**5): pass"


@contextlib.contextmanager
def burners(count: int) -> Iterator[None]:
    """``count`` processes that compete for the CPUs.

    Each has a session of its own, as each judge process has: the kernel's autogroups (sched(7)) share the CPUs out between sessions, and
    burners that lie in one session would weigh as much as one.
    """
    processes = [
        subprocess.Popen([sys.executable, "-S", "-c", _BURN], stdin=subprocess.DEVNULL, start_new_session=True)
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
