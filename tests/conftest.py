"""Two test processes on two cores (`make test`): those that mostly wait for time limits, and those that compute.

Of the second kind (vLLM, Megatron worlds, compilers) one at a time runs, so that a limit of the first is never met by load alone.
Without pytest-xdist's ``-n`` all run one after the other.
"""

from __future__ import annotations

import pytest

# Runs of the real loop with the fake engine and trainer: sleep, sockets, fsync.
WAITING = {
    "test_faults", "test_liveness", "test_loop", "test_postmortem", "test_recovery", "test_security", "test_slurm", "test_soak",
    "test_systemd", "test_coordinator_stateful", "test_coordinator_service", "test_coordinator_recovery",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Names the process that each test belongs to, for ``--dist loadgroup``."""
    for item in items:
        waits = item.path.stem in WAITING and "real-" not in item.name
        item.add_marker(pytest.mark.xdist_group("waiting" if waits else "computing"))
