"""Layouts that fit a model and a world, and what is said of those that don't."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from test_learner_architecture import write

from services.learner.architecture import Architecture, read_architecture
from services.learner.config import ParallelConfig, RecomputeConfig
from services.learner.layouts import layout_violations, stage_layers


@pytest.fixture
def arch(tmp_path: Path) -> Architecture:
    """4 layers, 4 heads, 2 key-value heads."""
    return read_architecture(write(tmp_path))


@pytest.fixture
def moe(arch: Architecture) -> Architecture:
    return dataclasses.replace(arch, num_experts=6, experts_per_token=2, moe_ffn_size=36)


@pytest.mark.parametrize(
    ("options", "world_size"),
    [
        ({"tensor": 2, "pipeline": 2}, 8),
        ({"tensor": 2, "sequence": True, "context": 2}, 4),
        ({"pipeline": 2, "virtual_stages": 2}, 2),
        ({"pipeline": 3, "first_stage_layers": 1, "last_stage_layers": 1}, 3),
        ({"pipeline": 2, "first_stage_layers": 3, "last_stage_layers": 1}, 2),
    ],
)
def test_a_layout_that_fits_has_no_violations(arch: Architecture, options: dict, world_size: int) -> None:
    assert layout_violations(arch, ParallelConfig(**options), world_size, RecomputeConfig(granularity="full")) == []


@pytest.mark.parametrize(
    ("options", "world_size", "words"),
    [
        ({"tensor": 2, "context": 2}, 6, "world size 6 is not a multiple of .* = 4: start 4 ranks"),
        ({"tensor": 3}, 3, "4 attention heads in 2 groups .* parallel.tensor = 3 ranks: use one of 1, 2, 4$"),
        ({"pipeline": 3}, 3, "4 layers .* use one of 1, 2, 4, or set parallel.last_stage_layers = 2"),
        ({"pipeline": 3, "first_stage_layers": 1}, 3, "4 layers .* when first_stage_layers = 1"),
        ({"pipeline": 2, "first_stage_layers": 1, "last_stage_layers": 1}, 2, r"= 2 are not the model's 4 layers"),
        ({"pipeline": 2, "virtual_stages": 4}, 2, "stages of 2 layers .*virtual_stages = 4: use one of 1, 2$"),
        ({"virtual_stages": 2}, 1, "virtual_stages needs parallel.pipeline > 1"),
        ({"last_stage_layers": 2}, 1, "last_stage_layers needs parallel.pipeline > 1"),
        ({"sequence": True}, 1, "needs parallel.tensor > 1"),
        ({"expert": 2}, 2, "parallel.expert = 2, but the model has no experts"),
        ({"expert_tensor": 2}, 2, "parallel.expert_tensor = 2, but the model has no experts"),
    ],
)
def test_a_layout_that_does_not_fit_says_what_would(
    arch: Architecture, options: dict, world_size: int, words: str
) -> None:
    (found,) = layout_violations(arch, ParallelConfig(**options), world_size)
    assert re.search(words, found), found


def test_all_violations_are_listed_at_once(arch: Architecture) -> None:
    found = "\n".join(layout_violations(arch, ParallelConfig(tensor=3, pipeline=3), 8))
    for words in ("world size 8", "4 attention heads", "4 layers"):
        assert words in found


def test_experts_are_cut_by_their_own_sizes(moe: Architecture) -> None:
    fits = ParallelConfig(tensor=2, sequence=True, expert=3, expert_tensor=1)
    assert layout_violations(moe, fits, 6) == []
    found = "\n".join(layout_violations(moe, ParallelConfig(tensor=2, expert=4, expert_tensor=8), 32))
    assert "6 experts don't divide by parallel.expert = 4: use one of 1, 2, 3, 6" in found
    assert "moe_intermediate_size 36 doesn't divide by parallel.expert_tensor = 8" in found
    assert "needs parallel.sequence = true" in found


def test_what_is_recomputed_must_be_there(arch: Architecture) -> None:
    def found(**options: object) -> list[str]:
        recompute = RecomputeConfig.model_validate(options)
        return layout_violations(arch, ParallelConfig(pipeline=2), 2, recompute)

    assert found(granularity="full", num_layers=2) == []
    assert "a stage has 2 layers: use 1 to 2" in found(granularity="full", num_layers=3)[0]
    assert "has no experts: use mlp" in found(granularity="selective", modules=["moe"])[0]


def test_layers_are_dealt_to_stages_in_turns() -> None:
    assert stage_layers(8, ParallelConfig(pipeline=2, virtual_stages=2)) == (
        (range(2), range(4, 6)),
        (range(2, 4), range(6, 8)),
    )
    uneven = ParallelConfig(pipeline=3, first_stage_layers=2, last_stage_layers=1)
    assert stage_layers(7, uneven) == ((range(2),), (range(2, 6),), (range(6, 7),))
    assert stage_layers(3, ParallelConfig()) == ((range(3),),)
