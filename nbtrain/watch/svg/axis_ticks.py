"""Round numbers for an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

TICKS = 5
NOTHING = 1e-12
"""an axis whose values are all below it goes from 0 to 1: it cannot be divided further"""


def ticks(low: float, high: float, about: int = TICKS) -> list[float]:
    """Round numbers, the first at or below `low`, the last at or above `high`."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * round_ for round_ in (1, 2, 5, 10) if power * round_ >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def span(values: Sequence[float]) -> tuple[float, float]:
    """The range of an axis: from zero unless that pushes all points to one side."""
    low, high = min(values), max(values)
    if high < NOTHING:
        return 0.0, 1.0
    if low == high:
        return 0.0, 1.2 * high
    if low < 0.5 * high:
        return 0.0, high
    room = max(high - low, 0.2 * high) - (high - low)  # so that a difference of one percent looks small
    return low - room / 2, high + room / 2
