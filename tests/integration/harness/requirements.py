"""What a test needs of the machine: without it the test is skipped with the reason, and in CI (``CI`` is set) it fails."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def unavailable(reason: str) -> NoReturn:
    """Skip the test at hand, or fail it where ``CI`` is set: there a missing service is an error."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason} (CI is set, so this is a failure)")
    pytest.skip(reason)


def require_programs(*programs: str) -> None:
    """``deploy/ci-packages.txt`` names the Debian packages that have them."""
    if missing := [program for program in programs if find_program(program) is None]:
        unavailable(f"not installed: {', '.join(missing)} (Debian packages: deploy/ci-packages.txt)")


def require_root() -> None:
    """Daemons that start processes of other users, and namespaces, need root."""
    if os.geteuid() != 0:
        unavailable("needs root")


def find_program(name: str) -> str | None:
    """Path of a program. Daemons are in sbin, which a user's PATH may lack."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
