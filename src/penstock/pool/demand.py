"""Demand is state: the samples that a pipeline's ledger still needs, and the measured pace of its workers.

Progress is not reported to the pool. The ledger counts remaining and completed samples, so demand exists before the
first sample is dispatched, cannot be lost with a message, and needs no hook that could be missing.
"""

from __future__ import annotations

import msgspec

from penstock.errors import LocalProtocolError

_COARSE = 50
"""Counts are applied in steps of 2 % of the round, finer towards its end."""
_KEPT = 0.95
"""Weight of the past in the measured pace, per applied count: about the last twenty matter."""


class Demand(msgspec.Struct):
    """Samples that one pipeline still needs. All counts are samples."""

    remaining: int = 0
    completed: int = 0
    """Since the pipeline began; it never falls."""
    most: int = 0
    """`remaining` when it last grew: the size of the current round."""
    counted_at: float = 0.0
    heard_at: float = 0.0
    """The time of the last progress, or of the start of service."""
    lapsed: bool = False
    """Served, but nothing completed for a demand lease: it keeps its place in the queue, but gets one worker only."""
    pace_samples: float = 0.0
    pace_worker_s: float = 0.0

    @property
    def pace(self) -> float:
        """Recent samples per second of one worker with work; 0 while not measured."""
        return self.pace_samples / self.pace_worker_s if self.pace_worker_s else 0.0

    def count(self, remaining: int, completed: int, workers: int, now: float) -> bool:
        """Applies a count, made while `workers` served; False if it changes too little to matter."""
        if remaining < 0 or completed < self.completed:
            raise LocalProtocolError(
                f"a count of {remaining} samples to generate and {completed} completed after {self.completed}: the "
                f"first cannot be negative, the second cannot fall; count both from the same ledger"
            )
        done = completed - self.completed
        fewer = self.remaining - remaining
        if fewer == done == 0:
            return False
        step = min(self.most // _COARSE, self.remaining // 10)
        if 0 <= fewer < step and done < max(1, step) and remaining and not self.lapsed:
            return False
        if self.remaining and workers:
            self.pace_samples = self.pace_samples * _KEPT + done
            self.pace_worker_s = self.pace_worker_s * _KEPT + workers * (now - max(self.counted_at, self.heard_at))
        if fewer < 0:
            self.most = remaining
        if done or not self.remaining:
            self.heard_at, self.lapsed = now, False
        self.remaining, self.completed, self.counted_at = remaining, completed, now
        return True

    def useful_bundles(self, concurrency: int) -> int:
        """The most workers that would all be busy."""
        return min(1, self.remaining) if self.lapsed else -(-self.remaining // concurrency)
