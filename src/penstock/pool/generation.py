"""Generation gets the devices that the requests left, in four stages:

1. Pipelines with work and no worker, longest wait first: any open place, then one that others must yield, then by
   turns: the place whose workers have all had their turn, else reserve the place where that happens first.
2. Pipelines below their equal part and their ideal share: idle devices, those of workers without work, and those that
   others have beyond their own part.
3. Pipelines a whole bundle short of their ideal share, from those that have a whole bundle too many.
4. Idle devices, and those of workers without work, to pipelines that can use them.

In the last two a worker is woken only if that pays: see `PipelineView.overdue` and `worth`. The home of each pipeline
(where it trains) comes first; another's home is taken only if it stays free for long enough (`away_s`, `stay_s`).
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from penstock.pool.occupancy import UNOCCUPIED, Occupancy, as_devices
from penstock.pool.places import places
from penstock.pool.plan import PipelineView, Snapshot
from penstock.pool.share import Share, ideal_devices
from penstock.records.pool import DeviceId

_MUST_WAIT = 1.0
_HOME = 4.0
_SURPLUS = 16.0
_BORROWED = 32.0
_SPARE = 64.0
_TOO_SHORT = 256.0
"""The cost of taking a device, ascending: its worker is leaving, a trainer will return to it, its worker has no work,
its pipeline is beyond its part, its pipeline is within its part, it would have to be released again at once."""

_IDLE, _LENT, _BUSY = range(3)
"""Which workers may be displaced: those without work, those beyond their pipeline's part, any."""


class _Kind(NamedTuple):
    """Pipelines of one kind can use the same places."""

    number: int
    bundle: int
    places_K: np.ndarray
    row_D: np.ndarray
    """For each device its row in `places_K`, or UNOCCUPIED."""


