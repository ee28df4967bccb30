"""Rewards of a step's groups -> advantages of its samples. Pure functions on numpy; one formula and one citation each.

Legend: G = samples of one group (completions of one prompt). No function divides by a std without a floor, and none takes a
std of the *other* samples of a group: for 7 rewards of 0.35 and one of 0.95 that std is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.learner.config import Advantage

FloatArray = NDArray[np.float32]


def grpo(rewards_G: NDArray[np.floating], *, std_floor: float) -> FloatArray:
    """``(r - mean(r)) / max(std(r), std_floor)``, with the population std.

    GRPO: Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.2. The floor (in units of reward) is ours: a group
    whose rewards are equal but for rounding gets advantages near 0 rather than noise blown up to 1.

    Mean 0.5, std 0.5:

    >>> grpo(np.array([1.0, 0.0, 0.0, 1.0]), std_floor=1e-4).tolist()
    [1.0, -1.0, -1.0, 1.0]

    Raises:
        ValueError: an empty group or a reward that is not finite.
    """
    rewards = _checked(rewards_G)
    return np.asarray((rewards - rewards.mean()) / max(rewards.std(), std_floor), dtype=np.float32)


def dr_grpo(rewards_G: NDArray[np.floating]) -> FloatArray:
    """``r - mean(r)``: no division by the std, so easy and hard prompts keep the weight their rewards give them.

    Dr. GRPO: Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2.

    >>> dr_grpo(np.array([1.0, 0.0, 0.0, 0.0])).tolist()
    [0.75, -0.25, -0.25, -0.25]

    Raises:
        ValueError: an empty group or a reward that is not finite.
    """
    rewards = _checked(rewards_G)
    return np.asarray(rewards - rewards.mean(), dtype=np.float32)


def rloo(rewards_G: NDArray[np.floating]) -> FloatArray:
    """``r_i - mean of the others' r``, which is ``G / (G - 1)`` times the centred reward: an unbiased baseline.

    RLOO: Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740, section 3.1 (after Kool et al. 2019).

    The first: 1 - (0 + 0.5) / 2 = 0.75; the second: 0 - (1 + 0.5) / 2 = -0.75.

    >>> rloo(np.array([1.0, 0.0, 0.5])).tolist()
    [0.75, -0.75, 0.0]

    Raises:
        ValueError: fewer than two samples, or a reward that is not finite.
    """
    rewards = _checked(rewards_G)
    if rewards.size < 2:
        raise ValueError("Leave-one-out needs two rewards or more in a group; got one.")
    return np.asarray((rewards - rewards.mean()) * (rewards.size / (rewards.size - 1)), dtype=np.float32)


def reinforce_pp_baseline(groups: Sequence[NDArray[np.floating]], *, std_floor: float) -> list[FloatArray]:
    """``a = r - mean of its group``, then ``a / max(std of all a of the batch, std_floor)``.

    REINFORCE++ with baseline: Hu et al. 2025, arXiv:2501.03262. One scale for the whole batch: a group whose rewards hardly
    differ stays small, where GRPO would blow it up. The batch's mean needs no subtraction: each group's is 0. The std is
    over samples (not tokens) of the groups given here; the learner leaves out those without signal.

    Centred: 0.5, -0.5 and 0.5, -0.5, 0, 0; their squares add up to 1 over 6 samples, so the std is 0.408:

    >>> [(a * 1000).round().tolist() for a in reinforce_pp_baseline(
    ...     [np.array([1.0, 0.0]), np.array([1.0, 0.0, 0.5, 0.5])], std_floor=1e-4)]
    [[1225.0, -1225.0], [1225.0, -1225.0, 0.0, 0.0]]

    Raises:
        ValueError: an empty group or a reward that is not finite.
    """
    centred = [rewards - rewards.mean() for rewards in map(_checked, groups)]
    scale = max(float(np.concatenate(centred).std()), std_floor) if centred else 1.0
    return [np.asarray(part / scale, dtype=np.float32) for part in centred]


def batch_advantages(groups: Sequence[NDArray[np.floating]], *, kind: Advantage, std_floor: float) -> list[FloatArray]:
    """The advantages of each group of a step by the formula that the config names (``objective.advantage``).

    Raises:
        ValueError: see the formulas.
    """
    match kind:
        case "grpo":
            return [grpo(rewards, std_floor=std_floor) for rewards in groups]
        case "dr_grpo":
            return [dr_grpo(rewards) for rewards in groups]
        case "rloo":
            return [rloo(rewards) for rewards in groups]
        case "reinforce_pp":
            return reinforce_pp_baseline(groups, std_floor=std_floor)


def _checked(rewards_G: NDArray[np.floating]) -> NDArray[np.float64]:
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.ndim != 1 or not rewards.size:
        raise ValueError(f"A group's rewards must be a non-empty vector; got shape {rewards.shape}.")
    if not np.isfinite(rewards).all():
        raise ValueError(f"Rewards must be finite; got {rewards.tolist()}.")
    return rewards
