"""The occupants of devices and all their transitions: two tables, and the structs they apply to.

A *seat* is one generation worker on one bundle; a *hold* is a request above generation, with its devices. Devices are
reassigned only in the step to `gone`. That step is verified (`finished`, `released`, `lost`) or, when a fenced process
does not answer, taken at the end of the fence.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.errors import InvalidTransition
from penstock.records.ids import MemberId, PipelineName
from penstock.records.pool import DeviceId, OrderNumber, Priority, SeatId

SeatState = Literal["planned", "waking", "serving", "leaving", "fenced", "gone"]
SeatInput = Literal["cleared", "finished", "released", "failed", "recalled", "overdue", "evicted", "lost"]

SEAT_TABLE: dict[tuple[SeatState, SeatInput], SeatState] = {
    ("planned", "cleared"): "waking",
    ("planned", "recalled"): "gone",
    ("planned", "evicted"): "gone",
    ("planned", "lost"): "gone",
    ("waking", "finished"): "serving",
    ("waking", "released"): "gone",
    ("waking", "failed"): "leaving",
    ("waking", "recalled"): "leaving",
    ("waking", "overdue"): "leaving",
    ("waking", "evicted"): "fenced",
    ("waking", "lost"): "gone",
    ("serving", "recalled"): "leaving",
    ("serving", "evicted"): "fenced",
    ("serving", "lost"): "gone",
    ("leaving", "finished"): "gone",
    ("leaving", "released"): "gone",
    ("leaving", "failed"): "fenced",
    ("leaving", "overdue"): "fenced",
    ("leaving", "evicted"): "fenced",
    ("leaving", "lost"): "gone",
    ("fenced", "overdue"): "gone",
    ("fenced", "lost"): "gone",
}
"""`finished` completes the current order; `released` is a failure after which the worker verifiably holds nothing."""

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
    """One worker on one bundle."""

    seat: SeatId
    pipeline: PipelineName
    member: MemberId
    devices: tuple[DeviceId, ...]
    state: SeatState
    since: float
    """When it entered its current state: a worker's turn starts when it begins to serve."""
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
            raise InvalidTransition(f"seat {self.seat} of {self.pipeline} is {self.state}: '{what}' is not allowed")
        self.state = following
        return following


class Hold(msgspec.Struct):
    """A request above generation, with its devices."""

    hold: int
    """Numbered across the pool, in the order of arrival."""
    pipeline: PipelineName
    member: MemberId
    request: int
    priority: Priority
    among: tuple[DeviceId, ...]
    count: int
    since: float
    """When it was requested; once granted, when it was granted."""
    deadline: float | None
    devices: tuple[DeviceId, ...] = ()
    state: HoldState = "waiting"

    def step(self, what: HoldInput) -> HoldState:
        following = HOLD_TABLE.get((self.state, what))
        if following is None:
            raise InvalidTransition(f"request {self.request} of {self.member} is {self.state}: '{what}' is not allowed")
        self.state = following
        return following


class Member(msgspec.Struct):
    """One registered process."""

    member: MemberId
    pipeline: PipelineName
    evicted: bool = False
    """It gets no more devices, and is removed when its end is certain."""
    worker: bool = False
    bound: tuple[DeviceId, ...] = ()
    last_devices: tuple[DeviceId, ...] = ()
    last_request: int = -1