class Generation:
    """Distributes devices among the pipelines' generation workers."""

    def __init__(self, snapshot: Snapshot, occupancy: Occupancy) -> None:
        self._now = snapshot.now
        self._occupancy = occupancy
        self._pipelines = snapshot.pipelines
        self._kinds = _kinds(snapshot)
        self._shares = _shares(snapshot, occupancy)
        self._short = [share.short for share in self._shares]
        self._surplus = [
            min(share.surplus, max(0, share.held - share.part)) if view.lingers else share.surplus
            for view, share in zip(self._pipelines, self._shares, strict=True)
        ]
        # A pipeline without work has no spare workers either: they are surplus, or they linger.
        self._spare = [
            share.spare if view.useful else 0 for view, share in zip(self._pipelines, self._shares, strict=True)
        ]
        self._away_D = np.full(len(occupancy.taken), np.inf)
        for view in snapshot.pipelines:
            home = list(view.home)
            self._away_D[home] = np.minimum(self._away_D[home], view.away_s)
        self._away: list[float] = self._away_D.tolist()
        self._stay_s = min((view.stay_s for view in snapshot.pipelines), default=0.0)
        self._block = max((view.bundle for view in snapshot.pipelines), default=1)
        self._asleep = [view.asleep for view in snapshot.pipelines]
        self._searches: dict[int, list[list[int]]] = {}
        self._homes: dict[int, list[list[int]]] = {}
        """Places where a pipeline trains and that have not been tried yet."""
        self._turns: _Turns | None = None

    def distribute(self) -> None:
        shares = self._shares
        waking = [i for i, view in enumerate(self._pipelines) if view.may_wake and view.asleep and view.useful > 0]
        starving = [i for i in waking if shares[i].held == 0]
        for index in sorted(starving, key=self._queue_order):
            if not self._take(index):
                self._take_turn(index)
        served = [i for i in waking if shares[i].held > 0]
        self._fill(served, owed=True)
        self._grow([i for i in served if self._short[i] > 0 and self._pipelines[i].overdue])
        self._fill(served)
        self._occupancy.short += [self._pipelines[i].name for i in waking if shares[i].held > 0 and self._short[i] > 0]

    # ---------------------------------------------------------------------------------------------- the stages

    def _take_turn(self, index: int) -> None:
        places_K = self._kinds[index].places_K
        if not len(places_K):
            return
        if self._turns is None:
            self._turns = _Turns(self._occupancy, self._pipelines, self._shares, self._now)
        ready_K = self._turns.ready_D[places_K].max(axis=1)
        over = np.flatnonzero(ready_K <= self._now)
        if len(over):
            harm_K = self._turns.harm_D[places_K[over]].sum(axis=1)
            self._seize(index, places_K[over[int(harm_K.argmin())]].tolist(), "its turn has come")
        elif ready_K.min() < np.inf:
            kept = places_K[int(ready_K.argmin())].tolist()
            self._occupancy.take(kept)
            self._turns.ready_D[kept] = np.inf

    def _grow(self, short: list[int]) -> None:
        # The largest bundles first: small ones fit into the remaining devices, not the other way round.
        heap = [(-self._pipelines[i].bundle, *self._gap_order(i), i) for i in short]
        heapq.heapify(heap)
        while heap:
            size, _, name, index = heapq.heappop(heap)
            if self._take(index, overdue=True) and self._short[index] > 0:
                heapq.heappush(heap, (size, -self._shares[index].gap_ratio, name, index))

    def _fill(self, served: list[int], *, owed: bool = False) -> None:
        heap = [(*self._gap_order(i), i) for i in served]
        heapq.heapify(heap)
        while heap:
            _, name, index = heapq.heappop(heap)
            share = self._shares[index]
            if (self._is_owed(index) if owed else share.held < share.useful) and self._take(index):
                heapq.heappush(heap, (-share.gap_ratio, name, index))

    def _queue_order(self, index: int) -> tuple[float, str]:
        view = self._pipelines[index]
        return (self._now if view.waiting_since is None else view.waiting_since, view.name)

    def _gap_order(self, index: int) -> tuple[float, str]:
        return (-self._shares[index].gap_ratio, self._pipelines[index].name)

    # --------------------------------------------------------------------------------------------- the places

    def _take(self, index: int, *, overdue: bool = False) -> bool:
        """Gives the pipeline the cheapest place that is open or that others must yield; False if there is none.

        A pipeline without a worker, or overdue, may displace busy workers. One that is owed a bundle may displace
        workers beyond other pipelines' parts. Any other gets only idle places, while that pays.
        """
        view, share = self._pipelines[index], self._shares[index]
        below = share.held < share.part
        if not self._asleep[index] or (share.held >= view.worth and share.held and not below and not overdue):
            return False
        if self._take_home(index):
            return True
        owed = self._is_owed(index)
        reach = _BUSY if overdue or not share.held else _LENT if owed else _IDLE
        kind = self._kinds[index]
        places = self._searches.get(kind.number)
        if places is None:
            places = self._searches[kind.number] = self._places_by_cost(kind)
        while places:
            occupants = self._occupants(places[-1])
            if occupants is None:
                places.pop()
                continue
            if any(self._state_of(seat) > reach for seat in occupants):
                return False
            if share.held and min(self._away[device] for device in places[-1]) < view.stay_s:
                return False
            place = places.pop()
            if not occupants or self._may_all_yield(occupants, owed=owed):
                self._seize(index, place, "devices follow the remaining work")
                return True
        return False

    def _take_home(self, index: int) -> bool:
        """Gives the pipeline a place where it trains, if one is open or its workers must yield it.

        If the pipeline is owed a worker it may displace an idle one, even if that will have work again soon.
        """
        homes = self._homes.get(index)
        if homes is None:
            kind = self._kinds[index]
            rows = sorted(set(kind.row_D[list(self._pipelines[index].home)].tolist()) - {UNOCCUPIED}, reverse=True)
            homes = self._homes[index] = kind.places_K[rows].tolist()
        while homes:
            place = homes.pop()
            occupants = self._occupants(place)
            if occupants is None or any(self._occupancy.calm[device] for device in place):
                continue
            if all(self._leaves_home(seat, index) for seat in occupants):
                self._seize(index, place, "it trains there")
                return True
        return False

    def _leaves_home(self, seat_index: int, owner: int) -> bool:
        seat = self._occupancy.seats[seat_index]
        if seat.pipeline == owner or seat.phase != "serving":
            return False
        state = self._state_of(seat_index)
        if not self._is_owed(owner):
            return state == _IDLE
        return self._shares[seat.pipeline].surplus > 0 or (state == _LENT and self._may_yield(seat_index, owed=True))

    def _is_owed(self, index: int) -> bool:
        """Below its equal part and below its ideal share: it may take what others have beyond their part."""
        share = self._shares[index]
        return share.held < share.part and self._short[index] > 0

    def _state_of(self, seat_index: int) -> int:
        pipeline = self._occupancy.seats[seat_index].pipeline
        if self._surplus[pipeline] > 0:
            return _IDLE
        return _LENT if self._lent(pipeline) > 0 else _BUSY

    def _lent(self, pipeline: int) -> int:
        """Bundles beyond its equal part and its quota: pipelines that are owed some may take them."""
        share = self._shares[pipeline]
        return share.held - max(1, share.part, self._pipelines[pipeline].min_bundles)

    def _places_by_cost(self, kind: _Kind) -> list[list[int]]:
        """Places, the cheapest last. The caller drops those that have become unavailable."""
        occupancy = self._occupancy
        open_D = occupancy.open_D()
        occupied_D = np.array(occupancy.occupant) != UNOCCUPIED
        # Fill partly used blocks first, so that whole blocks remain for large bundles.
        free_B = np.add.reduceat(open_D, np.arange(0, len(open_D), self._block))
        cost_D = np.repeat(free_B, self._block)[: len(open_D)] / (2.0 * self._block * kind.bundle)
        cost_D = np.where(open_D, cost_D + np.where(occupied_D, _MUST_WAIT, 0.0), np.inf)
        # Of the places with a trainer, first those that stay free for longest.
        cost_D += np.where(np.isfinite(self._away_D), _HOME / (1.0 + self._away_D / 60.0) / kind.bundle, 0.0)
        cost_D += np.where(self._away_D < self._stay_s, _TOO_SHORT / kind.bundle, 0.0)
        over_served = sorted(range(len(self._shares)), key=self._gap_order, reverse=True)
        value = dict(zip(over_served, np.linspace(_SPARE, _SPARE + 1, len(over_served)).tolist(), strict=True))
        for seat_index, seat in enumerate(occupancy.seats):
            if self._may_yield(seat_index, owed=True):
                state = self._state_of(seat_index)
                price = (_SURPLUS, _BORROWED, value[seat.pipeline])[state]
                cost_D[list(seat.devices)] = price / min(len(seat.devices), kind.bundle)
        cost_D[np.array(occupancy.taken) | np.array(occupancy.calm)] = np.inf
        cost_K = cost_D[kind.places_K].sum(axis=1)
        order = np.argsort(cost_K, kind="stable")
        return kind.places_K[order[: int(np.isfinite(cost_K).sum())][::-1]].tolist()

    def _occupants(self, place: list[int]) -> set[int] | None:
        """Seats that would have to leave the place; None if a device of it is taken."""
        occupancy = self._occupancy
        found: set[int] = set()
        for device in place:
            if occupancy.taken[device]:
                return None
            occupant = occupancy.occupant[device]
            if occupant != UNOCCUPIED and not occupancy.leaving[occupant]:
                found.add(occupant)
        return found

    def _may_yield(self, seat_index: int, *, owed: bool) -> bool:
        seat = self._occupancy.seats[seat_index]
        if seat.phase != "serving" or self._occupancy.leaving[seat_index]:
            return False
        if self._surplus[seat.pipeline] > 0:
            return True
        may_go = self._spare[seat.pipeline] > 0 or (owed and self._lent(seat.pipeline) > 0)
        return may_go and seat.since + self._pipelines[seat.pipeline].turn_s <= self._now

    def _may_all_yield(self, occupants: set[int], *, owed: bool) -> bool:
        if not all(self._may_yield(seat_index, owed=owed) for seat_index in occupants):
            return False
        if len(occupants) == 1:
            return True
        givers = [self._occupancy.seats[seat_index].pipeline for seat_index in occupants]
        return all(
            givers.count(giver) <= max(self._surplus[giver], self._spare[giver], self._lent(giver) if owed else 0)
            for giver in set(givers)
        )

    def _seize(self, index: int, place: list[int], reason: str) -> None:
        occupancy = self._occupancy
        name = self._pipelines[index].name
        for seat_index in sorted(self._occupants(place) or ()):
            seat = occupancy.seats[seat_index]
            occupancy.shrink(seat_index, abort=False, reason=f"for {name}: {reason}")
            self._surplus[seat.pipeline] -= 1
            self._spare[seat.pipeline] -= 1
            self._shares[seat.pipeline].held -= 1
            if self._turns is not None:
                self._turns.ready_D[list(seat.devices)] = -np.inf
        occupancy.expand(name, as_devices(place))
        self._shares[index].held += 1
        self._asleep[index] -= 1
        self._short[index] -= 1
        if self._turns is not None:
            self._turns.ready_D[place] = np.inf


