"""How many bundles each pipeline should have: devices follow remaining work x bundle size x weight.

Shares are proportional, but none gets more than its remaining work can use, and each with work gets its floor
first. What the caps leave over goes to the others. The ideal is a real number; only whole bundles count as a reason to
give or to take, so that nothing moves to and fro over a fraction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_EPSILON = 1e-6
_HALVINGS = 60
"""Enough to pin the common level down to the last bit that could change a whole bundle."""


def ideal_devices(budget: int, weight_P: np.ndarray, floor_P: np.ndarray, cap_P: np.ndarray) -> np.ndarray:
    """Real-valued shares of `budget` devices: clip(level x weight, floor, cap) with one level for all (P pipelines).

    With floors above the budget the floors are returned (some must take turns); with caps below it, the caps.
    """
    if floor_P.sum() >= budget:
        return floor_P.astype(float)
    if cap_P.sum() <= budget:
        return cap_P.astype(float)
    low, high = 0.0, float((cap_P / weight_P).max())
    for _ in range(_HALVINGS):
        level = (low + high) / 2
        if np.clip(level * weight_P, floor_P, cap_P).sum() > budget:
            high = level
        else:
            low = level
    return np.clip(low * weight_P, floor_P, cap_P)


@dataclass(slots=True)
class Share:
    """What one pipeline holds and should have, in bundles."""

    held: int
    ideal: float
    useful: int
    part: int
    """Its equal part of the devices it competes for: up to this, whatever is unused is its own to use."""

    @property
    def surplus(self) -> int:
        """Bundles its remaining work cannot use: anyone may have them at any time."""
        return max(0, self.held - self.useful)

    @property
    def spare(self) -> int:
        """Whole bundles above its ideal: a pipeline that is short may have them."""
        return max(0, self.held - math.ceil(self.ideal - _EPSILON))

    @property
    def short(self) -> int:
        """Whole bundles below its ideal; with work and nothing held, always at least one."""
        if self.useful == 0:
            return 0
        return max(1 if self.held == 0 else 0, min(self.useful, math.floor(self.ideal + _EPSILON)) - self.held)

    @property
    def gap_ratio(self) -> float:
        """1: has nothing of its ideal share; 0: has it; below: has more."""
        return (self.ideal - self.held) / self.ideal if self.ideal > 0 else 0.0
