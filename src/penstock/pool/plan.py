"""Input and output of the planner: a snapshot and a plan."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from penstock.pool.settings import PoolSection
from penstock.records.ids import PipelineName
from penstock.records.pool import DeviceId, Priority, SeatId, Topology

_POOL = PoolSection()

SeatPhase = Literal["planned", "waking", "serving", "leaving", "fenced"]


class PipelineView(msgspec.Struct, frozen=True):
    """The planner's data about one open pipeline."""

    name: PipelineName
    bundle: int
    inference: tuple[DeviceId, ...]
    remaining: int
    """Samples still to be generated; 0 means it needs no worker (and may keep those that no other pipeline needs)."""
    useful: int
    """The most bundles it can use: limited by remaining work, quota and existing processes."""
    worth: int = 1_000_000
    """Beyond its equal part it takes unused devices up to this number of bundles: one more would not repay its
    waking."""
    overdue: bool = True
    """It has been below its share for long enough that a move repays: it may displace busy workers of others."""
    asleep: int = 1_000_000
    """Worker processes that could be woken now: no plan wakes more."""
    weight: float = 1.0
    min_bundles: int = 0
    waiting_since: float | None = None
    """When it began to have work and no worker."""
    turn_s: float = _POOL.turn_s
    """Its woken workers are not displaced for another pipeline's generation before this has passed."""
    lingers: bool = False
    """Its workers without work will have some again before a move repays: up to its equal part they do not count as
    idle."""
    home: tuple[DeviceId, ...] = ()
    """Devices it trains on: best for its own workers; others must leave when it trains or has work again."""
    away_s: float = math.inf
    """Expected time until it needs its home: until it trains, or until it has work again."""
    stay_s: float = 0.0
    """Its workers are woken at another pipeline's home only if that stays free for this long."""
    may_wake: bool = True
    """False after failed moves, until the bench time has passed."""
    places: tuple[tuple[DeviceId, ...], ...] | None = None
    """The only bundles it can use, when its worker processes are bound to devices."""


class SeatView(msgspec.Struct, frozen=True, array_like=True):
    """One worker on one bundle. `planned` occupies nothing yet; `leaving` and `fenced` occupy, but will end."""

    seat: SeatId
    pipeline: int
    """Index into the snapshot's pipelines, -1 for a pipeline that has closed."""
    devices: tuple[DeviceId, ...]
    phase: SeatPhase
    since: float
    """When it entered its phase."""


class RequestView(msgspec.Struct, frozen=True):
    """One request above generation that is not yet granted."""

    request: int
    priority: Priority
    among: tuple[DeviceId, ...]
    count: int
    since: float
    assigned: tuple[DeviceId, ...] = ()
    """Devices already promised to it, on which a worker is still leaving."""


class Snapshot(msgspec.Struct, frozen=True):
    """Everything a plan depends on."""

    now: float
    topology: Topology
    pipelines: tuple[PipelineView, ...]
    """Sorted by name."""
    seats: tuple[SeatView, ...] = ()
    held: tuple[DeviceId, ...] = ()
    """Held by initialisation, training or scoring: never preempted."""
    requests: tuple[RequestView, ...] = ()
    """In order of arrival."""
    patience_s: float = _POOL.patience_s
    """A request that waited this long is not overtaken by later ones of its class."""


class Shrink(msgspec.Struct, frozen=True):
    """Put the worker in this seat to sleep (or drop the seat, if it was only planned)."""

    seat: SeatId
    abort: bool
    reason: str


class Expand(msgspec.Struct, frozen=True):
    """Wake one worker of the pipeline on these devices, once the seats in `after` are gone."""

    pipeline: PipelineName
    devices: tuple[DeviceId, ...]
    after: tuple[SeatId, ...] = ()


class Withdraw(msgspec.Struct, frozen=True):
    """Withdraw the promise to this request: one of a higher class needs the devices. The request waits again."""

    request: int


class Grant(msgspec.Struct, frozen=True):
    """Give these devices to the request, once the seats in `after` are gone."""

    request: int
    devices: tuple[DeviceId, ...]
    after: tuple[SeatId, ...] = ()


class Plan(msgspec.Struct, frozen=True):
    """Moves that may all start at once; `after` lists the seats that a move waits for."""

    shrinks: tuple[Shrink, ...] = ()
    expands: tuple[Expand, ...] = ()
    grants: tuple[Grant, ...] = ()
    withdrawals: tuple[Withdraw, ...] = ()
    short: tuple[PipelineName, ...] = ()
    """Served pipelines that are left below their share, because a move would not repay yet."""

    def __bool__(self) -> bool:
        return bool(self.shrinks or self.expands or self.grants or self.withdrawals)
