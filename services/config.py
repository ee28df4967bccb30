"""The whole config: one section for each role, and the checks that need more than one of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pydantic import Field

from common.config import StrictModel, apply_overrides, read_toml, validate
from common.errors import ConfigError
from protocol.config import RunConfig
from protocol.tasks import load_tasks
from services.coordinator.config import CoordinatorConfig
from services.learner.architecture import read_architecture
from services.learner.config import LearnerConfig
from services.learner.layouts import layout_violations
from services.reward.config import RewardConfig
from services.rollout.config import RolloutConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "*.tiktoken")


class UpConfig(StrictModel):
    """What ``forebay up`` starts on this machine. Other machines start roles one by one."""

    rollout_nodes: int = Field(default=1, ge=0)
    reward_nodes: int = Field(default=1, ge=0)
    learner_procs: int = Field(default=1, ge=0)  # ranks of the learner; 0: no learner here
    rollout_devices: list[list[int]] = []  # CUDA devices of each rollout node, in order
    learner_devices: list[int] = []  # CUDA devices of the learner, one a rank
    max_restarts: int = Field(default=3, ge=0)  # of each process, after a crash
    stop_timeout_s: float = Field(default=10.0, gt=0)  # for an ordered stop; then the processes are ended


class Config(StrictModel):
    """One config file. Sections that are left out have their defaults."""

    run: RunConfig
    coordinator: CoordinatorConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    learner: LearnerConfig = LearnerConfig()
    up: UpConfig = UpConfig()


def load_config(path: Path, overrides: list[str]) -> Config:
    """Read a TOML file (or the JSON that a run keeps of its own config) with ``--set`` overrides.

    Raises:
        ConfigError: with every violation that the models find.
    """
    return validate(Config, apply_overrides(_read(path), overrides), source=str(path))


def _read(path: Path) -> dict[str, Any]:
    if path.suffix != ".json":
        return read_toml(path)
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"The config {path} can't be read: {error}.") from None


def load_reward_config(path: Path | None, overrides: list[str]) -> RewardConfig:
    """The ``[reward]`` section alone, for judging without a run: of a run's config, of a file that has nothing else, or the defaults.

    Raises:
        ConfigError: with every violation that the models find.
    """
    data = apply_overrides({} if path is None else _read(path), overrides)
    ours = {
        key: value for key, value in data.items() if path is None or key == "reward" or key not in Config.model_fields
    }
    return validate(_RewardOnly, ours, source=str(path or "(--set)")).reward


class _RewardOnly(StrictModel):
    reward: RewardConfig = RewardConfig()


def cross_check(config: Config) -> list[str]:
    """What is wrong between the roles; each entry says what and what to do. Empty: nothing that can be seen beforehand."""
    return [
        *_check_files(config),
        *_check_lengths(config),
        *_check_layout(config),
        *_check_routing(config),
        *_check_work(config),
    ]


def require_consistent(config: Config, source: str) -> None:
    """
    Raises:
        ConfigError: lists all that ``cross_check`` finds.
    """
    if problems := cross_check(config):
        listing = "\n".join(f"  {problem}" for problem in problems)
        raise ConfigError(f"The config {source} has {len(problems)} problem(s):\n{listing}")


def _check_files(config: Config) -> list[str]:
    problems = []
    uses_model = config.rollout.engine == "vllm" or config.learner.policy == "megatron"
    if uses_model and not (config.run.model / "config.json").is_file():
        problems.append(
            f"run.model: no Hugging Face checkpoint at {config.run.model.resolve()} (config.json is missing). Give the folder of "
            "one, or make it: `make setup` and `make smollm2` make those of the shipped configs."
        )
    elif uses_model:
        problems += [
            f"run.model: {lack}" for lack in model_folder_lacks(config.run.model, chats=config.rollout.engine == "vllm")
        ]
    if not config.coordinator.tasks.is_file():
        problems.append(
            f"coordinator.tasks: no file at {config.coordinator.tasks.resolve()}. Convert data with forebay data convert."
        )
    else:
        try:
            load_tasks(config.coordinator.tasks)
        except ConfigError as error:
            problems.append(f"coordinator.tasks: {error}")
    try:
        config.run.read_keys()
    except ConfigError as error:
        problems.append(f"run.key_file: {error}")
    from services.coordinator.opening import unprotected  # here, so that reading a config needs no ZeroMQ

    if open_to_all := unprotected(config.run, config.coordinator):
        problems.append(open_to_all)
    return problems


def model_folder_lacks(folder: Path, *, chats: bool) -> list[str]:
    """What else than config.json must lie in a model's folder; with ``chats`` what makes a prompt of a task, too. Whether it is whole is
    seen when it is loaded."""
    problems = []
    if not any(folder.glob("*.safetensors")):
        problems.append(f"{folder.resolve()} has no weights (*.safetensors).")
    if not chats:
        return problems
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        problems.append(
            f"{folder.resolve()} has no tokenizer ({', '.join(TOKENIZER_FILES)}): copy its files beside the weights."
        )
    elif not any(folder.glob("*chat_template*")) and '"chat_template"' not in _text(folder / "tokenizer_config.json"):
        problems.append(
            f"the tokenizer of {folder.resolve()} has no chat template, which makes a prompt of a task: add the one of the "
            "model's chat version (chat_template.jinja, or chat_template in tokenizer_config.json)."
        )
    return problems


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _model_shape(config: Config) -> dict[str, int]:
    """The whole numbers in the model's config.json; {} if it can't be read."""
    try:
        raw = json.loads(_text(config.run.model / "config.json"))
    except ValueError:
        return {}
    return {key: value for key, value in raw.items() if isinstance(value, int)} if isinstance(raw, dict) else {}


def _check_lengths(config: Config) -> list[str]:
    longest = config.run.max_prompt_tokens + config.run.max_completion_tokens
    problems = []
    limit = _model_shape(config).get("max_position_embeddings")
    if limit is not None and longest > limit:
        problems.append(
            f"run.max_prompt_tokens + run.max_completion_tokens = {longest}, but the model takes {limit}: lower them by {longest - limit}."
        )
    if longest > config.learner.max_tokens_per_microbatch:
        problems.append(
            f"learner.max_tokens_per_microbatch = {config.learner.max_tokens_per_microbatch} can't hold one sequence of {longest} "
            "tokens (run.max_prompt_tokens + run.max_completion_tokens): raise it to that at least."
        )
    if config.learner.objective.overlong_buffer > config.run.max_completion_tokens:
        problems.append(
            f"learner.objective.overlong_buffer = {config.learner.objective.overlong_buffer} is over run.max_completion_tokens = "
            f"{config.run.max_completion_tokens}: every completion would be punished. A fifth of it is usual."
        )
    return problems


def _check_learner(config: Config) -> list[str]:
    """The learner's model and layout, where this machine knows both; a learner elsewhere checks its own at its start."""
    if config.learner.policy != "megatron" or not (config.run.model / "config.json").is_file():
        return []
    learner, procs = config.learner, config.up.learner_procs
    try:
        arch = read_architecture(config.run.model)
    except ConfigError as error:
        return [f"run.model: {error}"]
    world_size = procs or math.lcm(
        learner.parallel.tensor * learner.parallel.context * learner.parallel.pipeline,
        learner.parallel.expert_tensor_size * learner.parallel.expert * learner.parallel.pipeline,
    )
    found = layout_violations(arch, learner.parallel, world_size, learner.recompute)
    return [f"learner: {violation.replace('world size', 'up.learner_procs =', 1)}." for violation in found]


