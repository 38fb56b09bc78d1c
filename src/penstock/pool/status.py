"""The pool's status for users: the occupants of devices, what waits for devices, for how long, and what blocks it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock.pool.lease import Hold, Seat
from penstock.pool.state import Entry, State
from penstock.pool.view import useful_bundles, workers_by_pipeline
from penstock.records.ids import PipelineName
from penstock.records.pool import DeviceId, DeviceUse, PipelineShare, PoolStatus, Priority, Topology

_WORK = {Priority.INITIALISATION: "initialising", Priority.TRAINING: "training", Priority.SCORING: "scoring"}
_DOING = {"waking": "waking", "serving": "generating", "leaving": "leaving", "fenced": "fenced"}


def describe(state: State, topology: Topology, now: float) -> PoolStatus:
    """The current status of the pool."""
    seats = [seat for seat in state.seats.values() if seat.state in _DOING]
    holds = [hold for hold in state.holds.values() if hold.state in ("held", "fenced")]
    generating = sum(len(seat.devices) for seat in seats if seat.state == "serving")
    moving = sum(len(seat.devices) for seat in seats if seat.state != "serving")
    held = sum(len(hold.devices) for hold in holds)
    uses = sorted((_use(claim, now) for claim in (*seats, *holds)), key=lambda use: use.devices)
    workers = workers_by_pipeline(state)
    counts = Counter((seat.pipeline, seat.state == "serving") for seat in state.seats.values())
    shares = [
        PipelineShare(
            pipeline=name,
            remaining=entry.demand.remaining,
            awake=counts[name, True],
            moving=counts[name, False],
            useful=useful_bundles(entry, workers[name]),
            waited_s=0.0 if entry.waiting_since is None else now - entry.waiting_since,
            trouble=_trouble(name, entry, workers[name], uses, now),
        )
        for name, entry in sorted(state.pipelines.items())
    ]
    return PoolStatus(
        devices=topology.device_count,
        idle=topology.device_count - generating - moving - held,
        generating=generating,
        held=held,
        moving=moving,
        shares=tuple(shares),
        uses=tuple(uses),
        waiting=tuple(_request(hold, uses, now) for hold in _waiting(state)),
        moves=state.moves,
        failed_moves=state.failed_moves,
        refused_plans=state.refused_plans,
    )


def troubles(state: State, topology: Topology, now: float) -> dict[PipelineName, str]:
    """Per pipeline, why it is not served and what it waits for, for its diagnosis; only pipelines with a problem."""
    status = describe(state, topology, now)
    problems = [(share.pipeline, share.trouble) for share in status.shares if share.trouble]
    problems += [(hold.pipeline, sentence) for hold, sentence in zip(_waiting(state), status.waiting, strict=True)]
    return {name: "; ".join(line for owner, line in problems if owner == name) for name, _ in problems}


def _waiting(state: State) -> list[Hold]:
    return [hold for hold in state.holds.values() if hold.state in ("waiting", "assigned")]


def _trouble(name: PipelineName, entry: Entry, workers: int, uses: Iterable[DeviceUse], now: float) -> str:
    demand = entry.demand
    if demand.remaining and not workers:
        return f"{name} has {demand.remaining} samples to generate, but no live worker process to wake"
    if entry.benched_until > now:
        pause_s = entry.benched_until - now
        return f"{name} wakes no worker for {pause_s:.0f} s, after {entry.failures} failed moves: see its workers' logs"
    if demand.lapsed:
        return f"{name} has completed no sample for {now - demand.heard_at:.0f} s, and keeps one worker until it does"
    if entry.waiting_since is None:
        return ""
    blockers = _users(uses, set(entry.shape.inference))
    return (
        f"{name} has {demand.remaining} samples to generate and has had no worker for "
        f"{now - entry.waiting_since:.0f} s: {blockers or 'its devices are free, a plan is due'}"
    )


def _request(hold: Hold, uses: Iterable[DeviceUse], now: float) -> str:
    blockers = _users(uses, set(hold.devices or hold.among)) or "kept for an earlier request"
    return (
        f"{hold.member} ({hold.priority.name.lower()}) has waited {now - hold.since:.0f} s for {hold.count} of devices "
        f"{list(hold.among)}: {blockers}"
    )


def _use(claim: Seat | Hold, now: float) -> DeviceUse:
    if isinstance(claim, Seat):
        doing = _DOING[claim.state]
    else:
        doing = _WORK[claim.priority] if claim.state == "held" else "fenced"
    return DeviceUse(claim.devices, claim.pipeline, claim.member, doing, now - claim.since)


def _users(uses: Iterable[DeviceUse], devices: set[DeviceId]) -> str:
    """The occupants of these devices, longest first; at most four, to keep the message short."""
    occupants = sorted((use for use in uses if not devices.isdisjoint(use.devices)), key=lambda use: -use.since_s)
    parts = [f"{use.member} is {use.doing} on {list(use.devices)}, for {use.since_s:.0f} s" for use in occupants[:4]]
    return ", ".join(parts) + (f", and {len(occupants) - 4} more" if len(occupants) > 4 else "")
