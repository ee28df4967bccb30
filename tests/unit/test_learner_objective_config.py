"""Combinations of objective and optimizer settings: those that make no sense are refused, with what to do."""

from __future__ import annotations

import doctest
import importlib
import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from services.learner.config import LearnerConfig, ObjectiveConfig, OptimizerConfig


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"decoupled": True}, "set importance = 'truncate'"),
        ({"importance": "truncate"}, "needs decoupled = true.*count twice"),
        ({"importance": "full"}, "needs decoupled = true"),
        ({"kind": "gspo", "importance": "mask"}, "set importance_level = 'sequence'"),
        ({"kind": "gspo", "decoupled": True, "importance": "truncate"}, "set importance_level = 'sequence'"),
        ({"importance_min": 0.5}, "importance_min belongs to importance = 'mask'"),
        ({"importance_max": 3.0}, "importance_max belongs to importance = 'truncate'"),
        ({"importance_level": "sequence"}, "importance_level belongs to"),
        ({"advantage": "rloo", "std_floor": 0.1}, "std_floor belongs to advantage"),
        ({"overlong_penalty": 0.5}, "overlong_penalty belongs to overlong_buffer"),
        ({"kl_kind": "k2"}, "kl_kind belongs to kl_coef"),
        ({"kl_in": "reward"}, "kl_in belongs to kl_coef"),
        ({"aggregation": "constant"}, "give both"),
        ({"constant_length": 64}, "give both"),
        ({"kl_coef": 0.1, "kl_kind": "k1"}, "gradient of mean zero"),
        ({"kl_importance": True}, "with kl_coef over 0"),
        ({"kl_coef": 0.1, "kl_in": "reward", "kl_importance": True}, "belongs to kl_in = 'loss'"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"importance_max": 0.5}, "importance_max"),
        ({"minibatches": 0}, "minibatches"),
        ({"kind": "ppo"}, "'clipped', 'gspo' or 'cispo'"),
    ],
)
def test_a_combination_that_makes_no_sense_is_refused_with_the_remedy(options: dict, text: str) -> None:
    with pytest.raises(ValidationError, match=rf"(?s){text}"):
        ObjectiveConfig.model_validate(options)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ValidationError, match=r"importance_level = 'sequence'; aggregation = 'constant'"):
        ObjectiveConfig(kind="gspo", importance="mask", aggregation="constant")


@pytest.mark.parametrize(
    "options",
    [
        {"importance": "mask", "importance_min": 0.5},
        {"decoupled": True, "importance": "truncate", "minibatches": 4, "epochs": 2},
        {"kind": "gspo", "importance": "mask", "importance_level": "sequence"},
        {"kl_coef": 0.1, "kl_kind": "k1", "kl_in": "reward"},
        {"kl_coef": 0.1, "kl_kind": "k1", "kl_importance": True},
        {"kind": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    ],
)
def test_combinations_that_make_sense_pass(options: dict) -> None:
    ObjectiveConfig.model_validate(options)


def test_each_objective_has_the_aggregation_of_its_paper() -> None:
    assert ObjectiveConfig().aggregation_or_default == "token"
    assert ObjectiveConfig(kind="gspo").aggregation_or_default == "sequence"
    assert ObjectiveConfig(kind="gspo", aggregation="token").aggregation_or_default == "token"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": 0.0}, "would train nothing.*allow_zero_lr"),
        ({"lr": -1.0}, "greater than or equal to 0"),
        ({"schedule": "cosine"}, "needs decay_steps over warmup_steps"),
        (
            {"schedule": "linear", "decay_steps": 5, "warmup_steps": 5},
            "needs decay_steps over warmup_steps = 5; it is 5",
        ),
        ({"decay_steps": 5}, "belong to schedule"),
        ({"schedule": "linear", "decay_steps": 5, "lr": 1e-3, "lr_min": 1e-2}, "lr_min = 0.01 is over lr = 0.001"),
    ],
)
def test_a_learning_rate_that_makes_no_sense_is_refused(options: dict, text: str) -> None:
    with pytest.raises(ValidationError, match=rf"(?s){text}"):
        OptimizerConfig.model_validate(options)


def test_a_learning_rate_of_zero_passes_when_it_is_meant() -> None:
    assert OptimizerConfig(lr=0.0, allow_zero_lr=True).lr == 0.0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fake_step_s": 1.0}, "fake_step_s belongs to policy = 'fake'"),
        ({"fake_die_at_step": 3}, "fake_die_at_step belongs to policy = 'fake'"),
        ({"fake_gap_alarm": 0.1}, "fake_gap_alarm belongs to policy = 'fake'"),
        ({"optimizer": {"initial_loss_scale": 16.0}}, "optimizer.initial_loss_scale belongs to dtype = 'float16'"),
        (
            {"dtype": "bfloat16", "optimizer": {"loss_scale_window": 10}},
            "optimizer.loss_scale_window belongs to dtype = 'float16'",
        ),
    ],
)
def test_a_setting_that_nothing_would_read_is_refused(options: dict, text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        LearnerConfig.model_validate(options)


def test_the_settings_that_the_readme_names_are_those_that_there_are() -> None:
    text = (Path(__file__).parents[2] / "services/learner/README.md").read_text()
    section = re.search(r"## Algorithms\n(.*?)\n## ", text, re.S).group(1)
    named = [tomllib.loads(code) for code in re.findall(r"`([a-z_]+ = [^`]+)`", section)]
    assert len(named) > 20
    known = OptimizerConfig.model_fields | ObjectiveConfig.model_fields
    for setting in named:
        ((key, value),) = setting.items()
        assert key in known, setting
        if isinstance(value, str):
            kinds = get_args(known[key].annotation)
            assert value in {name for kind in kinds for name in (get_args(kind) or [kind])}, setting


@pytest.mark.parametrize("recipe", ["GRPO as published", "GSPO", "CISPO", "AReaL"])
def test_the_recipes_of_the_readme_are_accepted(recipe: str) -> None:
    text = (Path(__file__).parents[2] / "services/learner/README.md").read_text()
    row = re.search(rf"^\| {recipe} \|(.*)\|$", text, re.M).group(1)
    settings = tomllib.loads("\n".join(re.findall(r"`([a-z_]+ = [^`]+)`", row)))
    assert len(settings) >= 2
    ObjectiveConfig.model_validate(settings)


@pytest.mark.parametrize(
    "module", ["advantages", "batch_samples", "importance", "kl", "losses", "objectives", "token_statistics", "updates"]
)
def test_the_examples_in_the_docstrings_are_right(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"services.learner.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