def _check_layout(config: Config) -> list[str]:
    shape, up = _model_shape(config), config.up
    problems = _check_learner(config)
    heads, size = shape.get("num_attention_heads"), config.rollout.tensor_parallel
    if heads and heads % size:
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        problems.append(
            f"rollout.tensor_parallel = {size} does not divide the model's num_attention_heads = {heads}: use one of {fits}."
        )
    if up.rollout_devices and len(up.rollout_devices) != up.rollout_nodes:
        problems.append(
            f"up.rollout_devices has {len(up.rollout_devices)} entries for up.rollout_nodes = {up.rollout_nodes}."
        )
    if up.learner_devices and len(up.learner_devices) != up.learner_procs:
        problems.append(
            f"up.learner_devices has {len(up.learner_devices)} entries for up.learner_procs = {up.learner_procs}."
        )
    if up.learner_devices and config.learner.device == "cpu":
        problems.append("up.learner_devices are CUDA devices, but learner.device = 'cpu': leave one of them out.")
    used = [device for devices in [*up.rollout_devices, up.learner_devices] for device in devices]
    if shared := sorted({device for device in used if used.count(device) > 1}):
        problems.append(
            f"up.rollout_devices and up.learner_devices both use CUDA devices {shared}: give each role its own."
        )
    return problems


