"""Device requests of initialisation, training and scoring: which devices each gets, and which workers must leave.

Strict between classes, arrival order within one. A request never takes devices that another one holds. Devices that
are only promised to another one pass to a higher class; the request that loses them waits again, with its arrival time.
While a request waits, lower classes cannot get the devices it needs. Its own class may overtake it, on devices it could
not use yet, until it has waited `patience_s`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from penstock.pool.occupancy import UNOCCUPIED, Occupancy, as_devices
from penstock.pool.places import places
from penstock.pool.plan import RequestView, Snapshot
from penstock.records.pool import DeviceId


def serve_requests(snapshot: Snapshot, occupancy: Occupancy) -> None:
    """Records the grants that are possible now, and the shrinks and withdrawals they need."""
    kept_D = np.zeros(snapshot.topology.device_count, dtype=bool)
    for priority in sorted({request.priority for request in snapshot.requests}):
        promised = {request.request for request in occupancy.promised.values()}
        waiting = [one for one in snapshot.requests if one.priority == priority and one.request not in promised]
        passed_over: list[RequestView] = []
        for request in sorted(waiting, key=lambda request: (request.since, request.request)):
            devices = _find(request, snapshot, occupancy, kept_D)
            _take_promises(request, request.among if devices is None else devices, occupancy)
            if devices is not None:
                _shrink_occupants(devices, occupancy, f"{priority.name.lower()} needs the devices")
                occupancy.grant(request.request, devices)
                continue
            for device in _awaited(request, snapshot, occupancy):
                occupancy.calm[device] = True
            if snapshot.now - request.since >= snapshot.patience_s:
                kept_D[list(request.among)] = True
            passed_over.append(request)
        for request in passed_over:
            kept_D[list(request.among)] = True


def _take_promises(request: RequestView, devices: Iterable[DeviceId], occupancy: Occupancy) -> None:
    for device in devices:
        promised = occupancy.promised.get(device)
        if promised is not None and promised.priority > request.priority:
            occupancy.withdraw(promised)


def _shrink_occupants(devices: tuple[DeviceId, ...], occupancy: Occupancy, reason: str) -> None:
    occupants = {occupancy.occupant[d] for d in devices} | {occupancy.planned[d] for d in devices}
    for index in sorted(occupants - {UNOCCUPIED}):
        if not occupancy.leaving[index]:
            occupancy.shrink(index, abort=True, reason=reason)


def _choices(request: RequestView, snapshot: Snapshot) -> np.ndarray:
    """The places a request may get: exactly its devices, or any valid place if it leaves a choice."""
    if request.count == len(request.among):
        return np.array([sorted(request.among)], dtype=np.int64)
    return places(snapshot.topology, request.among, request.count)


def _find(
    request: RequestView, snapshot: Snapshot, occupancy: Occupancy, kept_D: np.ndarray
) -> tuple[DeviceId, ...] | None:
    """The place with the fewest devices in use, or None if other requests hold or block every one."""
    choices_K = _choices(request, snapshot)
    if not len(choices_K):
        return None
    # A device promised to a worker that has not begun to wake, or to a lower class, is available: no process uses it.
    # But a promise to a request costs more than any number of workers.
    promised = [device for device, other in occupancy.promised.items() if other.priority > request.priority]
    held_D = np.array(occupancy.taken) & (np.array(occupancy.planned) == UNOCCUPIED)
    held_D[promised] = False
    cost_D = np.where(occupancy.open_D(), 0.0, 1.0)
    cost_D[promised] = len(cost_D)
    cost_K = np.where(held_D | kept_D, np.inf, cost_D)[choices_K].sum(axis=1)
    best = int(cost_K.argmin())
    return as_devices(choices_K[best].tolist()) if cost_K[best] < np.inf else None


def _awaited(request: RequestView, snapshot: Snapshot, occupancy: Occupancy) -> list[int]:
    """The place with the fewest devices taken: no worker is woken there while the request waits."""
    choices_K = _choices(request, snapshot)
    if not len(choices_K):
        return []
    return choices_K[int(np.array(occupancy.taken)[choices_K].sum(axis=1).argmin())].tolist()
