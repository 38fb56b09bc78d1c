"""What a generation loop keeps of its traces and counts: the same for one process and for a rank of several."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable

from penstock.rollout import trace
from penstock.rollout.flow import Stage
from penstock.rollout.holdings import LINE, OUTPUT, Holdings
from penstock.runtime.clock import monotonic

logger = logging.getLogger(__name__)

TRACES_KEPT = 512
SAMPLED_EVERY_S = 1.0


class Tracing:
    """Counts since the start and the newest traces. Safe to call from any thread."""

    def __init__(self, traced: Callable[[trace.Trace], None] = lambda told: None) -> None:
        self.traces: deque[trace.Trace] = deque(maxlen=TRACES_KEPT)
        self._traced = traced
        self._counts: dict[str, float] = {}
        self._counting = threading.Lock()
        self._branches_told: Counter[str] = Counter()
        self._sampled_at = 0.0

    def count(self, name: str, amount: float) -> None:
        with self._counting:
            self._counts[name] = self._counts.get(name, 0.0) + amount

    def counts(self) -> dict[str, float]:
        with self._counting:
            return dict(self._counts)

    def tell(self, told: trace.Trace) -> None:
        self.traces.append(told)
        self._traced(told)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("%s", trace.as_line(told))

    def sample(self, branches: Counter[str], queue: Callable[[float], trace.QueueSampled]) -> bool:
        """Traces A and B, about once a second; True when they were taken."""
        now = monotonic()
        if now - self._sampled_at < SAMPLED_EVERY_S:
            return False
        self._sampled_at = now
        self.tell(trace.BranchesTaken(now, dict(branches - self._branches_told)))
        self._branches_told = branches.copy()
        self.tell(queue(now))
        return True


def depth_gauges(held: Holdings, generating: int) -> dict[str, float]:
    """Trace B as gauges."""
    return {
        "line_samples": float(held.samples(*LINE)),
        "output_samples": float(held.samples(*OUTPUT)),
        "scoring_samples": float(held.samples(Stage.SCORING)),
        "held_bytes": float(held.size_bytes),
        "generating_batches": float(generating),
    }


def branch_counts(branches: Counter[str]) -> dict[str, float]:
    """Trace A as gauges."""
    return {f"branch_{name}": float(count) for name, count in branches.items()}
