"""Traces and counts of a generation loop, for a single process or for one of several ranks."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable

from penstock.rollout import trace
from penstock.rollout.flow import Stage
from penstock.rollout.holdings import OUTPUT, QUEUED, Holdings
from penstock.runtime.clock import monotonic

logger = logging.getLogger(__name__)

TRACES_KEPT = 512
SAMPLED_EVERY_S = 1.0


class Tracing:
    """Counts since the start, and the newest traces. Thread-safe."""

    def __init__(self, traced: Callable[[trace.Trace], None] = lambda event: None) -> None:
        self.traces: deque[trace.Trace] = deque(maxlen=TRACES_KEPT)
        self._traced = traced
        self._counts: dict[str, float] = {}
        self._counting = threading.Lock()
        self._branches_recorded: Counter[str] = Counter()
        self._sampled_at = 0.0

    def count(self, name: str, amount: float) -> None:
        with self._counting:
            self._counts[name] = self._counts.get(name, 0.0) + amount

    def counts(self) -> dict[str, float]:
        with self._counting:
            return dict(self._counts)

    def record(self, event: trace.Trace) -> None:
        self.traces.append(event)
        self._traced(event)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", trace.as_line(event))

    def sample(self, branches: Counter[str], queue: Callable[[float], trace.QueueSampled]) -> bool:
        """Records traces A and B about once a second; returns True when it did."""
        now = monotonic()
        if now - self._sampled_at < SAMPLED_EVERY_S:
            return False
        self._sampled_at = now
        self.record(trace.BranchesTaken(now, dict(branches - self._branches_recorded)))
        self._branches_recorded = branches.copy()
        self.record(queue(now))
        return True


def depth_gauges(held: Holdings, generating: int) -> dict[str, float]:
    """Trace B as gauges."""
    return {
        "line_samples": float(held.samples(*QUEUED)),
        "output_samples": float(held.samples(*OUTPUT)),
        "scoring_samples": float(held.samples(Stage.SCORING)),
        "held_bytes": float(held.size_bytes),
        "generating_batches": float(generating),
    }


def branch_counts(branches: Counter[str]) -> dict[str, float]:
    """Trace A as gauges."""
    return {f"branch_{name}": float(count) for name, count in branches.items()}
