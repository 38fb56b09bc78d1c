"""Time as a thing that is passed in: seconds since the epoch that never run backwards."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Anything that can say what time it is. Values are comparable across processes of one run."""

    def now(self) -> float:
        """Seconds since the epoch; never smaller than what the same clock said before."""
        ...


class SystemClock:
    """Wall time at the start, monotonic time from there on: stepping the machine's clock does not move it.

    `not_before` keeps a restarted process from going back behind times that are already on record.
    """

    def __init__(self, *, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()

    def now(self) -> float:
        return self._offset + time.monotonic()


class ManualClock:
    """A clock that moves when told: an hour of timeouts passes in a microsecond."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        if seconds < 0:
            raise ValueError(f"a clock never runs backwards, asked to advance by {seconds} s")
        self._now += seconds
        return self._now
