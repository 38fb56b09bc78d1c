"""The state of the pool: pipelines, members, and for every device its occupant and its next owner."""

from __future__ import annotations

from collections import Counter

import msgspec

from penstock.errors import InvalidTransition
from penstock.pool.demand import Demand
from penstock.pool.events import PipelineOpened
from penstock.pool.lease import Hold, HoldInput, Member, Seat, SeatInput
from penstock.pool.settings import PoolSection
from penstock.records.ids import MemberId, PipelineName
from penstock.records.pool import DeviceId, SeatId, Topology


class Entry(msgspec.Struct):
    """One open pipeline."""

    shape: PipelineOpened
    demand: Demand
    waiting_since: float | None = None
    """Since when it has had work and no worker: the basis of ageing."""
    missed: bool = False
    """The warning that this wait exceeds the bound was logged."""
    short_since: float | None = None
    """Since when plans have left it below its share."""
    paused_since: float | None = None
    """Since when it has had no work, after it had some."""
    last_pause_s: float = 0.0
    home: tuple[DeviceId, ...] = ()
    """The devices it was last granted: it trains there."""
    wake_s: float = 0.0
    """Measured time to wake one of its workers."""
    alone: bool = True
    """No other pipeline generates on any of its devices."""
    benched_until: float = 0.0
    failures: int = 0
    """Failed moves in a row."""


class State(msgspec.Struct):
    """The whole state of the pool; everything else is derived from it."""

    topology: Topology | None = None
    settings: PoolSection | None = None
    """Used since the run was last started or resumed."""
    pipelines: dict[PipelineName, Entry] = {}
    members: dict[MemberId, Member] = {}
    seats: dict[SeatId, Seat] = {}
    holds: dict[int, Hold] = {}
    next_seat: int = 1
    next_order: int = 1
    next_hold: int = 1
    moves: int = 0
    failed_moves: int = 0
    refused_plans: int = 0


def new_incarnation(state: State, topology: Topology, settings: PoolSection) -> State:
    """The state of a started or resumed run: no members are left; only the counters continue."""
    gone = {"pipelines": {}, "members": {}, "seats": {}, "holds": {}}
    return msgspec.structs.replace(state, topology=topology, settings=settings, **gone)


def compare_shapes(state: State) -> None:
    """Records which pipelines compete, and makes pipelines with equal inference devices share one tuple.

    The planner distinguishes kinds by the identity of that tuple.
    """
    shared: dict[tuple[DeviceId, ...], tuple[DeviceId, ...]] = {}
    for entry in state.pipelines.values():
        inference = shared.setdefault(entry.shape.inference, entry.shape.inference)
        if inference is not entry.shape.inference:
            entry.shape = msgspec.structs.replace(entry.shape, inference=inference)
    users = Counter(id(entry.shape.inference) for entry in state.pipelines.values())
    pipelines_on = Counter(device for inference in shared for device in inference)
    for entry in state.pipelines.values():
        inference = entry.shape.inference
        entry.alone = users[id(inference)] == 1 and all(pipelines_on[device] == 1 for device in inference)


