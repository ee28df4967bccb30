"""Every case of ``make faults`` as a test of its own, and a short soak."""

from __future__ import annotations

import signal
import sys
import time

import pytest
from rich.console import Console

from tests.faults.case import run_case
from tests.faults.cases.table import all_cases
from tests.faults.processes import Role, assert_gone, descendants
from tests.faults.soak import Soak


def _params():
    for case in all_cases():
        slow = case.slow or case.real
        marks = [pytest.mark.slow] if slow else []
        if case.real:  # vLLM and Megatron start twice
            marks.append(pytest.mark.timeout(1200))
        yield pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("case", list(_params()))
def test_nothing_is_lost_or_trained_twice(tmp_path, case):
    result = run_case(case, tmp_path)
    if result.not_run:
        pytest.skip(result.why)
    assert result.passed, result.why
    assert (result.lost, result.duplicated) == (0, 0)


@pytest.mark.slow
def test_15_random_kills_lose_nothing(tmp_path):
    soak = Soak(tmp_path, seed=3)
    soak.run(num_kills=15, seconds=None, console=Console(quiet=True))
    assert soak.passed, f"{soak.problem}\n{soak.verdict}\n{soak.kills}"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_suite_leaves_no_process(tmp_path, signum):
    words = ["--case", "freeze-rollout", "--keep", str(tmp_path)]
    suite = Role("suite", [sys.executable, "-m", "tests.faults", *words], tmp_path / "suite.log")
    try:
        deadline = time.monotonic() + 200
        while len(children := descendants(suite.pid)) < 4:  # the warm one, and three roles
            assert time.monotonic() < deadline, suite.tail()
            time.sleep(0.1)
        suite.signal(signum)
        assert suite.exit_code() == (130 if signum != signal.SIGKILL else -signal.SIGKILL)
        assert_gone(children, within_s=60)
    finally:
        suite.reap()
    if signum != signal.SIGKILL:
        assert "1 not run" in suite.output()
