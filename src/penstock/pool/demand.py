"""Demand is state: declared before work, kept until the work is done, derived from what was completed."""

from __future__ import annotations

import msgspec

from penstock.errors import LocalProtocolError

_COARSE = 50
"""Reports are taken in at 2 % steps of the round, finer towards its end."""


class Demand(msgspec.Struct):
    """What one pipeline still wants generated. Counts are samples, everywhere."""

    round: int = -1
    target: int = 0
    completed: int = 0
    heard_at: float = 0.0
    """The last sign of progress, or the moment service began."""
    lapsed: bool = False
    """Served but silent for a whole demand lease: it keeps its place in the queue, but is worth one worker only."""

    @property
    def remaining(self) -> int:
        return max(0, self.target - self.completed)

    def declare(self, round: int, target: int, now: float) -> bool:
        """Open a round. The same round again is a no-op; False if nothing changed."""
        if target <= 0:
            raise LocalProtocolError(
                f"demand for round {round} has no estimate (target {target}): declare how many samples it will need"
            )
        if round < self.round:
            raise LocalProtocolError(f"demand for round {round} declared after round {self.round}")
        if (round, target) == (self.round, self.target):
            return False
        if round > self.round:
            self.completed = 0
        self.round, self.target, self.heard_at, self.lapsed = round, target, now, False
        return True

    def report(self, round: int, completed: int, now: float) -> bool:
        """Take in a completed count; False if it is old or changes too little to matter."""
        if round > self.round:
            raise LocalProtocolError(
                f"progress of round {round} reported, but only round {self.round} was declared: declare demand first"
            )
        if round < self.round or completed == self.completed:
            return False
        completed = min(completed, self.target)
        step = min(self.target // _COARSE, self.remaining // 10)
        if abs(completed - self.completed) < step and completed < self.target and not self.lapsed:
            return False
        self.completed, self.heard_at, self.lapsed = completed, now, False
        return True

    def useful_bundles(self, *, concurrency: int, move_cost: int) -> int:
        """The most workers worth having: each should be busy at once, and repay its waking."""
        if self.remaining == 0:
            return 0
        if self.lapsed:
            return 1
        busy = -(-self.remaining // concurrency)
        paying = self.remaining // move_cost if move_cost else busy
        return max(1, min(busy, paying))
