"""Who may be on which device, and every way that can change: two tables, and the structs they govern.

A *seat* is one stay of one generation worker; a *hold* is what a request above generation becomes. Devices are given on
only in the step to `gone`, and that step is taken on proof (`finished`, `proved`, `lost`) or, when a process that was
fenced gives no sign, at the end of the fence.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.errors import InvalidTransition
from penstock.records.ids import MemberId, PipelineName
from penstock.records.pool import DeviceId, OrderNumber, Priority, SeatId

SeatState = Literal["planned", "waking", "serving", "leaving", "fenced", "gone"]
SeatInput = Literal["cleared", "finished", "proved", "failed", "recalled", "overdue", "evicted", "lost"]

SEAT_TABLE: dict[tuple[SeatState, SeatInput], SeatState] = {
    ("planned", "cleared"): "waking",
    ("planned", "recalled"): "gone",
    ("planned", "evicted"): "gone",
    ("planned", "lost"): "gone",
    ("waking", "finished"): "serving",
    ("waking", "proved"): "gone",
    ("waking", "failed"): "leaving",
    ("waking", "recalled"): "leaving",
    ("waking", "overdue"): "leaving",
    ("waking", "evicted"): "fenced",
    ("waking", "lost"): "gone",
    ("serving", "recalled"): "leaving",
    ("serving", "evicted"): "fenced",
    ("serving", "lost"): "gone",
    ("leaving", "finished"): "gone",
    ("leaving", "proved"): "gone",
    ("leaving", "failed"): "fenced",
    ("leaving", "overdue"): "fenced",
    ("leaving", "evicted"): "fenced",
    ("leaving", "lost"): "gone",
    ("fenced", "overdue"): "gone",
    ("fenced", "lost"): "gone",
}
"""`finished` answers the present order; `proved` is a failure after which the worker verifiably holds nothing."""

HoldState = Literal["waiting", "assigned", "held", "fenced", "gone"]
HoldInput = Literal["promised", "withdrawn", "cleared", "released", "ended", "evicted", "overdue", "lost"]

HOLD_TABLE: dict[tuple[HoldState, HoldInput], HoldState] = {
    ("waiting", "promised"): "assigned",
    ("waiting", "ended"): "gone",
    ("waiting", "evicted"): "gone",
    ("waiting", "lost"): "gone",
    ("assigned", "cleared"): "held",
    ("assigned", "withdrawn"): "waiting",
    ("assigned", "ended"): "gone",
    ("assigned", "evicted"): "gone",
    ("assigned", "lost"): "gone",
    ("held", "released"): "gone",
    ("held", "evicted"): "fenced",
    ("held", "lost"): "gone",
    ("fenced", "released"): "gone",
    ("fenced", "overdue"): "gone",
    ("fenced", "lost"): "gone",
}
"""`withdrawn` is a promise that passes to a higher class; `ended` is a cancelled or timed-out request, or a closed
pipeline. Neither takes what is held."""


class Seat(msgspec.Struct):
    """One stay of one worker on one bundle."""

    seat: SeatId
    pipeline: PipelineName
    member: MemberId
    devices: tuple[DeviceId, ...]
    state: SeatState
    since: float
    """When it came into its present state: a worker's turn runs from when it began to serve."""
    order: OrderNumber = OrderNumber(0)
    deadline: float | None = None
    abort: bool = False
    reason: str = ""

    @property
    def stays(self) -> bool:
        """Counts as a worker its pipeline has or will have."""
        return self.state in ("planned", "waking", "serving")

    def step(self, what: SeatInput) -> SeatState:
        following = SEAT_TABLE.get((self.state, what))
        if following is None:
            raise InvalidTransition(f"seat {self.seat} of {self.pipeline} is {self.state}: it cannot be told '{what}'")
        self.state = following
        return following


class Hold(msgspec.Struct):
    """A request above generation, and what it was given."""

    hold: int
    """Counted up over the pool: the order of arrival."""
    pipeline: PipelineName
    member: MemberId
    request: int
    priority: Priority
    among: tuple[DeviceId, ...]
    count: int
    since: float
    """When it was asked for, and from then on when it was granted."""
    deadline: float | None
    devices: tuple[DeviceId, ...] = ()
    state: HoldState = "waiting"

    def step(self, what: HoldInput) -> HoldState:
        following = HOLD_TABLE.get((self.state, what))
        if following is None:
            raise InvalidTransition(
                f"request {self.request} of {self.member} is {self.state}: it cannot be told '{what}'"
            )
        self.state = following
        return following


class Member(msgspec.Struct):
    """One process known to the pool, for as long as it is a member of its pipeline."""

    member: MemberId
    pipeline: PipelineName
    evicted: bool = False
    """No member any more: it is given nothing, and is forgotten when its end is certain."""
    worker: bool = False
    bound: tuple[DeviceId, ...] = ()
    last_devices: tuple[DeviceId, ...] = ()
    last_request: int = -1
