"""The arithmetic of loop lag, with no loop."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.lag import LagStatistics, quantile


def test_nothing_observed_is_all_zero() -> None:
    report = LagStatistics(0.1, 600).report()
    assert (report.samples, report.p50_s, report.max_s, report.wait_p99_s) == (0, 0.0, 0.0, 0.0)


def test_one_long_stall_hides_in_the_lag_but_not_in_the_wait() -> None:
    statistics = LagStatistics(period_s=0.1, window=600)
    for _ in range(500):
        statistics.observe(0.0)
    statistics.observe(2.0)
    report = statistics.report()
    assert report.p99_s == 0.0
    assert report.max_s == 2.0
    assert 1.4 < report.wait_p99_s < 1.6  # 21 of 521 probes waited; the worst hundredth begins near 1.5 s


def test_wait_counts_every_probe_that_fell_due_during_the_stall() -> None:
    statistics = LagStatistics(period_s=0.1, window=100)
    statistics.observe(0.35)
    assert list(statistics._waits) == pytest.approx([0.35, 0.25, 0.15, 0.05])


def test_a_stall_longer_than_the_window_is_bounded_by_it() -> None:
    statistics = LagStatistics(period_s=0.1, window=10)
    statistics.observe(3600.0)
    assert len(statistics._waits) == 10
    assert statistics.report().worst_s == 3600.0


def test_the_window_forgets_but_the_worst_is_kept() -> None:
    statistics = LagStatistics(0.1, window=5)
    statistics.observe(1.0)
    for _ in range(50):
        statistics.observe(0.001)
    assert statistics.report().max_s == 0.001
    assert statistics.report().worst_s == 1.0


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50), st.floats(0.01, 1))
def test_quantile_is_the_smallest_value_that_covers_its_share(values: list[float], share: float) -> None:
    ordered = sorted(values)
    found = quantile(ordered, share)
    assert sum(value <= found for value in ordered) >= share * len(ordered) - 1e-9
    assert sum(value < found for value in ordered) < share * len(ordered)


def test_metric_names() -> None:
    assert set(LagStatistics(0.1, 600).report().values("controller_lag_")) == {
        "controller_lag_p50_s",
        "controller_lag_p90_s",
        "controller_lag_p99_s",
        "controller_lag_max_s",
        "controller_lag_wait_p99_s",
        "controller_lag_worst_s",
    }
