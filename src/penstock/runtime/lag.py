"""The lag of the event loop, and the line of code that caused it.

A probe is due every period. Two figures describe the last `window` probes:

* the *lag*: how late the loop was at each wake-up (p50, p90, p99, max);
* the *wait*: how long an event that arrives at a random time would have waited (p99). A stall of one second is one
  wake-up among hundreds, but delays every event that arrives during that second: every probe that was due during the
  stall counts, with the part of the stall that was left.

A blocked loop cannot report where it is blocked: a watchdog thread reads its stack.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from penstock.runtime.garbage import freeze_existing_objects
from penstock.runtime.settings import LagSection

logger = logging.getLogger(__name__)

FRAMES_IN_LINE = 4
KEPT_STALLS = 16


@dataclass(frozen=True)
class LagReport:
    """Seconds, over the window."""

    samples: int
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float
    wait_p99_s: float
    worst_s: float
    """Maximum since the start, not only over the window."""

    def values(self, prefix: str = "loop_lag_") -> dict[str, float]:
        """By metric name, for gauges and `ReportMetrics`."""
        named = dataclasses.asdict(self)
        del named["samples"]
        return {f"{prefix}{name}": value for name, value in named.items()}


class LagStatistics:
    """The calculation, without a loop."""

    def __init__(self, period_s: float, window: int) -> None:
        self.period_s = period_s
        self._lags: deque[float] = deque(maxlen=window)
        self._waits: deque[float] = deque(maxlen=window)
        self._worst_s = 0.0

    def observe(self, late_s: float) -> None:
        """The loop woke up `late_s` after a probe was due."""
        late_s = max(0.0, late_s)
        self._worst_s = max(self._worst_s, late_s)
        self._lags.append(late_s)
        missed = min(int(late_s / self.period_s), (self._waits.maxlen or 1) - 1)
        self._waits.extend(late_s - number * self.period_s for number in range(missed + 1))

    def report(self) -> LagReport:
        lags, waits = sorted(self._lags), sorted(self._waits)
        return LagReport(
            samples=len(lags),
            p50_s=quantile(lags, 0.50),
            p90_s=quantile(lags, 0.90),
            p99_s=quantile(lags, 0.99),
            max_s=lags[-1] if lags else 0.0,
            wait_p99_s=quantile(waits, 0.99),
            worst_s=self._worst_s,
        )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; 0 without values."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


@dataclass(frozen=True)
class Stall:
    """Where the loop was blocked."""

    blocked_s: float
    """Until the stack was read; the stall lasted at least this long."""
    where: str
    """The innermost frames on one line, the blocking call first."""
    stack: str
    """The whole stack, outermost call first."""


class LagMonitor:
    """Probes the running loop, warns in one line, and names the code that caused a stall. At 10 Hz it costs less than a
    thousandth of a core.
    """

    def __init__(
        self,
        name: str = "this process",
        settings: LagSection = LagSection(),
        *,
        on_stall: Callable[[Stall], None] | None = None,
    ) -> None:
        """`on_stall` is called in the watchdog thread, while the loop is still blocked."""
        self.name = name
        self.statistics = LagStatistics(settings.period_s, settings.window)
        self.stalls: deque[Stall] = deque(maxlen=KEPT_STALLS)
        self.stall_count = 0
        self._settings = settings
        self._on_stall = on_stall
        self._loop_thread = 0
        self._due = 0.0
        self._stopped = threading.Event()

    def report(self) -> LagReport:
        return self.statistics.report()

    async def run(self) -> None:
        """Probes until cancelled. Call after start-up: it first excludes existing objects from garbage collection."""
        freeze_existing_objects()
        self._loop_thread = threading.get_ident()
        self._stopped.clear()
        self._due = time.monotonic() + self.statistics.period_s
        watchdog = threading.Thread(target=self._watch, name=f"lag-{self.name}", daemon=True)
        watchdog.start()
        quiet_until = 0.0
        try:
            for probe in itertools.count(1):
                await asyncio.sleep(max(0.0, self._due - time.monotonic()))
                now = time.monotonic()
                self.statistics.observe(now - self._due)
                # Probes that were due during a stall are already counted: continue with the next one.
                period_s = self.statistics.period_s
                self._due += period_s * (1 + max(0, int((now - self._due) / period_s)))
                if probe % 100 == 0 and now >= quiet_until and self._warn():
                    quiet_until = now + self._settings.warn_every_s
        finally:
            self._stopped.set()
            watchdog.join(1.0)

    def _warn(self) -> bool:
        report = self.report()
        if report.p99_s < self._settings.warn_p99_s:
            return False
        logger.warning(
            "event loop of %s is late: p50 %.0f ms, p99 %.0f ms, max %.0f ms over %d probes; last stall: %s",
            self.name,
            report.p50_s * 1e3,
            report.p99_s * 1e3,
            report.max_s * 1e3,
            report.samples,
            self.stalls[-1].where if self.stalls else f"none above {self._settings.stall_s:g} s",
        )
        return True

    def _watch(self) -> None:
        """Consumes: the time at which the next probe is due. Produces: one `Stall` for each overdue probe."""
        seen_due = 0.0
        while True:
            due = self._due
            wait_s = due + self._settings.stall_s - time.monotonic()
            if wait_s <= 0 and due == seen_due:
                wait_s = self._settings.stall_s  # the same stall, which was already reported
            if wait_s > 0:
                if self._stopped.wait(wait_s):
                    return
                continue
            seen_due = due
            frame = sys._current_frames().get(self._loop_thread)
            if frame is None or self._due != due:  # the loop moved in the meantime
                continue
            stall = Stall(time.monotonic() - due, _where(frame), "".join(traceback.format_stack(frame)))
            del frame
            self.stalls.append(stall)
            self.stall_count += 1
            logger.warning("event loop of %s blocked for %.2f s in %s", self.name, stall.blocked_s, stall.where)
            logger.debug("its stack:\n%s", stall.stack)
            if self._on_stall is not None:
                self._on_stall(stall)

    def __repr__(self) -> str:
        return f"LagMonitor({self.name!r}, {self.report()}, stalls={self.stall_count})"


def _where(frame: FrameType) -> str:
    innermost = traceback.extract_stack(frame)[-FRAMES_IN_LINE:]
    return " < ".join(f"{entry.name} ({entry.filename}:{entry.lineno})" for entry in reversed(innermost))
