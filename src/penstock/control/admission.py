"""How many samples may be leased, and whether any sample can still fill a step.

    capacity = (max_staleness + version + 1) * batch - (version * batch + in flight)

`version * batch` counts everything trained as full batches, so a step with a partial batch does not widen the bound. If
no more than `capacity` is issued and samples are trained in order, each is trained at most `max_staleness` steps after
the version it was leased under. Samples that others overtake are checked at delivery and at dispatch. Members of a
group that await a second lease count as in flight.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.control.ledger import Ledger
from penstock.records.ids import Version


class Admission:
    """Stateless rules over a ledger. `steps` is the length of the run; None: only the prompts bound it."""

    def __init__(self, ledger: Ledger, steps: int | None) -> None:
        self.ledger = ledger
        self.steps = steps

    def capacity(self) -> int:
        """Samples that may be issued beyond those in flight, whether or not prompts are left."""
        return max(0, self.bound() - self.ledger.in_flight - self.ledger.state.awaiting_count)

    def bound(self) -> int:
        """Samples that may be in flight at once."""
        ledger = self.ledger
        batch = ledger.groups_per_step * ledger.group_size
        bound = (ledger.max_staleness + 1) * batch
        if self.steps is not None:
            bound = min(bound, (self.steps - ledger.state.version) * batch)
        return bound

    def still_needed(self) -> bool:
        """Whether the run needs a further group before it can end, if no more groups are dropped."""
        ledger = self.ledger
        if not ledger.prompts_left:
            return False
        if self.steps is None:
            return True
        return (self.steps - ledger.state.version) * ledger.groups_per_step > ledger.live_groups

    @property
    def drained(self) -> bool:
        """Only complete groups are left, and no more can be issued."""
        return self.ledger.open_groups == 0 and not self.ledger.prompts_left

    @property
    def finished(self) -> bool:
        """No sample, buffered or in flight, can fill a further step."""
        if self.ledger.state.version == self.steps:
            return True
        return self.drained and self.ledger.live_groups == 0

    def batch_is_ready(self) -> bool:
        """Whether the next step has a full batch, or all groups of a last, partial batch."""
        ledger = self.ledger
        if self.steps is not None and ledger.state.next_step >= self.steps:
            return False
        if ledger.ready_groups >= ledger.groups_per_step:
            return True
        nothing_ahead = ledger.state.next_step == ledger.state.version
        return nothing_ahead and self.drained and ledger.ready_groups > 0

    def outstanding(self) -> int:
        """Samples that workers hold or could lease now."""
        table = self.ledger.state
        fresh = self.capacity() if self.ledger.prompts_left else 0
        return table.counts["leased"] + table.awaiting_count + fresh

    def can_lease(self) -> bool:
        """Whether a worker with the newest weights would be granted a lease now."""
        ledger = self.ledger
        return ledger.state.awaiting_count > 0 or (ledger.prompts_left and self.capacity() >= ledger.group_size)

    def share(self, asked: int, *, held: int, workers: int, call: int = 0) -> int:
        """Samples granted to a worker that requests `asked`, holds `held` and generates `call` at a time."""
        ledger = self.ledger
        room = part_of(self.bound(), ledger.groups_per_step, ledger.group_size, workers, call) - held
        if room < min(asked, ledger.group_size):  # only single members of open groups still fit
            return max(0, min(room, ledger.state.awaiting_count))
        return min(asked, room)

    def min_version_awaiting(self) -> Version:
        """The oldest weights that are allowed for a group that is already open."""
        return Version(max(0, self.ledger.oldest_allowed))

    def min_version_fresh(self) -> Version:
        """The oldest weights that are allowed for a new group, which is trained after all groups in flight.

        This may be the version of a step just acknowledged whose weights are not published yet. Then no lease is
        granted: samples of older weights would be outdated when they are trained.
        """
        ledger = self.ledger
        expected_step = ledger.state.version + ledger.live_groups // ledger.groups_per_step
        return Version(max(0, expected_step - ledger.max_staleness))


def part_of(bound: int, groups_per_step: int, group_size: int, workers: int, call: int = 0) -> int:
    """Samples that one of `workers` may hold, of `bound` in flight: a worker that hangs or is slow cannot hold all.

    An equal part, in whole groups, at least one. Also in whole calls, since a call with half of its samples takes about
    as long. If the part is less than one call, it becomes one call, as long as the others can still fill a step.
    """
    part = max(1, -(-bound // (workers * group_size))) * group_size
    call = call // group_size * group_size
    if not call:
        return part
    return part // call * call or max(part, min(call, bound - groups_per_step * group_size))


class ThrottleState(msgspec.Struct):
    engaged_at: float | None = None
    reported_at: float = 0.0
    engagements: int = 0
    engaged_s: float = 0.0
    """Total of the engagements that ended."""


class ThrottleChange(msgspec.Struct, frozen=True):
    """One log line: the throttle engaged, is still engaged, or was released after `lasted_s`."""

    what: Literal["engaged", "still engaged", "released"]
    lasted_s: float

    def line(self, ledger: Ledger) -> str:
        counts = ledger.state.counts
        held = ", ".join(f"{counts[name]} {name}" for name in ("leased", "delivered", "buffered", "dispatched"))
        lasted = f" after {self.lasted_s:.1f} s" if self.lasted_s else ""
        return f"throttle {self.what}{lasted} at step {ledger.state.version}: {held}"


def watch_throttle(state: ThrottleState, *, closed: bool, now: float, report_every_s: float) -> ThrottleChange | None:
    """Updates the throttle state; returns a change to log. Each engagement and each release is returned once."""
    if closed and state.engaged_at is None:
        state.engaged_at = state.reported_at = now
        state.engagements += 1
        return ThrottleChange("engaged", 0.0)
    if closed and state.engaged_at is not None and now - state.reported_at >= report_every_s:
        state.reported_at = now
        return ThrottleChange("still engaged", now - state.engaged_at)
    if not closed and state.engaged_at is not None:
        lasted_s = now - state.engaged_at
        state.engaged_at = None
        state.engaged_s += lasted_s
        return ThrottleChange("released", lasted_s)
    return None
