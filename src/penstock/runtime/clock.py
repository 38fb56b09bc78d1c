"""Injectable time: seconds since the epoch that never run backwards.

Loops that must also run in simulation take `monotonic` and `sleep` from here instead of from `time`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol


class TimeSource(Protocol):
    """The functions of the module `time` that this package uses."""

    def time(self) -> float: ...
    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


_source: TimeSource = time


def monotonic() -> float:
    """`time.monotonic`, or virtual time in a simulation."""
    return _source.monotonic()


def sleep(seconds: float) -> None:
    """`time.sleep`, or virtual time in a simulation. Not on a loop."""
    _source.sleep(seconds)


def wait_for(condition: threading.Condition, predicate: Callable[[], bool], timeout_s: float | None = None) -> bool:
    """`condition.wait_for`, or the same in virtual time, where the thread of the loop does not wait."""
    if _source is time:
        return condition.wait_for(predicate, timeout_s)
    if not predicate() and _source.may_block():  # type: ignore[attr-defined]
        condition.release()
        try:
            _source.sleep_until(predicate, timeout_s)  # type: ignore[attr-defined]
        finally:
            condition.acquire()
    return predicate()


@contextmanager
def use_time_source(source: TimeSource) -> Iterator[None]:
    """All time of this process comes from `source` while the body runs."""
    global _source
    before, _source = _source, source
    try:
        yield
    finally:
        _source = before


class Clock(Protocol):
    """A source of time. Values are comparable across processes of one run."""

    def now(self) -> float:
        """Seconds since the epoch; never smaller than an earlier value of the same clock."""
        ...


class SystemClock:
    """Wall time at the start, monotonic time after that: a step of the machine's clock has no effect.

    `not_before` keeps a restarted process from returning times before those already recorded.
    """

    def __init__(self, *, not_before: float = 0.0) -> None:
        self._offset = max(_source.time(), not_before) - monotonic()

    def now(self) -> float:
        return self._offset + monotonic()


class ManualClock:
    """A clock that moves only by `advance`: an hour of timeouts passes in a microsecond."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        if seconds < 0:
            raise ValueError(f"a clock never runs backwards, advance got {seconds} s")
        self._now += seconds
        return self._now