class _Turns:
    """When each device can be taken by a pipeline whose turn it is, and how much its current user needs it."""

    def __init__(
        self, occupancy: Occupancy, pipelines: tuple[PipelineView, ...], shares: list[Share], now: float
    ) -> None:
        self.ready_D = np.where(occupancy.open_D(), -np.inf, np.inf)
        self.harm_D = np.zeros_like(self.ready_D)
        for index, seat in enumerate(occupancy.seats):
            if seat.phase in ("waking", "serving") and not occupancy.leaving[index]:
                devices = list(seat.devices)
                share = shares[seat.pipeline]
                view = pipelines[seat.pipeline]
                within_quota = share.held <= view.min_bundles
                # A turn begins with service: a worker that is still waking has its whole turn left.
                begins = seat.since if seat.phase == "serving" else now
                self.ready_D[devices] = -np.inf if share.held > share.useful else begins + view.turn_s
                self.harm_D[devices] = share.ideal / share.held + (len(occupancy.taken) if within_quota else 0)
        self.ready_D[np.array(occupancy.taken) | np.array(occupancy.calm)] = np.inf


def _shares(snapshot: Snapshot, occupancy: Occupancy) -> list[Share]:
    pipelines = snapshot.pipelines
    held = [0] * len(pipelines)
    for index, seat in enumerate(occupancy.seats):
        if not occupancy.leaving[index]:
            held[seat.pipeline] += 1
    # Devices promised to a worker still belong to generation.
    free_D = ~np.array(occupancy.taken) | (np.array(occupancy.planned) != UNOCCUPIED)
    ideal = [0.0] * len(pipelines)
    part = [0] * len(pipelines)
    for devices, neighbours in _neighbourhoods(pipelines):
        weight = sum(pipelines[i].weight for i in neighbours)
        for i in neighbours:
            part[i] = int(len(devices) * pipelines[i].weight / weight / pipelines[i].bundle)
        with_work = [i for i in neighbours if pipelines[i].useful > 0]
        if not with_work:
            continue
        views = [pipelines[i] for i in with_work]
        reach_D = np.zeros_like(free_D)
        for inference in {id(view.inference): view.inference for view in views}.values():
            reach_D[np.array(inference)] = True
        bundle_P = np.array([view.bundle for view in views], dtype=float)
        cap_P = np.array([view.useful for view in views]) * bundle_P
        floor_P = np.minimum(cap_P, np.array([max(1, view.min_bundles) for view in views]) * bundle_P)
        weight_P = np.array([view.weight * max(1, view.remaining) for view in views]) * bundle_P
        ideal_P = ideal_devices(int((reach_D & free_D).sum()), weight_P, floor_P, cap_P) / bundle_P
        for index, share in zip(with_work, ideal_P.tolist(), strict=True):
            ideal[index] = share
    return [Share(held[i], ideal[i], view.useful, part[i]) for i, view in enumerate(pipelines)]


