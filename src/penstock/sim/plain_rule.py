"""The baseline rule that the planner is compared with."""

from __future__ import annotations

import heapq
import math
from collections import deque

from penstock.pool.occupancy import UNOCCUPIED, Occupancy, as_devices
from penstock.pool.places import places
from penstock.pool.plan import Plan, Snapshot
from penstock.pool.requests import serve_requests


def plain_plan(snapshot: Snapshot) -> Plan:
    """The plain gap-ratio rule, for pipelines with bundles of one size: every gap causes a move.

    Target = remaining share of the devices rounded to whole bundles, at least one; a pipeline below its target and
    its share takes a free place, or one from the pipeline that is furthest above. No cap by demand, no turns, no band.
    """
    occupancy = Occupancy(snapshot)
    serve_requests(snapshot, occupancy)
    views = snapshot.pipelines
    held = [0] * len(views)
    own: list[list[int]] = [[] for _ in views]
    for index, seat in enumerate(occupancy.seats):
        if not occupancy.leaving[index]:
            held[seat.pipeline] += 1
            if seat.phase == "serving":
                own[seat.pipeline].append(index)
    bundle = views[0].bundle
    budget = sum(
        not taken or planned != UNOCCUPIED for taken, planned in zip(occupancy.taken, occupancy.planned, strict=True)
    )
    weights = [view.remaining * bundle for view in views]
    total = sum(weights)
    if not total or not budget:
        return occupancy.plan()
    ratio = [weight / total for weight in weights]
    target = [max(1, math.floor(part * budget / bundle + 0.5)) if part else 0 for part in ratio]
    free = [
        row
        for row in places(snapshot.topology, views[0].inference, bundle).tolist()
        if all(map(occupancy.is_open, row))
    ]
    free = deque(row for row in free if not any(occupancy.calm[device] for device in row))

    asleep = [view.asleep for view in views]

    def gap(index: int) -> float:
        return ratio[index] - held[index] * bundle / budget

    takers = [(-gap(i) / ratio[i], -gap(i), views[i].name, i) for i in range(len(views)) if views[i].useful]
    heapq.heapify(takers)
    givers = [(gap(i), i) for i in range(len(views)) if own[i]]
    heapq.heapify(givers)
    while takers:
        _, _, name, taker = heapq.heappop(takers)
        if gap(taker) <= 0 or not asleep[taker] or held[taker] >= min(target[taker], views[taker].useful):
            continue
        if free:
            place = free.popleft()
        else:
            while givers and not (own[givers[0][1]] and held[givers[0][1]] > target[givers[0][1]]):
                heapq.heappop(givers)
            if not givers:
                break
            _, giver = heapq.heappop(givers)
            victim = own[giver].pop()
            occupancy.shrink(victim, abort=True, reason=f"for {name}")
            held[giver] -= 1
            place = list(occupancy.seats[victim].devices)
            heapq.heappush(givers, (gap(giver), giver))
        occupancy.expand(name, as_devices(place))
        held[taker] += 1
        asleep[taker] -= 1
        heapq.heappush(takers, (-gap(taker) / ratio[taker], -gap(taker), name, taker))
    return occupancy.plan()
