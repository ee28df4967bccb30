"""Which tests may run side by side when `make test` runs two processes of them, on two cores.

vLLM, Megatron worlds and all else that computes go one after the other; so do the judge's tests, whose limits count CPU seconds; the rest
goes file by file to whichever process is free. Without pytest-xdist's ``-n`` all tests run in one process.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Random examples are the same ones each time, and none is a failure for being slow; FOREBAY_SEARCH=N looks for other ones.
settings.register_profile(
    "forebay",
    deadline=None,
    derandomize=not os.environ.get("FOREBAY_SEARCH"),
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("forebay")

# A shell that starts a job in the background has it ignore SIGINT, and all its descendants with it. Tests send SIGINT to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A folder for unix sockets, whose paths have 107 bytes at most; ``tmp_path`` is as long as TMPDIR makes it."""
    with tempfile.TemporaryDirectory(prefix="forebay-", dir="/tmp") as folder:
        yield Path(folder)


HEAVY = {
    "test_bench_learner", "test_bench_staleness", "test_learner_objectives", "test_megatron_checkpoint", "test_megatron_context",
    "test_megatron_families", "test_megatron_memory", "test_megatron_packing", "test_megatron_policy", "test_megatron_routing",
    "test_megatron_world", "test_quickstart", "test_resume_equal", "test_vllm_engine", "test_vllm_moe",
}  # fmt: skip
JUDGE = {
    "test_agreement", "test_attacks", "test_bad_jobs", "test_hacks", "test_judge_commands", "test_judge_start_and_end", "test_judging",
    "test_reports", "test_reports_service", "test_soak",
}  # fmt: skip


def group_of(nodeid: str) -> str:
    """The tests of a group are run one after the other by one process."""
    path, _, name = nodeid.partition("::")
    stem = Path(path).stem
    heavy = stem in HEAVY or "[real-" in name
    return "heavy" if heavy else "judge" if stem in JUDGE else stem


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By groups. (The marks of xdist 3.8 for that, ``xdist_group``, do nothing under pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return GroupScheduling(config, log)
