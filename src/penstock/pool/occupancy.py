"""Devices during planning: the occupant and next owner of each, and the seats that are already leaving.

Legend for array suffixes: D devices, S seats, K places, P pipelines.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from penstock.pool.plan import Expand, Grant, Plan, RequestView, Shrink, Snapshot, Withdraw
from penstock.records.ids import PipelineName
from penstock.records.pool import DeviceId, SeatId

UNOCCUPIED = -1


class Occupancy:
    """Every move recorded here is visible to the moves after it."""

    def __init__(self, snapshot: Snapshot) -> None:
        count = snapshot.topology.device_count
        self.seats = snapshot.seats
        self.occupant = [UNOCCUPIED] * count
        """Index of the seat that occupies a device."""
        self.planned = [UNOCCUPIED] * count
        """Index of the seat that is promised a device but waits for another seat to leave it."""
        self.promised: dict[int, RequestView] = {}
        """Requests that are promised a device on which a seat is still leaving."""
        self.taken = [False] * count
        """Held or promised: unavailable to others."""
        self.calm = [False] * count
        """A request waits for it: workers may stay, but none is woken there."""
        self.leaving = [seat.phase in ("leaving", "fenced") for seat in snapshot.seats]
        self.short: list[PipelineName] = []
        """Pipelines the plan leaves below their share."""
        self._shrinks: list[Shrink] = []
        self._expands: list[Expand] = []
        self._grants: list[Grant] = []
        self._withdrawals: list[Withdraw] = []
        self.take(snapshot.held)
        for index, seat in enumerate(snapshot.seats):
            where = self.planned if seat.phase == "planned" else self.occupant
            for device in seat.devices:
                where[device] = index
                if seat.phase == "planned":
                    self.taken[device] = True
        for request in snapshot.requests:
            self.take(request.assigned)
            self.promised |= dict.fromkeys(request.assigned, request)

    def take(self, devices: Iterable[int]) -> None:
        for device in devices:
            self.taken[device] = True

    def is_open(self, device: int) -> bool:
        """Unoccupied and not promised (a worker may still be leaving)."""
        occupant = self.occupant[device]
        return not self.taken[device] and (occupant == UNOCCUPIED or self.leaving[occupant])

    def open_D(self) -> np.ndarray:
        return np.array([self.is_open(device) for device in range(len(self.taken))], dtype=bool)

    def shrink(self, index: int, *, abort: bool, reason: str) -> None:
        """Records that a seat ends: its devices are open to the moves that follow."""
        seat = self.seats[index]
        self.leaving[index] = True
        if seat.phase == "planned":
            for device in seat.devices:
                self.planned[device] = UNOCCUPIED
                self.taken[device] = False
        self._shrinks.append(Shrink(seat.seat, abort, reason))

    def expand(self, pipeline: PipelineName, devices: tuple[DeviceId, ...]) -> None:
        self._expands.append(Expand(pipeline, devices, self._leavers(devices)))
        self.take(devices)

    def grant(self, request: int, devices: tuple[DeviceId, ...]) -> None:
        self._grants.append(Grant(request, devices, self._leavers(devices)))
        self.take(devices)

    def withdraw(self, request: RequestView) -> None:
        """Records that a promise is withdrawn: its devices are open to the moves that follow."""
        for device in request.assigned:
            self.taken[device] = False
            del self.promised[device]
        self._withdrawals.append(Withdraw(request.request))

    def plan(self) -> Plan:
        return Plan(
            tuple(self._shrinks),
            tuple(self._expands),
            tuple(self._grants),
            tuple(self._withdrawals),
            tuple(self.short),
        )

    def _leavers(self, devices: tuple[DeviceId, ...]) -> tuple[SeatId, ...]:
        occupants = {self.occupant[device] for device in devices} - {UNOCCUPIED}
        return tuple(sorted(self.seats[index].seat for index in occupants))


def as_devices(row: Iterable[int]) -> tuple[DeviceId, ...]:
    return tuple(DeviceId(device) for device in row)
