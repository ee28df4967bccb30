"""Rules of the layout that no type checker sees: what may import what, and what a light command may cost."""

import pkgutil
import resource
import subprocess
import sys
from pathlib import Path

import common
import protocol

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "vllm", "megatron", "transformers"}
LIGHT = [
    module.name
    for package in (common, protocol)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]


def loaded_by(*modules):
    """The top-level names in sys.modules of a fresh interpreter that has imported ``modules``."""
    code = f"import sys\nfor name in {modules!r}: __import__(name)\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split())


def test_common_and_protocol_load_nothing_heavy():
    assert "protocol.weights" in LIGHT
    assert "common.waits" in LIGHT
    assert not loaded_by(*LIGHT) & HEAVY


def test_what_runs_without_a_model_loads_nothing_heavy():
    assert not loaded_by("services.cli", "services.config", "services.up") & HEAVY
    assert not loaded_by("services.coordinator.service", "services.reward.service", "services.rollout.service") & HEAVY


def test_forebay_help_takes_half_a_second_of_processor_time():
    subprocess.run(
        [sys.executable, "-m", "services.cli", "--help"], cwd=ROOT, check=True, capture_output=True
    )  # compiles
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, "-m", "services.cli", "--help"], cwd=ROOT, check=True, capture_output=True)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 0.5


def test_the_import_contracts_hold():
    lint = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert lint.returncode == 0, lint.stdout + lint.stderr
