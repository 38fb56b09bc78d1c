"""How many bundles each pipeline should have: devices follow remaining work x bundle size x weight.

Shares are proportional, but none gets more than its remaining work can use, and each with work gets its floor
first. The remainder goes to the others. The ideal is a real number; only a difference of whole bundles is a reason to
move a worker, so that none moves back and forth over a fraction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_EPSILON = 1e-6
_HALVINGS = 60
"""Bisection steps: enough that the remaining error cannot change a whole bundle."""


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
    """Current and ideal share of one pipeline, in bundles."""

    held: int
    ideal: float
    useful: int
    part: int
    """Its equal part of the devices it competes for: up to this it may take any unused device."""

    @property
    def surplus(self) -> int:
        """Bundles its remaining work cannot use: any pipeline may take them at any time."""
        return max(0, self.held - self.useful)

    @property
    def spare(self) -> int:
        """Whole bundles above its ideal: a pipeline that is short may take them."""
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