class DeviceTable:
    """Applies the seat and hold tables to the state and keeps the device index consistent with it."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.occupant: dict[DeviceId, Seat | Hold] = {}
        self.promised: dict[DeviceId, Seat | Hold] = {}
        self.seat_of: dict[MemberId, Seat] = {}
        self._serving = Counter(seat.pipeline for seat in state.seats.values() if seat.state == "serving")
        for claim in (*state.seats.values(), *state.holds.values()):
            self._index(claim)

    def add_seat(self, seat: Seat) -> None:
        self.state.seats[seat.seat] = seat
        self._index(seat)

    def add_hold(self, hold: Hold) -> None:
        self.state.holds[hold.hold] = hold

    def promise(self, hold: Hold, devices: tuple[DeviceId, ...]) -> None:
        hold.devices = devices
        hold.step("promised")
        self._index(hold)

    def step_seat(self, seat: Seat, what: SeatInput) -> list[Seat | Hold]:
        """Apply one input; returns the claims that can start because devices became free."""
        before = seat.state
        after = seat.step(what)
        self._serving[seat.pipeline] += (after == "serving") - (before == "serving")
        if after == "gone":
            del self.state.seats[seat.seat]
        elif before == "planned":
            self._unindex(seat, self.promised)
            self._index(seat)
        if seat.state != "gone":
            return []
        if self.seat_of.get(seat.member) is seat:
            del self.seat_of[seat.member]
        return self._unindex(seat, self.promised if before == "planned" else self.occupant)

    def step_hold(self, hold: Hold, what: HoldInput) -> list[Seat | Hold]:
        """Apply one input; returns the claims that can start because devices became free."""
        before = hold.state
        after = hold.step(what)
        if after == "held":
            self._unindex(hold, self.promised)
            self._index(hold)
        elif after == "waiting":
            self._unindex(hold, self.promised)
            hold.devices = ()
        if after != "gone":
            return []
        del self.state.holds[hold.hold]
        if before == "waiting":
            return []
        return self._unindex(hold, self.promised if before == "assigned" else self.occupant)

    def serving(self, pipeline: PipelineName) -> int:
        """Workers of the pipeline that serve now."""
        return self._serving[pipeline]

    def hold_of(self, member: MemberId, request: int) -> Hold | None:
        """The request of that number, waiting or granted; None when it has ended."""
        for hold in self.state.holds.values():
            if hold.member == member and hold.request == request:
                return hold
        return None

    def is_clear(self, claim: Seat | Hold) -> bool:
        """Whether the promised devices are unoccupied."""
        return not any(device in self.occupant for device in claim.devices)

    def _index(self, claim: Seat | Hold) -> None:
        if claim.state in ("waiting", "gone"):
            return
        where = self.promised if claim.state in ("planned", "assigned") else self.occupant
        for device in claim.devices:
            other = where.get(device)
            if other is not None:
                raise InvalidTransition(f"device {device} would belong to {other!r} and to {claim!r}")
            where[device] = claim
        if isinstance(claim, Seat):
            self.seat_of[claim.member] = claim

    def _unindex(self, claim: Seat | Hold, where: dict[DeviceId, Seat | Hold]) -> list[Seat | Hold]:
        for device in claim.devices:
            del where[device]
        if where is self.promised:
            return []
        waiting = {id(next_): next_ for d in claim.devices if (next_ := self.promised.get(d)) is not None}
        return [next_ for next_ in waiting.values() if self.is_clear(next_)]

    def check(self) -> None:
        """Raises unless every device has at most one owner now and one next, and the index is consistent."""
        fresh = DeviceTable(self.state)
        if (fresh.occupant, fresh.promised) != (self.occupant, self.promised):
            raise InvalidTransition("the pool's device index disagrees with its seats and holds")
        if fresh.seat_of != self.seat_of:
            raise InvalidTransition("the pool's index of workers disagrees with its seats")
        if fresh._serving != self._serving:
            raise InvalidTransition("the pool's count of serving workers disagrees with its seats")
        if len(self.seat_of) != len(self.state.seats):
            raise InvalidTransition("a worker has two seats")
        for seat in self.state.seats.values():
            entry = self.state.pipelines.get(seat.pipeline)
            if entry is None and seat.stays:
                raise InvalidTransition(f"seat {seat.seat} stays, but its pipeline {seat.pipeline} is closed")
            if entry is not None and len(seat.devices) != entry.shape.bundle:
                raise InvalidTransition(f"seat {seat.seat} has {len(seat.devices)} devices, not a whole bundle")
        waiting = [hold for hold in self.state.holds.values() if hold.state == "waiting"]
        for device, claim in self.promised.items():
            if self.is_clear(claim):
                raise InvalidTransition(f"{claim!r} waits although its devices are clear")
            if isinstance(claim, Hold):
                for hold in waiting:
                    if hold.priority < claim.priority and device in hold.among:
                        raise InvalidTransition(
                            f"device {device} is promised to {claim!r}, while {hold!r} waits for it"
                        )
