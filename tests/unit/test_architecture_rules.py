"""Rules of the layout that no type checker sees: what may import what, and what a light command may cost."""

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import common
import protocol
from protocol.messages import all_messages

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
    assert not loaded_by("services.cli", "services.config", "services.tools.up") & HEAVY
    assert not loaded_by("services.coordinator.service", "services.reward.service", "services.rollout.service") & HEAVY


def test_forebay_help_needs_nothing_but_the_standard_library():
    """What it takes is then what an interpreter takes to start: a tenth of a second or so, and less than half of one anywhere."""
    code = "import sys\nfrom services.cli import parser\nparser().format_help()\nprint(*{name.partition('.')[0] for name in sys.modules})"
    loaded = set(subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split())
    assert loaded - loaded_by() - sys.stdlib_module_names == {"services"}


def test_the_import_contracts_hold():
    lint = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert lint.returncode == 0, lint.stdout + lint.stderr


def producers():
    """Message class -> where in the packages one is made: a role's folder, or a module of protocol/ or services/."""
    names = {message.__name__ for message in all_messages().values()}
    found = {name: set() for name in names}
    for path in [*(ROOT / "services").rglob("*.py"), *(ROOT / "protocol").rglob("*.py")]:
        parts = path.relative_to(ROOT).parts
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "protocol.messages"]
        bare = {alias.name for node in imports for alias in node.names}
        for node in nodes:
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="m"), attr=name)) if name in names:
                    found[name].add("/".join(parts[:2]))
                case ast.Call(func=ast.Name(id=name)) if name in names & bare:
                    found[name].add("/".join(parts[:2]))
    return found


def test_every_message_has_a_producer_and_only_those_that_are_for_all_have_more_than_one():
    both_sides = {  # said by learner and engines alike, or by each kind of node
        "WeightUpdateReady": {"services/learner", "services/rollout"},
        "WeightUpdateFailed": {"services/learner", "services/rollout"},
        "LeaseCancelled": {"services/reward", "services/rollout"},
        "StopRequest": {"services/cli.py", "services/tools"},
        "Refused": {"protocol/router.py", "services/coordinator"},
    }
    for name, places in producers().items():
        if name in both_sides:
            assert places == both_sides[name], name
        else:
            assert len(places) == 1, f"{name} is made in {sorted(places)}"
