"""Reward arithmetic: from what was measured to the parts of a reward, and to the reward. Pure.

Every function returns a finite number in [0, 1] for any numbers at all: some come out of a sandbox.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from services.reward.config import RewardWeights


class _Scale(NamedTuple):
    """A metric counts fully up to ``good``, not at all from ``bad`` on, and linearly between."""

    weight: float
    good: float
    bad: float


# The names are those of ``sandbox/readability.measure``. The weights are ours: structure first, style last.
READABILITY_SCALES: dict[str, _Scale] = {
    "longest_function": _Scale(weight=2, good=25, bad=80),
    "max_complexity": _Scale(weight=2, good=8, bad=25),
    "max_nesting": _Scale(weight=2, good=3, bad=7),
    "largest_expression": _Scale(weight=1, good=40, bad=120),
    "long_lines": _Scale(weight=1, good=0, bad=10),
    "joined_statements": _Scale(weight=1, good=1, bad=10),
    "poor_names": _Scale(weight=2, good=2, bad=12),
    "unused_names": _Scale(weight=1, good=0, bad=5),
    "bare_excepts": _Scale(weight=1, good=0, bad=3),
    "repeated_statements": _Scale(weight=1, good=3, bad=15),
    "undocumented": _Scale(weight=1, good=1, bad=6),
    "padding": _Scale(weight=1, good=0, bad=30),
}

_NOISE = 1.4  # p95 / median of the CPU time of identical jobs, the upper end of what was measured
_FLOOR_S = 0.001  # less CPU time than this can't be told from none
_MAX_S = 1e9
_NUM_LEVELS = 5


def correctness(scores: Sequence[float], num_tests: int, mode: Literal["all", "fraction"]) -> float:
    """The correctness part of ``scores``, one in [0, 1] for each test that ran, out of ``num_tests`` tests.

    "all": 1 if every test ran and has score 1, else 0. "fraction": the mean, where a test that did not run has 0. No tests at all
    are 0 in both. More scores than tests (asserts in a loop) raise the number of tests.
    """
    total = max(num_tests, len(scores))
    if num_tests <= 0:
        return 0.0
    valid = [_share(score) for score in scores]
    if mode == "all":
        return 1.0 if len(valid) == total and all(score == 1.0 for score in valid) else 0.0
    return _share(math.fsum(valid) / total)


def readability(metrics: Mapping[str, Any]) -> float:
    """The readability part: the weighted mean of ``READABILITY_SCALES`` over all metrics.

    ``metrics`` comes out of a sandbox. One that is missing, no int or float, negative, or not finite counts 0.
    """
    values = metrics if type(metrics) is dict else {}
    total = sum(scale.weight for scale in READABILITY_SCALES.values())
    return _share(
        math.fsum(s.weight * _on_scale(values.get(name), s) for name, s in READABILITY_SCALES.items()) / total
    )


def _on_scale(value: Any, scale: _Scale) -> float:
    if (
        type(value) not in (int, float) or not 0 <= value < scale.bad
    ):  # NaN fails both, and an int of any size can be compared
        return 0.0
    return min(1.0, (scale.bad - float(value)) / (scale.bad - scale.good))


def efficiency(cpu_s: float, solution_cpu_s: float, baseline_s: float) -> float:
    """The efficiency part of an accepted program: CPU time of the suite's ``solution`` over its own, in steps of 0.2.

    All are CPU seconds that the worker's parent measured, on one worker at about one time, never the candidate's clock. ``baseline_s``, of
    an empty job, is taken off both. Identical jobs differ by a factor of 1.2 to 1.4 (p95 over median), so that much slower still counts
    as fast as the solution, and the steps keep noise from being rewarded: 1.0 up to 1.4 times the solution's time, 0.8 up to 1.75,
    0.6 up to 2.3, 0.4 up to 3.5, 0.2 up to 7, then 0. A time that is no positive number of a sane size was not measured: 0.
    """
    if not all(type(x) in (int, float) and 0 <= x < _MAX_S for x in (cpu_s, solution_cpu_s, baseline_s)):
        return 0.0
    if not (cpu_s and solution_cpu_s):
        return 0.0
    own, reference = (max(_FLOOR_S, x - baseline_s) for x in (cpu_s, solution_cpu_s))
    ratio = min(1.0, _NOISE * reference / own)
    return math.floor(ratio * _NUM_LEVELS + 1e-9) / _NUM_LEVELS  # 1e-9: 0.6 * 5 is below 3


def combine(parts: Mapping[str, float], weights: RewardWeights) -> float:
    """The reward: the mean of the parts that are there, by ``weights``. ``correctness`` is always there.

    Readability and efficiency count in the measure of correctness, so that wrong code earns nothing by them. Give the raw parts.
    A suite must have the same parts whatever the verdict: if one with a ``solution`` had no ``efficiency`` for wrong code, a slow right
    answer could earn less than a wrong one. So it is 0 there, not absent. Parts without a weight don't count.
    """
    correct = _share(parts["correctness"])
    total, weight = weights.correctness * correct, weights.correctness
    for name, its_weight in (("readability", weights.readability), ("efficiency", weights.efficiency)):
        if name in parts:
            total += its_weight * correct * _share(parts[name])
            weight += its_weight
    return _share(total / weight)


def _share(value: Any) -> float:
    """``value`` within [0, 1]; 0 for what is no number."""
    if not isinstance(value, int | float) or not value > 0:  # NaN too
        return 0.0
    return float(value) if value < 1 else 1.0