def _neighbourhoods(pipelines: tuple[PipelineView, ...]) -> list[tuple[set[DeviceId], list[int]]]:
    """Pipelines that can compete for a device, directly or through others, and all their devices."""
    by_devices: dict[tuple[DeviceId, ...], list[int]] = {}
    by_identity: dict[int, list[int]] = {}
    for index, view in enumerate(pipelines):
        members = by_identity.get(id(view.inference))
        if members is None:
            members = by_identity[id(view.inference)] = by_devices.setdefault(view.inference, [])
        members.append(index)
    groups: list[tuple[set[DeviceId], list[int]]] = []
    for devices, members in by_devices.items():
        reach, joined = set(devices), list(members)
        apart = []
        for other in groups:
            if reach.isdisjoint(other[0]):
                apart.append(other)
            else:
                reach, joined = reach | other[0], other[1] + joined
        groups = [*apart, (reach, joined)]
    return groups


def _kinds(snapshot: Snapshot) -> list[_Kind]:
    kinds: dict[tuple[int, int], _Kind] = {}
    found = []
    for view in snapshot.pipelines:
        allowed = view.inference if view.places is None else view.places
        key = (view.bundle, id(allowed))
        if key not in kinds:
            if view.places is None:
                places_K = places(snapshot.topology, view.inference, view.bundle)
            else:
                places_K = np.array(view.places, dtype=np.int64).reshape(len(view.places), view.bundle)
            row_D = np.full(snapshot.topology.device_count, UNOCCUPIED)
            row_D[places_K] = np.arange(len(places_K))[:, None]
            kinds[key] = _Kind(len(kinds), view.bundle, places_K, row_D)
        found.append(kinds[key])
    return found
