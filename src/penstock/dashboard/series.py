"""Series of any number of points in a bounded number of buckets.

Each bucket keeps the count, mean, least and greatest of its points. When the points outgrow the buckets, neighbours are
joined and each bucket covers twice as much: memory is constant, one more point costs the same after a day as at the
start, and no extreme is ever lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CAPACITY = 1024


class Points(NamedTuple):
    """One row per bucket that has points, in order of `x`."""

    x: np.ndarray
    """The mean position of the bucket's points."""
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Series:
    """A downsampled curve over `x` (steps, or seconds since the epoch), added in approximate order."""

    def __init__(self, width: float = 1.0, capacity: int = CAPACITY) -> None:
        """`width`: initial range of x in one bucket."""
        assert capacity % 2 == 0
        self.width = width
        self._origin: float | None = None
        self._count = np.zeros(capacity, np.int64)
        self._sum_x = np.zeros(capacity)
        self._last_x = np.full(capacity, -np.inf)
        self._sum = np.zeros(capacity)
        self._low = np.full(capacity, np.inf)
        self._high = np.full(capacity, -np.inf)

    def add(self, xs: Sequence[float] | np.ndarray, ys: Sequence[float] | np.ndarray) -> None:
        """Skips values that are not finite; points before the first one are added to the first bucket."""
        x, y = np.asarray(xs, np.float64), np.asarray(ys, np.float64)
        finite = np.isfinite(x) & np.isfinite(y)
        x, y = x[finite], y[finite]
        if not len(x):
            return
        if self._origin is None:
            self._origin = float(np.floor(x[0] / self.width) * self.width)
        while x.max() - self._origin >= self.width * len(self._count):
            self._join_neighbours()
        bucket = np.maximum((x - self._origin) / self.width, 0.0).astype(np.int64)
        size = len(self._count)
        self._count += np.bincount(bucket, minlength=size)
        self._sum_x += np.bincount(bucket, x - self._origin, size)
        self._sum += np.bincount(bucket, y, size)
        np.maximum.at(self._last_x, bucket, x)
        np.minimum.at(self._low, bucket, y)
        np.maximum.at(self._high, bucket, y)

    def forget_from(self, x: float) -> None:
        """Clears every bucket with a point at `x` or beyond: those steps will be repeated."""
        gone = self._last_x >= x
        for sums in (self._count, self._sum_x, self._sum):
            sums[gone] = 0
        self._low[gone], self._high[gone], self._last_x[gone] = np.inf, -np.inf, -np.inf

    def points(self, at_most: int = CAPACITY) -> Points:
        """The curve in at most that many points."""
        used = int(np.flatnonzero(self._count)[-1]) + 1 if self._count.any() else 0
        per_row = max(1, -(-used // at_most))
        count = _rows(self._count[:used], per_row, 0).sum(1)
        filled = count > 0
        count = count[filled]
        return Points(
            x=_rows(self._sum_x[:used], per_row, 0.0).sum(1)[filled] / count + (self._origin or 0.0),
            mean=_rows(self._sum[:used], per_row, 0.0).sum(1)[filled] / count,
            low=_rows(self._low[:used], per_row, np.inf).min(1)[filled],
            high=_rows(self._high[:used], per_row, -np.inf).max(1)[filled],
        )

    def mean_since(self, x: float = -np.inf) -> float | None:
        """The mean of all points in buckets that begin at `x` or later; None when there are none."""
        first = 0 if self._origin is None or x <= self._origin else int(np.ceil((x - self._origin) / self.width))
        count = self._count[first:].sum()
        return float(self._sum[first:].sum() / count) if count else None

    def _join_neighbours(self) -> None:
        self.width *= 2
        half = len(self._count) // 2
        for sums in (self._count, self._sum_x, self._sum):
            sums[:half] = sums.reshape(-1, 2).sum(1)
            sums[half:] = 0
        self._low[:half], self._low[half:] = self._low.reshape(-1, 2).min(1), np.inf
        self._last_x[:half], self._last_x[half:] = self._last_x.reshape(-1, 2).max(1), -np.inf
        self._high[:half], self._high[half:] = self._high.reshape(-1, 2).max(1), -np.inf

    def __repr__(self) -> str:
        return f"<Series of {self._count.sum()} points in buckets of {self.width:g}>"


def _rows(values: np.ndarray, per_row: int, padding: float) -> np.ndarray:
    missing = -len(values) % per_row
    return np.pad(values, (0, missing), constant_values=padding).reshape(-1, per_row)


def rates(points: Points) -> Points:
    """Growth of a counter per unit of x, from each point to the next. A counter that fell was reset: growth 0."""
    if len(points.x) < 2:
        return Points(*(np.empty(0) for _ in Points._fields))
    growth = np.maximum(np.diff(points.high), 0.0) / np.maximum(np.diff(points.x), 1e-9)
    return Points(points.x[1:], growth, growth, growth)
