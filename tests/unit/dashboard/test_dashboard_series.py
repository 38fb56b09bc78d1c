"""Downsampling: bounded whatever comes, with right means and extremes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dashboard.series import Points, Series, rates
from profiles import examples


def test_few_points_are_kept_as_they_are():
    series = Series()
    series.add([0, 1, 2], [5.0, 7.0, 6.0])
    points = series.points()
    assert points.x.tolist() == [0, 1, 2]
    assert points.mean.tolist() == points.low.tolist() == points.high.tolist() == [5.0, 7.0, 6.0]


def test_a_long_curve_keeps_its_spike():
    series = Series(capacity=64)
    values = np.zeros(100_000)
    values[54_321] = 9.0
    for start in range(0, len(values), 1000):
        series.add(range(start, start + 1000), values[start : start + 1000].tolist())
    points = series.points(32)
    assert len(points.x) <= 32
    assert points.high.max() == 9.0
    spike = points.x[points.high.argmax()]
    assert abs(spike - 54_321) <= 100_000 / 32


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5000), st.floats(-1e6, 1e6)), min_size=1, max_size=300),
    st.integers(1, 40),
)
def test_nothing_is_lost_or_invented(pairs: list[tuple[int, float]], at_most: int):
    series = Series(capacity=16)
    for x, y in sorted(pairs):
        series.add([x], [y])
    points, values = series.points(at_most), [y for _, y in pairs]
    assert 1 <= len(points.x) <= min(16, at_most)
    assert points.low.min() == min(values)
    assert points.high.max() == max(values)
    assert (points.low <= points.mean + 1e-6).all()
    assert (points.mean <= points.high + 1e-6).all()
    assert series.mean_since() == pytest.approx(sum(values) / len(values), rel=1e-6, abs=1e-4)
    assert (np.diff(points.x) > 0).all()


def test_what_is_not_finite_is_passed_over():
    series = Series()
    series.add([0, 1, math.nan], [math.nan, 1.0, 2.0])
    assert series.points().mean.tolist() == [1.0]
    assert len(Series().points().x) == 0


def test_steps_that_are_done_again_replace_the_first_try():
    series = Series()
    series.add(range(10), [1.0] * 10)
    series.forget_from(6)
    series.add(range(6, 8), [2.0, 2.0])
    assert series.points().mean.tolist() == [1.0] * 6 + [2.0, 2.0]


def test_a_wide_bucket_of_earlier_points_stays():
    series = Series(capacity=4)
    series.add([0, 8, 10, 15], [1.0, 2.0, 3.0, 4.0])  # buckets of four
    series.forget_from(11)
    assert series.points().x.tolist() == [0.0, 9.0]
    series.forget_from(10)
    assert series.points().x.tolist() == [0.0]


def test_the_recent_mean_is_of_recent_points_only():
    series = Series()
    series.add([100.0, 101.0, 150.0, 151.0], [0.0, 0.0, 3.0, 5.0])
    assert series.mean_since(140.0) == 4.0
    assert series.mean_since(200.0) is None


def test_a_counter_that_starts_anew_never_falls():
    counted = np.array([0.0, 10.0, 0.0, 30.0])
    found = rates(Points(np.array([0.0, 2.0, 4.0, 6.0]), counted, counted, counted))
    assert found.mean.tolist() == [5.0, 0.0, 15.0]
    assert len(rates(Series().points()).x) == 0
