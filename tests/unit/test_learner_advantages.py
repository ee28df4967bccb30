"""Advantages against sums done by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.learner.advantages import dr_grpo, group_advantages, grpo


def test_grpo_divides_the_centred_rewards_by_the_population_std() -> None:
    # mean 0.25, variance (3 * 0.0625 + 0.5625) / 4 = 0.1875
    expected = np.array([0.75, -0.25, -0.25, -0.25]) / np.sqrt(0.1875)
    np.testing.assert_allclose(grpo(np.array([1.0, 0.0, 0.0, 0.0]), std_floor=1e-4), expected, rtol=1e-6)


def test_dr_grpo_only_centres_the_rewards() -> None:
    np.testing.assert_allclose(dr_grpo(np.array([1.0, 0.0, 0.0, 0.0])), [0.75, -0.25, -0.25, -0.25])


def test_a_group_of_equal_rewards_has_no_advantage() -> None:
    assert not grpo(np.full(8, 0.3), std_floor=1e-4).any()
    assert not dr_grpo(np.full(8, 0.5)).any()


def test_the_floor_keeps_rounding_noise_small() -> None:
    noisy = np.array([0.5, 0.5 + 1e-9])
    assert np.abs(grpo(noisy, std_floor=1e-4)).max() < 1e-4


@pytest.mark.parametrize("rewards", [[], [[1.0, 2.0]], [1.0, float("nan")], [1.0, float("inf")]])
def test_rewards_that_are_no_finite_vector_are_refused(rewards: list) -> None:
    with pytest.raises(ValueError, match=r"(?i)reward"):
        grpo(np.array(rewards), std_floor=1e-4)


@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=32), st.sampled_from(["grpo", "dr_grpo"]))
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(rewards: list[float], kind: str) -> None:
    got = group_advantages(np.array(rewards), kind=kind, std_floor=1e-4)
    assert got.dtype == np.float32
    assert abs(float(got.sum())) < 1e-3 * max(1.0, float(np.abs(got).max()))
    order = np.argsort(rewards, kind="stable")
    assert (np.diff(got[order]) >= 0).all()
