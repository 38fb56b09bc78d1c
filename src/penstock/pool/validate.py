"""Simulates a plan and refuses it if any step is invalid. Shares no code with the planner."""

from __future__ import annotations

from penstock.errors import InvalidTransition
from penstock.pool.plan import Plan, SeatView, Snapshot
from penstock.records.pool import DeviceId, Priority


def validate(snapshot: Snapshot, plan: Plan) -> None:
    """Raises `InvalidTransition`, naming the move, unless the plan can be carried out and leaves every device valid.

    Afterwards: no device has two owners, none is lost, requests hold exactly what they requested, workers use whole
    bundles that they are allowed to use, no pipeline has more workers than it can use, and no request is passed over
    for one of a lower class, neither by a grant of this plan nor by an earlier promise.
    """
    seats = {seat.seat: seat for seat in snapshot.seats}
    occupant: dict[DeviceId, SeatView] = {}
    owner: dict[DeviceId, str] = dict.fromkeys(snapshot.held, "a request that holds it")
    for seat in snapshot.seats:
        for device in seat.devices:
            if seat.phase != "planned":
                occupant[device] = seat
            if seat.phase not in ("leaving", "fenced"):
                owner[device] = f"seat {seat.seat}"
    for request in snapshot.requests:
        owner.update((device, f"request {request.request}") for device in request.assigned)
    leaving = {seat.seat for seat in snapshot.seats if seat.phase in ("leaving", "fenced")}
    asleep = [view.asleep for view in snapshot.pipelines]
    served = [0] * len(snapshot.pipelines)
    for seat in snapshot.seats:
        if seat.seat not in leaving:
            served[seat.pipeline] += 1

    for shrink in plan.shrinks:
        seat = seats.get(shrink.seat)
        if seat is None or seat.seat in leaving:
            raise InvalidTransition(f"plan shrinks seat {shrink.seat}, which does not exist or is already leaving")
        leaving.add(seat.seat)
        served[seat.pipeline] -= 1
        for device in seat.devices:
            del owner[device]

    _check_classes(snapshot, plan)
    requests = {request.request: request for request in snapshot.requests}
    for withdrawal in plan.withdrawals:
        for device in requests[withdrawal.request].assigned:
            del owner[device]
    for grant in plan.grants:
        request = requests[grant.request]
        if len(set(grant.devices)) != request.count or not set(grant.devices) <= set(request.among):
            raise InvalidTransition(
                f"plan grants request {grant.request} devices {grant.devices}; it requested {request.count} "
                f"of {request.among}"
            )
        _occupy(grant.devices, grant.after, f"request {grant.request}", owner, occupant, leaving, snapshot)

    views = {view.name: index for index, view in enumerate(snapshot.pipelines)}
    distinct = {id(view.inference): view.inference for view in snapshot.pipelines}
    allowed = {key: frozenset(inference) for key, inference in distinct.items()}
    nodes = [node for node, size in enumerate(snapshot.topology.nodes) for _ in range(size)]
    for expand in plan.expands:
        index = views.get(expand.pipeline)
        if index is None:
            raise InvalidTransition(f"plan expands pipeline {expand.pipeline}, which is not open")
        view = snapshot.pipelines[index]
        what = f"a worker of {view.name} on {expand.devices}"
        if len(set(expand.devices)) != view.bundle or not allowed[id(view.inference)].issuperset(expand.devices):
            raise InvalidTransition(f"plan wakes {what}; expected a bundle of {view.bundle} of its inference devices")
        if max(expand.devices) - min(expand.devices) != view.bundle - 1:
            raise InvalidTransition(f"plan wakes {what}; the devices of a bundle must be neighbours")
        touched = nodes[min(expand.devices)], nodes[max(expand.devices)]
        if touched[0] != touched[1] and sum(snapshot.topology.nodes[touched[0] : touched[1] + 1]) != view.bundle:
            raise InvalidTransition(f"plan wakes {what}; a bundle stays in one node or fills whole nodes")
        if not view.may_wake:
            raise InvalidTransition(f"plan wakes {what}, but the pipeline is benched")
        asleep[index] -= 1
        if asleep[index] < 0:
            raise InvalidTransition(f"plan wakes {what}, but only {view.asleep} worker processes are asleep")
        served[index] += 1
        if served[index] > view.useful:
            raise InvalidTransition(f"plan wakes {what}: {served[index]} workers, of which it can use {view.useful}")
        _occupy(expand.devices, expand.after, what, owner, occupant, leaving, snapshot)


def _check_classes(snapshot: Snapshot, plan: Plan) -> None:
    """Only waiting requests are granted, only promises are withdrawn, and no higher class is passed over."""
    waiting = {request.request: request for request in snapshot.requests if not request.assigned}
    promised = {request.request: request for request in snapshot.requests if request.assigned}
    devices_of = {request.request: request.assigned for request in promised.values()}
    withdrawn = []
    for withdrawal in plan.withdrawals:
        request = promised.pop(withdrawal.request, None)
        if request is None:
            raise InvalidTransition(f"plan withdraws a promise from request {withdrawal.request}, which has none")
        withdrawn.append(request)
        waiting[request.request] = request
    for grant in plan.grants:
        request = waiting.pop(grant.request, None)
        if request is None:
            raise InvalidTransition(f"plan grants request {grant.request}, which is not waiting")
        promised[request.request] = request
        devices_of[request.request] = grant.devices
    needed_by: dict[DeviceId, Priority] = {}
    for request in waiting.values():
        for device in request.among:
            needed_by[device] = min(request.priority, needed_by.get(device, request.priority))
    for request in promised.values():
        for device in devices_of[request.request]:
            if needed_by.get(device, request.priority) < request.priority:
                raise InvalidTransition(
                    f"plan leaves device {device} to request {request.request} for {request.priority.name.lower()} "
                    f"while {needed_by[device].name.lower()} waits for it"
                )
    for request in promised.values():
        for device in devices_of[request.request]:
            needed_by[device] = min(request.priority, needed_by.get(device, request.priority))
    for request in withdrawn:
        if all(needed_by.get(device, request.priority) >= request.priority for device in request.assigned):
            raise InvalidTransition(
                f"plan withdraws devices {request.assigned} from request {request.request} for "
                f"{request.priority.name.lower()}, and no higher class needs them"
            )


def _occupy(
    devices: tuple[DeviceId, ...],
    after: tuple[int, ...],
    what: str,
    owner: dict[DeviceId, str],
    occupant: dict[DeviceId, SeatView],
    leaving: set,
    snapshot: Snapshot,
) -> None:
    count = snapshot.topology.device_count
    for device in devices:
        if not 0 <= device < count:
            raise InvalidTransition(f"plan gives {what} device {device}; the pool has devices 0 to {count - 1}")
        if device in owner:
            raise InvalidTransition(f"plan gives {what} device {device}, which belongs to {owner[device]}")
        seat = occupant.get(device)
        if seat is not None and (seat.seat not in leaving or seat.seat not in after):
            raise InvalidTransition(f"plan gives {what} device {device} without waiting for seat {seat.seat} to leave")
        owner[device] = what
