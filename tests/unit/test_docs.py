"""What the documents name exists: links, commands, make targets, config keys."""

import re
from pathlib import Path

import pytest

from services.cli import parser

ROOT = Path(__file__).resolve().parents[2]
IGNORED = {".venv", ".venv-mcore-next", "runs", "models"}
DOCUMENTS = [path for path in sorted(ROOT.glob("**/*.md")) if not IGNORED & set(path.parts)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert target.startswith("http") or (path.parent / target).exists(), f"{path}: {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_are_those_that_there_are(path):
    known = parser()._subparsers._group_actions[0].choices
    for command in re.findall(r"`(?:\S*/)?forebay ([a-z]+)\b", path.read_text()):
        assert command in known, f"{path}: forebay {command}"
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M)
    for target in re.findall(r"`make ([a-z0-9-]+)`", path.read_text()):
        assert target in targets, f"{path}: make {target}"


def test_the_readme_begins_with_its_two_commands():
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert [line.split("#")[0].strip() for line in blocks[0].strip().splitlines()] == ["make quickstart", "make test"]