def _check_routing(config: Config) -> list[str]:
    """``run.routing_replay``: both sides must have the same experts, and a batch's routed_experts must fit into a message."""
    if not config.run.routing_replay:
        return []
    from protocol.codec import MAX_ARRAY_BYTES  # here, so that reading a config needs no numpy

    fakes = [
        key
        for key, is_fake in (
            ("rollout.engine", config.rollout.engine == "fake"),
            ("learner.policy", config.learner.policy == "fake"),
        )
        if is_fake
    ]
    if len(fakes) == 2:
        return []
    if fakes:
        return [
            f"run.routing_replay with {fakes[0]} = 'fake': the other side has a model whose experts it does not know."
        ]
    try:
        arch = read_architecture(config.run.model)
    except ConfigError:
        return []  # said by ``_check_files`` or ``_check_learner``
    if not arch.is_moe:
        return ["run.routing_replay = true, but the model has no experts: leave it out."]
    coordinator = config.coordinator
    num_tokens = coordinator.groups_per_step * coordinator.group_size
    num_tokens *= config.run.max_prompt_tokens + config.run.max_completion_tokens
    num_bytes = num_tokens * arch.num_layers * arch.experts_per_token * (1 if arch.num_experts <= 256 else 2)
    if num_bytes > MAX_ARRAY_BYTES:
        return [
            f"run.routing_replay: the routed_experts of a batch of {num_tokens} tokens take up to {num_bytes / 2**20:.0f} MiB, and an array of a "
            f"message {MAX_ARRAY_BYTES >> 20}: lower coordinator.groups_per_step, coordinator.group_size or the lengths, or leave it out."
        ]
    return []


def _check_work(config: Config) -> list[str]:
    coordinator, problems = config.coordinator, []
    slowest = coordinator.generate_timeout_s + coordinator.score_timeout_s
    if coordinator.no_progress_timeout_s <= slowest:
        problems.append(
            f"coordinator.no_progress_timeout_s = {coordinator.no_progress_timeout_s:g} must be over generate_timeout_s + "
            f"score_timeout_s = {slowest:g}, or the run gives up before a lease does."
        )
    for key, limit in (
        ("run.join_timeout_s", config.run.join_timeout_s),
        ("coordinator.disk_timeout_s", coordinator.disk_timeout_s),
    ):
        if config.run.ack_timeout_s <= limit:
            problems.append(
                f"run.ack_timeout_s = {config.run.ack_timeout_s:g} must be over {key} = {limit:g}, or nodes give up a result while "
                "the coordinator may still take it."
            )
    if config.run.weight_update_timeout_s < 2 * coordinator.node_timeout_s:
        problems.append(
            f"run.weight_update_timeout_s = {config.run.weight_update_timeout_s:g} must be at least twice coordinator.node_timeout_s = "
            f"{coordinator.node_timeout_s:g}: what is lost on its way is sent again after that, and one loss would end the weight update."
        )
    if config.up.reward_nodes and config.up.stop_timeout_s <= config.reward.drain_timeout_s:
        problems.append(
            f"up.stop_timeout_s = {config.up.stop_timeout_s:g} must be over reward.drain_timeout_s = {config.reward.drain_timeout_s:g}, "
            "or reward nodes are ended while they finish their leases."
        )
    return problems
