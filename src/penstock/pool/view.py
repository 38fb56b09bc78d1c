"""The pool's state as a snapshot for the planner."""

from __future__ import annotations

import math
from collections import Counter

from penstock.pool.plan import PipelineView, RequestView, SeatView, Snapshot
from penstock.pool.settings import PoolSection
from penstock.pool.state import Entry, State
from penstock.records.ids import PipelineName
from penstock.records.pool import DeviceId, Topology


def useful_bundles(entry: Entry, workers: int) -> int:
    """The most workers a pipeline can use: limited by its work, its quota and its processes."""
    shape = entry.shape
    useful = entry.demand.useful_bundles(shape.concurrency)
    most = len(shape.inference) // shape.bundle
    return min(useful, most, workers, most if shape.max_bundles is None else shape.max_bundles)


def workers_by_pipeline(state: State) -> dict[PipelineName, int]:
    """Worker processes that can serve, including those that are leaving their devices, without fenced ones."""
    fenced = {seat.member for seat in state.seats.values() if seat.state == "fenced"}
    counts = dict.fromkeys(state.pipelines, 0)
    for member in state.members.values():
        if member.worker and not member.evicted and member.pipeline in counts and member.member not in fenced:
            counts[member.pipeline] += 1
    return counts


def longest_wait_s(state: State, settings: PoolSection) -> float:
    """The bound on waiting for the last of the open pipelines."""
    shapes = [entry.shape for entry in state.pipelines.values()]
    return settings.longest_wait_s(
        pipelines_ahead=len(shapes) - 1,
        heaviest=max((shape.weight for shape in shapes), default=1.0),
        start_s=max((shape.start_s for shape in shapes), default=0.0),
    )


def _worth(entry: Entry, useful: int, repay_s: float) -> int:
    """The number of workers whose waking the remaining work repays. Before the first wake is measured, waking counts
    as free."""
    samples_to_repay = entry.demand.pace * repay_s
    return min(useful, max(1, int(entry.demand.remaining / samples_to_repay))) if samples_to_repay else useful


def _pause_s(entry: Entry, now: float) -> float:
    """Expected rest of its pause, or length of its next one: that of the last one; beyond that, as long again."""
    paused_s = 0.0 if entry.paused_since is None else now - entry.paused_since
    return entry.last_pause_s - paused_s if paused_s < entry.last_pause_s else paused_s


def _away_s(entry: Entry, workers: int, has_request: bool, now: float) -> float:
    """How long others can be expected to stay on the devices it trains on."""
    if has_request:
        return 0.0
    if entry.paused_since is not None:
        return _pause_s(entry, now)
    pace = entry.demand.pace * workers
    return entry.demand.remaining / pace if pace else math.inf


def view_of(
    state: State, topology: Topology, settings: PoolSection, workers: dict[PipelineName, int], now: float
) -> Snapshot:
    """The snapshot for the planner."""
    names = sorted(state.pipelines)
    index = {name: position for position, name in enumerate(names)}
    asleep = dict(workers)
    for seat in state.seats.values():
        if seat.pipeline in asleep and seat.state != "fenced" and seat.member in state.members:
            asleep[seat.pipeline] -= 1
    bound: dict[PipelineName, list[tuple[DeviceId, ...]]] = {}
    leaving = {seat.member for seat in state.seats.values() if not seat.stays}
    for member in state.members.values():
        if member.bound and not member.evicted and member.member not in leaving:
            bound.setdefault(member.pipeline, []).append(member.bound)
    awake = Counter(seat.pipeline for seat in state.seats.values() if seat.stays)
    with_request = {hold.pipeline for hold in state.holds.values() if hold.state in ("waiting", "assigned")}
    pipelines = []
    for name in names:
        entry = state.pipelines[name]
        shape = entry.shape
        useful = useful_bundles(entry, workers[name])
        repay_s = settings.payback * entry.wake_s
        pipelines.append(
            PipelineView(
                name=name,
                bundle=shape.bundle,
                inference=shape.inference,
                remaining=entry.demand.remaining if not entry.demand.lapsed else 1,
                useful=useful,
                worth=useful if entry.alone else _worth(entry, useful, repay_s),
                overdue=entry.short_since is not None and now >= entry.short_since + 2 * repay_s,
                asleep=asleep[name],
                weight=shape.weight,
                min_bundles=shape.min_bundles,
                waiting_since=entry.waiting_since,
                turn_s=settings.turn_s * shape.weight,
                lingers=_pause_s(entry, now) < 2 * repay_s,
                home=entry.home,
                away_s=_away_s(entry, awake[name], name in with_request, now),
                stay_s=repay_s / 2,
                may_wake=now >= entry.benched_until,
                places=tuple(sorted(bound[name])) if name in bound else None,
            )
        )
    holds = state.holds.values()
    return Snapshot(
        now=now,
        topology=topology,
        pipelines=tuple(pipelines),
        seats=tuple(
            SeatView(seat.seat, index.get(seat.pipeline, -1), seat.devices, seat.state, seat.since)
            for seat in state.seats.values()
            if seat.state != "gone"
        ),
        held=tuple(device for hold in holds if hold.state in ("held", "fenced") for device in hold.devices),
        requests=tuple(
            RequestView(hold.hold, hold.priority, hold.among, hold.count, hold.since, hold.devices)
            for hold in holds
            if hold.state in ("waiting", "assigned")
        ),
        patience_s=settings.patience_s,
    )
