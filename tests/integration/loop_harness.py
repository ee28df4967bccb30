"""Runs of fakes in a test's folder: the harness of the fault suite (``tests/faults``), by the names that the tests use.

Their roles are forked from a process that has the imports, as in the fault suite (``tests/faults/warm.py``): a run does not wait
for five interpreters. Roles as users start them are those of ``forebay up``, ``forebay learner --ranks``, systemd and Slurm, in the tests of these.
"""

from functools import partial

from tests.faults import harness
from tests.faults.harness import task_line
from tests.faults.processes import ROOT, Role, assert_gone, assert_none_of, descendants, processes_of

Run = partial(harness.Run, warm=True)

__all__ = ["ROOT", "Role", "Run", "assert_gone", "assert_none_of", "descendants", "processes_of", "task_line"]
