"""Initialisation, training and scoring ask for devices: who gets which, and which workers make way.

Strict between classes, arrival order within one. A request never takes what another one holds. What another one is
only promised passes to a higher class; the one that loses it waits again, with its arrival and its age. While a request
waits, lower classes cannot have what it needs; its own class may overtake it, on devices it could not use yet, until it
has waited for the length of its patience.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from penstock.pool.ground import NOBODY, Ground, as_devices
from penstock.pool.places import places
from penstock.pool.plan import RequestView, Snapshot
from penstock.records.pool import DeviceId


def serve_requests(snapshot: Snapshot, ground: Ground) -> None:
    """Record the grants that are possible now, and the shrinks and withdrawals they need."""
    kept_D = np.zeros(snapshot.topology.device_count, dtype=bool)
    for priority in sorted({request.priority for request in snapshot.requests}):
        promised = {request.request for request in ground.promised.values()}
        waiting = [one for one in snapshot.requests if one.priority == priority and one.request not in promised]
        passed_over: list[RequestView] = []
        for request in sorted(waiting, key=lambda request: (request.since, request.request)):
            devices = _find(request, snapshot, ground, kept_D)
            _take_promises(request, request.among if devices is None else devices, ground)
            if devices is not None:
                _make_way(devices, ground, f"{priority.name.lower()} needs the devices")
                ground.grant(request.request, devices)
                continue
            for device in _awaited(request, snapshot, ground):
                ground.calm[device] = True
            if snapshot.now - request.since >= snapshot.patience_s:
                kept_D[list(request.among)] = True
            passed_over.append(request)
        for request in passed_over:
            kept_D[list(request.among)] = True


def _take_promises(request: RequestView, devices: Iterable[DeviceId], ground: Ground) -> None:
    for device in devices:
        promised = ground.promised.get(device)
        if promised is not None and promised.priority > request.priority:
            ground.withdraw(promised)


def _make_way(devices: tuple[DeviceId, ...], ground: Ground, reason: str) -> None:
    in_the_way = {ground.occupant[d] for d in devices} | {ground.planned[d] for d in devices}
    for index in sorted(in_the_way - {NOBODY}):
        if not ground.leaving[index]:
            ground.shrink(index, abort=True, reason=reason)


def _choices(request: RequestView, snapshot: Snapshot) -> np.ndarray:
    """A request for exactly its devices gets those; one that leaves a choice gets a proper place."""
    if request.count == len(request.among):
        return np.array([sorted(request.among)], dtype=np.int64)
    return places(snapshot.topology, request.among, request.count)


def _find(request: RequestView, snapshot: Snapshot, ground: Ground, kept_D: np.ndarray) -> tuple[DeviceId, ...] | None:
    """The place that disturbs the fewest, or None if other requests hold every one."""
    choices_K = _choices(request, snapshot)
    if not len(choices_K):
        return None
    # Promised to a worker that has not begun to wake, or to a lower class, is as good as free: nobody is there yet. But
    # rather take any number of workers than a promise.
    promised = [device for device, other in ground.promised.items() if other.priority > request.priority]
    held_D = np.array(ground.taken) & (np.array(ground.planned) == NOBODY)
    held_D[promised] = False
    cost_D = np.where(ground.open_D(), 0.0, 1.0)
    cost_D[promised] = len(cost_D)
    cost_K = np.where(held_D | kept_D, np.inf, cost_D)[choices_K].sum(axis=1)
    best = int(cost_K.argmin())
    return as_devices(choices_K[best].tolist()) if cost_K[best] < np.inf else None


def _awaited(request: RequestView, snapshot: Snapshot, ground: Ground) -> list[int]:
    """The place with the fewest holders: nothing new is woken there while the request waits."""
    choices_K = _choices(request, snapshot)
    if not len(choices_K):
        return []
    return choices_K[int(np.array(ground.taken)[choices_K].sum(axis=1).argmin())].tolist()
