"""Planning time, from 2 pipelines on 4 devices to 256 on 4096, beside the plain gap-ratio loop.

steady: every pipeline has its share and nothing is to be done. cold: all devices idle, all pipelines ask. drift: equal
shares, remaining work from 1 to P. hog: one pipeline holds everything, all others ask. Each trains on half of its
equal part of the devices.

The peer is the textbook loop, written for this benchmark: one activation at a time, everything recomputed after each.
It gets a time cap per case; where it does not finish, the cap is what is shown. Times are CPU time of the planning
thread, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.pool.places import places
from penstock.pool.plan import PipelineView, SeatView, Snapshot
from penstock.pool.planner import make_plan
from penstock.pool.validate import validate
from penstock.records.ids import PipelineName
from penstock.records.pool import DeviceId, SeatId, Topology

SIZES = ((2, 4), (16, 64), (64, 512), (256, 4096))
BUNDLES = (1, 2, 8)
CASES = ("steady", "cold", "drift", "hog")
NOW = 1000.0
TARGET_MS = 50.0


def make_snapshot(pipelines: int, devices: int, bundle: int, case: str) -> Snapshot:
    topology = Topology((8,) * (devices // 8) if devices >= 8 else (devices,))
    inference = tuple(DeviceId(device) for device in range(devices))
    rows = [tuple(DeviceId(device) for device in row) for row in places(topology, inference, bundle).tolist()]
    owners: list[int] = []
    if case == "hog":
        owners = [0] * len(rows)
    elif case != "cold":
        owners = [number % pipelines for number in range(len(rows))]
    part = devices // pipelines
    views = tuple(
        PipelineView(
            name=PipelineName(f"p{number:04d}"),
            bundle=bundle,
            inference=inference,
            remaining=(number + 1) * 100 if case == "drift" else 10_000,
            useful=len(rows),
            waiting_since=None if number in set(owners) else 0.0,
            home=inference[number * part : number * part + (part + 1) // 2],
        )
        for number in range(pipelines)
    )
    seats = tuple(
        SeatView(SeatId(number), owner, row, "serving", 0.0)
        for number, (owner, row) in enumerate(zip(owners, rows, strict=False))
    )
    # All are overdue, and every move pays: the most work a plan can be.
    return Snapshot(NOW, topology, views, seats)


def plain_loop(snapshot: Snapshot, cap_s: float) -> tuple[int, bool]:
    """The plain gap-ratio rule as it is usually written; returns activations, and whether it finished in time."""
    end = time.thread_time() + cap_s
    views = snapshot.pipelines
    bundle = {view.name: view.bundle for view in views}
    active: dict[str, list[tuple[int, ...]]] = {view.name: [] for view in views}
    for seat in snapshot.seats:
        active[views[seat.pipeline].name].append(tuple(seat.devices))
    idle = set(range(snapshot.topology.device_count)) - {d for seat in snapshot.seats for d in seat.devices}
    rows = {view.name: places(snapshot.topology, view.inference, view.bundle).tolist() for view in views}
    budget = len(idle) + sum(len(place) for held in active.values() for place in held)
    weight = {view.name: view.remaining * view.bundle for view in views}
    total = sum(weight.values())
    ratio = {name: weight[name] / total for name in weight}
    target = {
        name: max(bundle[name], math.floor(ratio[name] * budget / bundle[name] + 0.5) * bundle[name]) for name in ratio
    }
    moved: set[tuple[int, ...]] = set()
    activations = 0
    while True:
        gap = {name: ratio[name] - len(active[name]) * bundle[name] / budget for name in ratio}
        takers = [name for name in gap if gap[name] > 0 and len(active[name]) * bundle[name] < target[name]]
        takers.sort(key=lambda name: (-gap[name] / ratio[name], -gap[name], name))
        givers = [name for name in gap if gap[name] < 0 and len(active[name]) * bundle[name] > target[name]]
        givers.sort(key=lambda name: (gap[name], name))
        done = False
        for taker in takers:
            best = None
            for row in rows[taker]:
                if time.thread_time() > end:
                    return activations, False
                missing = [device for device in row if device not in idle]
                donors = [
                    (giver, place)
                    for giver in givers
                    for place in active[giver]
                    if place not in moved and any(device in place for device in missing)
                ]
                covered = {device for _, place in donors for device in place}
                if all(device in covered for device in missing) and (best is None or len(donors) < len(best[1])):
                    best = (tuple(row), donors)
                    if not donors:
                        break
            if best is not None:
                row, donors = best
                for giver, place in donors:
                    active[giver].remove(place)
                    idle.update(place)
                idle.difference_update(row)
                active[taker].append(row)
                moved.add(row)
                activations += 1
                done = True
                break
        if not done:
            return activations, True


def best_ms(work, repeats: int) -> float:
    best = math.inf
    for _ in range(repeats):
        began = time.thread_time()
        work()
        best = min(best, time.thread_time() - began)
    return best * 1000.0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="planner", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, and the peer only where it is fast")
    options = parser.parse_args(argv)
    cap_s = 0.5 if options.quick else 5.0
    repeats = 3 if options.quick else 7
    table = Table(title="planning time, best of several (ms)")
    for column in ("P x D", "bundle", "case", "moves", "plan", "validate", "plain loop", "ratio"):
        table.add_column(column, justify="left" if column == "case" else "right")
    figures = []
    slowest_ms = 0.0
    for pipelines, devices in SIZES:
        for bundle in BUNDLES:
            if bundle > devices:
                continue
            for case in CASES:
                snapshot = make_snapshot(pipelines, devices, bundle, case)
                plan = make_plan(snapshot)
                ours_ms = best_ms(lambda: make_plan(snapshot), repeats)  # noqa: B023 - called at once
                check_ms = best_ms(lambda: validate(snapshot, plan), repeats)  # noqa: B023
                began = time.thread_time()
                _, finished = plain_loop(snapshot, cap_s)
                peer_ms = (time.thread_time() - began) * 1000.0
                if devices == SIZES[-1][1]:
                    slowest_ms = max(slowest_ms, ours_ms)
                moves = len(plan.shrinks) + len(plan.expands)
                more = "" if finished else "> "
                times = (f"{ours_ms:.2f}", f"{check_ms:.2f}", f"{more}{peer_ms:.2f}", f"{more}{peer_ms / ours_ms:.1f}")
                table.add_row(f"{pipelines}x{devices}", str(bundle), case, str(moves), *times)
                figures.append(
                    {
                        "name": f"plan {pipelines}x{devices} bundle {bundle} {case}",
                        "unit": "ms",
                        "ours": ours_ms,
                        "peer": peer_ms,
                        "peer_name": "plain gap-ratio loop" + ("" if finished else f" (stopped at {cap_s:g} s)"),
                        "ratio": peer_ms / ours_ms,
                    }
                )
    console = Console(width=120)
    console.print(table)
    console.print(f"slowest 256 x 4096 case: {slowest_ms:.1f} ms (target: under {TARGET_MS:g} ms)")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
