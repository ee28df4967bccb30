"""Runs of fakes in a test's folder: the harness of the fault suite (``services/faults``), by the names that the tests use."""

from services.faults.harness import Run, task_line
from services.faults.processes import ROOT, Role, assert_gone, descendants, processes_of

__all__ = ["ROOT", "Role", "Run", "assert_gone", "descendants", "processes_of", "task_line"]
