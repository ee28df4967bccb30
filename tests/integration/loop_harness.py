"""Runs of fakes in a test's folder: the harness of the fault suite (``services/faults``), by the names that the tests use."""

from services.faults.harness import LUCKY, SAME, Run, task_line
from services.faults.processes import ROOT, assert_gone, descendants, is_alive, processes_of

__all__ = ["LUCKY", "ROOT", "SAME", "Run", "assert_gone", "descendants", "is_alive", "processes_of", "task_line"]
