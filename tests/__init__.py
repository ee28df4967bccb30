"""Tests; a package, so that the tests can import the fault suite as ``tests.faults``."""
