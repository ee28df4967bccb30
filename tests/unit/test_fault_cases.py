"""The table of cases: what it covers, and that the README shows it as it is."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from tests.faults import suite
from tests.faults.cases.table import all_cases

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_has_the_list_of_cases_as_the_command_prints_it():
    text = (ROOT / "tests/faults/README.md").read_text()
    shown = text.partition("<!-- make faults --list -->\n\n")[2].partition("\n<!-- end of list -->")[0]
    assert shown == suite.list_table(all_cases()), "run: make faults --list"


def test_the_reported_faults_of_queues_rewards_and_processes_are_covered():
    covered = {number for case in all_cases() for number in case.covers}
    assert covered >= {17, 18, 19, 20, 21, 22, 23, 24, 25, 27, 28, 29, 30, 31, 33, 34, 51, 54, 55, 57}
    assert len(all_cases()) >= 30


def test_cases_are_chosen_by_name_or_stage_and_real_ones_only_when_asked_for():
    assert [case.name for case in suite.select(["data-ends"], [], real=False)] == ["data-ends"]
    assert {case.stage for case in suite.select([], ["update", "commit"], real=False)} == {"update", "commit"}
    assert not any(case.real for case in suite.select([], [], real=False))
    assert any(case.real for case in suite.select([], [], real=True))


def test_unknown_names_are_named():
    with pytest.raises(ConfigError, match="no-such"):
        suite.select(["no-such"], [], real=False)
    with pytest.raises(ConfigError, match="The stages are: join"):
        suite.select([], ["no-such"], real=False)
