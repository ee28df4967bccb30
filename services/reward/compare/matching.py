"""What text and values have in common: a tolerance for numbers, and items in any order.

*Any order* is a matching that is found in two steps: items that are equal as they stand cancel out (the caller's part); those that are left
are sorted, floats rounded, and each expected one takes the first right answer among the next ``_WINDOW``. So a pass is always a real
one-to-one match, and a right answer can only be missed where more than ``_WINDOW`` items lie within the tolerance of one another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from protocol.suites import Compare

_WINDOW = 64

_Item = TypeVar("_Item")


def close(a: float, b: float, compare: Compare) -> bool:
    """``|a - b| <= max(atol, rtol * |b|)``, where b is the expected one. NaN is close to NaN, an infinity to itself."""
    if a == b:
        return True
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isnan(a) and math.isnan(b)
    return abs(a - b) <= max(compare.atol, compare.rtol * abs(b))


def coarse(value: float, compare: Compare) -> float:
    """Few digits, so that values which differ by noise mostly sort as equals, and by what comes after them."""
    return 0.0 if abs(value) <= compare.atol else float(f"{value:.5g}")


def unmatched(ours: list[_Item], theirs: list[_Item], same: Callable[[_Item, _Item], bool]) -> list[_Item]:
    """The first of ``theirs`` that no item of ``ours`` is left for, both sorted and of one length; none if each has one. A list, since
    that item may be ``None``."""
    rest = ours[::-1]  # the next ones are at the end, where taking one out is cheap
    for wanted in theirs:
        stop = max(-1, len(rest) - 1 - _WINDOW)
        index = next((i for i in range(len(rest) - 1, stop, -1) if same(rest[i], wanted)), None)
        if index is None:
            return [wanted]
        del rest[index]
    return []
