"""Rewards of one group -> advantages of its samples. Pure functions on numpy; one formula and one citation each.

Legend: G = samples of one group (completions of one prompt).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]


def grpo(rewards_G: NDArray[np.floating], *, std_floor: float) -> FloatArray:
    """``(r - mean(r)) / max(std(r), std_floor)``, with the population std.

    GRPO: Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.2. The floor (in units of reward) is ours: a group
    whose rewards are equal but for rounding gets advantages near 0 rather than noise blown up to 1.

    Raises:
        ValueError: an empty group or a reward that is not finite.
    """
    rewards = _checked(rewards_G)
    return np.asarray((rewards - rewards.mean()) / max(rewards.std(), std_floor), dtype=np.float32)


def dr_grpo(rewards_G: NDArray[np.floating]) -> FloatArray:
    """``r - mean(r)``: no division by the std, so easy and hard prompts keep the weight their rewards give them.

    Dr. GRPO: Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2.

    Raises:
        ValueError: an empty group or a reward that is not finite.
    """
    rewards = _checked(rewards_G)
    return np.asarray(rewards - rewards.mean(), dtype=np.float32)


def group_advantages(
    rewards_G: NDArray[np.floating], *, kind: Literal["grpo", "dr_grpo"], std_floor: float
) -> FloatArray:
    """The advantages of one group by the formula that the config names (``objective.advantage``)."""
    return grpo(rewards_G, std_floor=std_floor) if kind == "grpo" else dr_grpo(rewards_G)


def _checked(rewards_G: NDArray[np.floating]) -> NDArray[np.float64]:
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.ndim != 1 or not rewards.size:
        raise ValueError(f"A group's rewards must be a non-empty vector; got shape {rewards.shape}.")
    if not np.isfinite(rewards).all():
        raise ValueError(f"Rewards must be finite; got {rewards.tolist()}.")
    return rewards
