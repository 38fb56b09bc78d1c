"""A blocked loop is caught in the act, by name."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import pytest

from penstock.runtime.lag import LagMonitor, Stall
from penstock.runtime.settings import LagSection
from penstock.runtime.tasks import Tasks


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the monitor offers nothing to await
            await asyncio.sleep(0.001)


def a_function_that_blocks_the_loop(until: threading.Event) -> None:
    until.wait(20)


async def test_a_stall_names_the_blocking_function(caplog: pytest.LogCaptureFixture) -> None:
    caught = threading.Event()

    def on_stall(stall: Stall) -> None:  # on a busy machine the loop may stall elsewhere too
        if "a_function_that_blocks_the_loop" in stall.where:
            caught.set()

    monitor = LagMonitor("test", LagSection(period_s=0.01, stall_s=0.05), on_stall=on_stall)
    async with Tasks() as tasks:
        tasks.spawn("lag", monitor.run())
        await eventually(lambda: monitor.report().samples >= 3)
        a_function_that_blocks_the_loop(caught)
        await eventually(lambda: monitor.report().max_s >= 0.04)
        tasks.cancel()
    assert caught.is_set()
    (stall,) = [one for one in monitor.stalls if "a_function_that_blocks_the_loop" in one.where]
    assert "test_runtime_lag_stall.py" in stall.where
    assert "test_a_stall_names_the_blocking_function" in stall.stack
    assert stall.blocked_s >= 0.05
    warnings = [r.getMessage() for r in caplog.records if "a_function_that_blocks_the_loop" in r.getMessage()]
    assert len(warnings) == 1
    assert "\n" not in warnings[0]
    assert monitor.report().wait_p99_s > 0.03


async def test_one_stall_is_reported_once_however_long_it_lasts() -> None:
    first = threading.Event()
    stalls: list[Stall] = []

    def on_stall(stall: Stall) -> None:
        stalls.append(stall)
        first.set()

    monitor = LagMonitor("test", LagSection(period_s=0.01, stall_s=0.02), on_stall=on_stall)
    async with Tasks() as tasks:
        tasks.spawn("lag", monitor.run())
        await eventually(lambda: monitor.report().samples >= 3)
        stalls.clear()
        first.clear()
        assert first.wait(20)
        end = time.monotonic() + 0.2  # ten thresholds more of the same stall
        while time.monotonic() < end:
            pass
        assert len(stalls) == 1
        tasks.cancel()


async def test_high_lag_is_one_warning_line(caplog: pytest.LogCaptureFixture) -> None:
    monitor = LagMonitor("slow", LagSection(period_s=0.001, warn_p99_s=1e-9, warn_every_s=1000.0))
    with caplog.at_level(logging.WARNING):
        async with Tasks() as tasks:
            tasks.spawn("lag", monitor.run())
            await eventually(lambda: monitor.report().samples >= 350)
            tasks.cancel()
    late = [r.getMessage() for r in caplog.records if "is late" in r.getMessage()]
    assert len(late) == 1
    assert "p99" in late[0]


async def test_the_watchdog_thread_ends_with_the_monitor() -> None:
    monitor = LagMonitor("ends", LagSection(period_s=0.01))
    async with Tasks() as tasks:
        tasks.spawn("lag", monitor.run())
        await eventually(lambda: monitor.report().samples >= 2)
        assert "lag-ends" in {thread.name for thread in threading.enumerate()}
        tasks.cancel()
    assert "lag-ends" not in {thread.name for thread in threading.enumerate()}
