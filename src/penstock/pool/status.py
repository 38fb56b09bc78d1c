"""A picture of the pool for people: who is served, who waits, for what and since when."""

from __future__ import annotations

from penstock.pool.book import Entry, State
from penstock.pool.lease import Hold
from penstock.pool.view import useful_bundles, workers_by_pipeline
from penstock.records.ids import PipelineName
from penstock.records.pool import PipelineShare, PoolStatus, SeatStatus, Topology


def describe(state: State, topology: Topology, now: float) -> PoolStatus:
    """The pool at this moment."""
    seats = list(state.seats.values())
    holds = list(state.holds.values())
    generating = sum(len(seat.devices) for seat in seats if seat.state == "serving")
    moving = sum(len(seat.devices) for seat in seats if seat.state in ("waking", "leaving", "fenced"))
    held = sum(len(hold.devices) for hold in holds if hold.state in ("held", "fenced"))
    workers = workers_by_pipeline(state)
    states: dict[PipelineName, list[str]] = {name: [] for name in state.pipelines}
    for seat in seats:
        states.get(seat.pipeline, []).append(seat.state)
    return PoolStatus(
        devices=topology.device_count,
        idle=topology.device_count - generating - moving - held,
        generating=generating,
        held=held,
        moving=moving,
        shares=tuple(
            _share(name, state.pipelines[name], workers[name], states[name], now) for name in sorted(state.pipelines)
        ),
        seats=tuple(
            SeatStatus(seat.seat, seat.pipeline, seat.member, seat.devices, seat.state, now - seat.since)
            for seat in seats
        ),
        waiting=tuple(_sentence(state, hold, now) for hold in holds if hold.state in ("waiting", "assigned")),
        moves=state.moves,
        failed_moves=state.failed_moves,
        refused_plans=state.refused_plans,
    )


def _share(name: PipelineName, entry: Entry, workers: int, seats: list[str], now: float) -> PipelineShare:
    note = ""
    if entry.demand.remaining and not workers:
        note = "has work but no worker process"
    elif entry.demand.lapsed:
        note = "reports no progress"
    elif entry.benched_until > now:
        note = f"benched after {entry.failures} failed moves"
    return PipelineShare(
        pipeline=name,
        remaining=entry.demand.remaining,
        awake=seats.count("serving"),
        moving=len(seats) - seats.count("serving"),
        useful=useful_bundles(entry, workers),
        waited_s=0.0 if entry.waiting_since is None else now - entry.waiting_since,
        benched_s=max(0.0, entry.benched_until - now),
        note=note,
    )


def _sentence(state: State, hold: Hold, now: float) -> str:
    wanted = set(hold.devices or hold.among)
    holders = sorted({other.member for other in state.holds.values() if wanted & set(other.devices)} - {hold.member})
    leavers = sorted({seat.member for seat in state.seats.values() if wanted & set(seat.devices)})
    behind = f"held by {', '.join(holders)}" if holders else f"being left by {', '.join(leavers)}"
    return (
        f"{hold.member} ({hold.pipeline}, {hold.priority.name.lower()}) waits {now - hold.since:.1f} s for "
        f"{hold.count} of devices {list(hold.among)}, {behind if holders or leavers else 'kept for an earlier request'}"
    )
