"""Config: what is refused, and with which words; and that every shipped config loads."""

import json
import shutil
from pathlib import Path

import pytest

from common.config import apply_overrides, parse_override
from common.errors import ConfigError
from protocol.tasks import load_tasks
from services.config import cross_check, load_config

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "deploy/configs/quickstart.toml"


@pytest.mark.parametrize("path", sorted((ROOT / "deploy/configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_config_loads(path):
    load_config(path, [])


def test_the_quickstart_config_is_consistent(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cross_check(load_config(QUICKSTART, [])) == []


def test_an_unknown_key_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"learner\.optimizer\.learning_rate: unknown key\. Known here: .*lr"):
        load_config(QUICKSTART, ["learner.optimizer.learning_rate=1"])
    with pytest.raises(ConfigError, match=r"unknown key\. Did you mean group_size\? Known here: .*bypass_window"):
        load_config(QUICKSTART, ["coordinator.group_szie=1"])


def test_all_problems_are_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, ["run.seed=-1", "coordinator.group_size=0", "rollout.x=1"])
    assert all(
        word in str(caught.value) for word in ("3 problem(s)", "run.seed", "coordinator.group_size", "rollout.x")
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("coordinator.bypass_window=99", "no step could ever be filled"),
        ("run.address=tcp://0.0.0.0:5710", "coordinator.bind"),
        ("run.address=tcp://[::]:5710", "coordinator.bind"),
        ("learner.host=0.0.0.0", "must name an address of this machine"),
        ("coordinator.node_timeout_s=1", "one late beat kills a node"),
        ("coordinator.max_steps=nan", "max_steps"),
        ("coordinator.group_size=four", "it is 'four'"),
        ("coordinator.max_filtered_per_step=4", "max_filtered_per_step belongs to dynamic_sampling = true"),
        ("rollout.fake.num_tokens=4", "rollout: fake belongs to engine = 'fake'"),
        ("learner.fake_step_s=1", "learner: fake_step_s belongs to policy = 'fake'"),
    ],
)
def test_impossible_values_are_refused(override, words):
    with pytest.raises(ConfigError, match=words):
        load_config(QUICKSTART, [override])


def test_a_filter_that_may_filter_nothing_is_refused():
    with pytest.raises(ConfigError, match="filters nothing with max_filtered_per_step = 0"):
        load_config(QUICKSTART, ["coordinator.dynamic_sampling=true", "coordinator.max_filtered_per_step=0"])


def test_any_config_can_be_tried_with_the_fakes():
    load_config(QUICKSTART, ["rollout.engine=fake", "rollout.fake.num_tokens=4", "learner.policy=fake"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.model=nowhere", "no Hugging Face checkpoint"),
        ("run.key_file=nowhere", "forebay keys"),
        ("coordinator.tasks=nowhere.jsonl", "no file at"),
        ("coordinator.tasks=README.md", "README.md:1 is not JSON"),
        ("reward.drain_timeout_s=10", "up.stop_timeout_s"),
        ("run.max_completion_tokens=100000", "lower them by"),
        ("learner.objective.overlong_buffer=1000", "every completion would be punished"),
        ("learner.parallel.tensor=3", "use one of"),
        ("up.rollout_devices=[[0],[1]]", "up.rollout_nodes"),
        ("up.learner_devices=[0, 1]", "up.learner_procs"),
        ("run.ack_timeout_s=10", "run.join_timeout_s"),
        ("run.weight_update_timeout_s=29", "must be at least twice coordinator.node_timeout_s = 15"),
        ("coordinator.no_progress_timeout_s=10", "gives up before a lease does"),
        ("run.routing_replay=true", "the model has no experts"),
        ("coordinator.bind=tcp://0.0.0.0:5710", "coordinator.insecure = true"),
    ],
)
def test_the_cross_check_says_what_to_do(override, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert any(words in problem for problem in cross_check(load_config(QUICKSTART, [override])))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("model.safetensors", None, "has no weights"),
        ("tokenizer.json", None, "has no tokenizer"),
        ("tokenizer_config.json", "{}", "has no chat template"),
        ("config.json", '{"num_attention_heads": "4", "max_position_embeddings": "x"}', "model_type"),
        ("config.json", "7", "no JSON object"),
    ],
)
def test_what_a_model_folder_lacks_is_said_before_anything_loads(tmp_path, monkeypatch, name, text, words):
    monkeypatch.chdir(ROOT)
    shutil.copytree(ROOT / "deploy/quickstart/model", tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink() if text is None else (tmp_path / name).write_text(text)
    [problem] = cross_check(load_config(QUICKSTART, [f"run.model={tmp_path}"]))
    assert words in problem


def test_cuda_devices_for_a_learner_on_the_cpu_are_refused(monkeypatch):
    monkeypatch.chdir(ROOT)
    [problem] = cross_check(load_config(QUICKSTART, ["up.learner_devices=[0]", "learner.device=cpu"]))
    assert problem.startswith("up.learner_devices are CUDA devices, but learner.device = 'cpu'")


def test_routing_replay_wants_a_model_with_experts_on_both_sides_and_routes_that_fit_a_message(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    shape = json.loads((ROOT / "deploy/quickstart/model/config.json").read_text())
    experts = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 32,
        "head_dim": 16,
        "num_hidden_layers": 94,
    }
    shutil.copytree(ROOT / "deploy/quickstart/model", tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(shape | experts | {"model_type": "qwen3_moe"}))
    replay = [f"run.model={tmp_path}", "run.routing_replay=true"]
    assert cross_check(load_config(QUICKSTART, replay)) == []
    [half] = cross_check(load_config(QUICKSTART, [*replay, "rollout.engine=fake"]))
    assert half.startswith("run.routing_replay with rollout.engine = 'fake'")
    assert cross_check(load_config(QUICKSTART, [*replay, "rollout.engine=fake", "learner.policy=fake"])) == []
    [large] = cross_check(load_config(QUICKSTART, [*replay, "coordinator.groups_per_step=4096"]))
    assert "the routed_experts of a batch of" in large
    assert "MiB, and an array of a message 1024" in large


def test_overrides_are_toml_or_words():
    assert parse_override("a.b=1e-6") == (["a", "b"], 1e-6)
    assert parse_override("a=word") == (["a"], "word")
    assert apply_overrides({"a": {"b": 1}}, ["a.c=[1, 2]"]) == {"a": {"b": 1, "c": [1, 2]}}
    with pytest.raises(ConfigError, match="not a table"):
        apply_overrides({"a": 1}, ["a.b=2"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no task"),
        ('{"task_id": "a"', ":1 is not JSON"),
        ('\n{"task_id": "a", "prompt": "p"}', ":2 is not a task: tests"),
        (
            '{"task_id": "a", "prompt": "p", "tests": {"kind": "x", "entry_point": "f", "code": "c"}}',
            "is not a task: tests: Input tag 'x'",
        ),
    ],
)
def test_a_broken_task_file_is_refused_with_its_line(tmp_path, text, words):
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_tasks(path)
