"""What a user gets who mistypes: one paragraph and an exit code, from the command itself, before anything starts."""

from pathlib import Path

import pytest
import structlog

from services.cli import main
from services.config import load_config
from tests.faults.__main__ import main as faults_main

FAKE = "deploy/configs/fake.toml"


@pytest.fixture(autouse=True)
def _logs_as_before():
    """The command sends the log to its own stderr, which is gone after the test."""
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["up", FAKE, "--set", "run.dir=README.md"], "run.dir: README.md/fake-"),
        (["up", FAKE, "--set", "run.dir=/proc/none"], "--set run.dir=DIR"),
        (["status", "--address", "localhost"], "--address localhost must be tcp://HOST:PORT"),
        (["waits", "--address", "tcp://h:99999"], "ports are 1 to 65535"),
        (["status", "--address", "ipc://" + "x" * 108], "has a path of 108 bytes, and a unix socket's has 107 at most"),
        (["stop", "--address", "tcp://h:1", "--set", "run.seed=1"], "--set changes a config"),
        (["stop", "--config", FAKE, "--key-file", "k"], "--key-file goes with --address"),
        (["check", FAKE, "--set", "run.address=tcp://h:0"], "run.address: must be tcp://HOST:PORT"),
        (["check", FAKE, "--set", "coordinator.bind=h:1"], "coordinator.bind: must be tcp://HOST:PORT"),
        (["postmortem", "README.md"], "is not the folder of a run"),
        (["postmortem", "deploy", "--out", "README.md"], "is not overwritten"),
        (["faults", "--kills", "0"], "more than 0"),
        (["faults", "--soak", "-1"], "more than 0"),
        (["faults", "--kills", "3", "--case", "freeze-reward"], "without --case"),
        (["faults", "--case", "freeze-reward", "--stage", "judge"], "leave out --stage"),
        (["faults", "--json", "no-such-folder/x.json"], "there is no folder no-such-folder"),
        (["keys", "no-such-folder/k"], "no-such-folder"),
        (["data", "convert", "no-such-file", "x"], "no-such-file"),
        (["data", "check", "README.md"], "README.md:1"),
        (["data", "check", "README.md", "--repeat", "0"], "--repeat must be 1 or more"),
        (
            ["eval", "--config", FAKE, "--tasks", "deploy/quickstart/tasks_heldout.jsonl", "deploy/quickstart/model"],
            "rollout.engine = fake",
        ),
        (["export", "no-such-run", "x"], "no-such-run"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_paragraph(words, says, monkeypatch, pytestconfig, capsys):
    monkeypatch.chdir(pytestconfig.rootpath)
    assert (faults_main(words[1:]) if words[0] == "faults" else main(words)) in (1, 2)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert says in said.err
    assert "\n\n" not in said.err


def test_a_run_that_was_moved_is_not_begun_anew_elsewhere(tmp_path, monkeypatch, pytestconfig, capsys):
    monkeypatch.chdir(pytestconfig.rootpath)
    config = load_config(Path(FAKE), ["run.dir=some-runs"])
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake/config.json").write_text(config.model_dump_json())
    assert main(["up", "--resume", str(tmp_path / "fake")]) == 2
    assert f"if the run has moved, say so: --set run.dir={tmp_path}" in capsys.readouterr().err
