"""What a user sees of a mistake: one paragraph that says what, where and what to do; a non-zero exit code; nothing left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
import zmq
from loop_harness import ROOT, Run, assert_none_of, task_line


def forebay(*words, module="services.cli"):
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=200
    )


def paragraph_of(done, code=2):
    """The error of a command that must have failed well."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    head, _, text = done.stderr.partition("error: ")
    assert all(line.startswith("{") for line in head.splitlines()), f"only log events may come before: {head}"
    assert "\n\n" not in text.strip()
    return text


def assert_nothing_left(run):
    assert_none_of(run.folder, within_s=60)
    assert not (run.folder / "runs").exists() or not any((run.folder / "runs").iterdir())


ROLES = ["services.coordinator", "services.rollout", "services.reward", "services.learner"]


@pytest.mark.parametrize("module", ROLES)
def test_a_role_names_an_unknown_key_and_the_known_ones(tmp_path, module):
    run = Run(tmp_path, {"coordinator.group_sise": 4})
    text = paragraph_of(forebay("--config", run.config_path, module=module))
    assert "coordinator.group_sise: unknown key" in text
    assert "group_size" in text
    assert str(run.config_path) in text


@pytest.mark.parametrize("command", ["up", "check"])
def test_a_command_names_an_unknown_key_and_the_known_ones(tmp_path, command):
    run = Run(tmp_path, {"coordinator.group_sise": 4})
    assert "coordinator.group_sise: unknown key" in paragraph_of(forebay(command, run.config_path))
    assert_nothing_left(run)


def test_a_config_that_does_not_exist_is_named(tmp_path):
    for words in (
        ["up", tmp_path / "x.toml"],
        ["check", tmp_path / "x.toml"],
        ["learner", "--config", tmp_path / "x.toml"],
    ):
        text = paragraph_of(forebay(*words))
        assert str(tmp_path / "x.toml") in text
        assert "deploy/configs" in text


def test_a_config_that_is_a_folder_or_no_toml_is_named(tmp_path):
    assert str(tmp_path) in paragraph_of(forebay("check", tmp_path))
    (tmp_path / "x.toml").write_text("[run\nid = 1")
    assert "line 1" in paragraph_of(forebay("check", tmp_path / "x.toml"))


def test_a_broken_task_line_is_named_with_its_number(tmp_path):
    run = Run(tmp_path, tasks=task_line("a") + '{"task_id": "b"\n')
    text = paragraph_of(forebay("up", run.config_path))
    assert "tasks.jsonl:2 is not JSON" in text
    assert_nothing_left(run)
    assert "tasks.jsonl:2 is not JSON" in paragraph_of(
        forebay("--config", run.config_path, module="services.coordinator")
    )
    assert_nothing_left(run)


def test_a_missing_task_file_is_named(tmp_path):
    run = Run(tmp_path, {"coordinator.tasks": str(tmp_path / "gone.jsonl")})
    assert "gone.jsonl" in paragraph_of(forebay("up", run.config_path))
    assert "gone.jsonl" in paragraph_of(forebay("--config", run.config_path, module="services.coordinator"))
    assert_nothing_left(run)


def test_a_port_in_use_is_named_with_the_remedy(tmp_path):
    run = Run(tmp_path)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        other.bind(run.address)
        for done in (
            forebay("up", run.config_path),
            forebay("--config", run.config_path, module="services.coordinator"),
        ):
            text = paragraph_of(done)
            assert run.address in text
            assert "--set run.address" in text
    assert_nothing_left(run)


def test_a_missing_model_folder_is_named_before_anything_starts(tmp_path):
    run = Run(tmp_path, {"rollout.engine": "vllm", "learner.policy": "megatron", "run.max_prompt_tokens": 64})
    text = paragraph_of(forebay("up", run.config_path))
    assert "run.model: no Hugging Face checkpoint at" in text
    assert str(tmp_path / "no-model") in text
    assert_nothing_left(run)


@pytest.mark.parametrize("role", ["rollout", "learner"])
def test_a_role_names_a_missing_model_folder(tmp_path, role):
    run = Run(tmp_path, {"rollout.engine": "vllm", "learner.policy": "megatron", "learner.device": "cpu"})
    text = paragraph_of(forebay("--config", run.config_path, module=f"services.{role}"))
    assert str(tmp_path / "no-model") in text
    assert_nothing_left(run)


@pytest.mark.parametrize("role", ["rollout", "reward", "learner"])
def test_a_node_without_a_coordinator_says_where_it_looked(tmp_path, role):
    run = Run(tmp_path, {"run.join_timeout_s": 2})
    text = paragraph_of(forebay("--config", run.config_path, module=f"services.{role}"), code=3)
    assert f"No coordinator answers at {run.address} for 2 s" in text
    assert "run.join_timeout_s" in text
    assert_nothing_left(run)


@pytest.mark.parametrize("role", ["rollout", "reward"])
def test_a_node_that_waits_for_a_coordinator_ends_at_the_first_sigterm(tmp_path, role):
    with Run(tmp_path, {"run.join_timeout_s": 1000}) as run:
        node = run.start(role)
        while "starting" not in node.log.read_text():
            assert node.process.poll() is None
        node.signal(signal.SIGTERM)
        assert node.exit_code() in (143, -signal.SIGTERM)  # the latter before its handler stands
        assert "Traceback" not in node.log.read_text()


def test_a_node_of_another_run_is_told_so(tmp_path):
    # Nobody joins, so nothing happens until the last of three programs has started: longer than the harness' limit on a slow machine.
    with Run(tmp_path, {"coordinator.no_progress_timeout_s": 1000}) as run:
        run.start("coordinator")
        run.now()
        for role in ("rollout", "reward", "learner"):
            text = paragraph_of(
                forebay("--config", run.config_path, "--set", "run.id=other", module=f"services.{role}"), 3
            )
            assert "serves run 'loop'" in text
            assert "'other'" in text
        assert run.status()["nodes"] == []


def test_resuming_what_is_no_run_is_refused(tmp_path):
    run = Run(tmp_path)
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "gone"):
        text = paragraph_of(forebay("up", "--resume", folder))
        assert str(folder) in text
        assert "config.json" in text
    assert list((tmp_path / "empty").iterdir()) == []
    assert "config file, or --resume" in paragraph_of(forebay("up"))
    assert_nothing_left(run)


def test_resuming_a_run_whose_journal_is_damaged_is_refused_and_leaves_it_alone(tmp_path):
    run = Run(tmp_path)
    run.run_dir.mkdir(parents=True)
    (run.run_dir / "config.json").write_text(json.dumps(run.config))
    (run.run_dir / "journal.sqlite").write_bytes(b"somebody's bytes" * 1000)
    text = paragraph_of(forebay("up", "--resume", run.run_dir))
    assert "journal.sqlite is damaged and can't be used" in text
    assert (run.run_dir / "journal.sqlite").read_bytes() == b"somebody's bytes" * 1000
    assert_none_of(tmp_path, within_s=60)


@pytest.mark.parametrize("command", ["status", "stop"])
def test_asking_a_run_that_is_not_up_says_so(tmp_path, command):
    run = Run(tmp_path)
    text = paragraph_of(forebay(command, "--config", run.config_path), code=3)
    assert run.address in text
    assert "Is the run up?" in text


@pytest.mark.parametrize("override", ["nonsense", "coordinator.max_steps=0", "run.model.x=1"])
def test_a_bad_override_is_named(tmp_path, override):
    run = Run(tmp_path)
    assert override.partition("=")[0].removesuffix(".x") in paragraph_of(
        forebay("check", run.config_path, "--set", override)
    )
