"""Any snapshot: the plan is valid, deterministic, makes no needless move, and settles."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidTransition
from penstock.pool.places import places
from penstock.pool.plan import Expand, PipelineView, Plan, RequestView, SeatPhase, SeatView, Shrink, Snapshot
from penstock.pool.planner import make_plan
from penstock.pool.validate import validate
from penstock.records.ids import PipelineName
from penstock.records.pool import DeviceId, Priority, SeatId, Topology
from profiles import examples

NOW = 1000.0
PHASES: tuple[SeatPhase, ...] = ("serving", "serving", "waking", "leaving", "fenced")


@st.composite
def snapshots(draw: st.DrawFn, *, requests: bool = True) -> Snapshot:
    topology = Topology(tuple(draw(st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=4))))
    devices = [DeviceId(device) for device in range(topology.device_count)]
    views: list[PipelineView] = []
    for number in range(draw(st.integers(1, 6))):
        inference = tuple(devices)
        if draw(st.booleans()):
            inference = tuple(sorted(draw(st.sets(st.sampled_from(devices), min_size=1))))
        bundle = draw(st.sampled_from([1, 1, 2, 4]))
        if not len(places(topology, inference, bundle)):
            bundle = 1
        remaining = draw(st.integers(0, 1000))
        views.append(
            PipelineView(
                name=PipelineName(f"p{number}"),
                bundle=bundle,
                inference=inference,
                remaining=remaining,
                useful=draw(st.integers(1, 32)) if remaining else 0,
                asleep=draw(st.sampled_from([0, 1, 3, 32])),
                weight=draw(st.sampled_from([0.5, 1.0, 4.0])),
                min_bundles=draw(st.integers(0, 2)),
                waiting_since=draw(st.sampled_from([None, 900.0, 990.0])),
                worth=draw(st.sampled_from([1, 3, 32])),
                overdue=draw(st.booleans()),
                may_wake=draw(st.integers(0, 4)) > 0,
            )
        )
    free = set(devices)
    held: list[DeviceId] = []
    seats: list[SeatView] = []
    for device in devices:
        if draw(st.integers(0, 9)) == 0:
            free.discard(device)
            held.append(device)
    for _ in range(draw(st.integers(0, 12))):
        pipeline = draw(st.integers(0, len(views) - 1))
        rows = places(topology, views[pipeline].inference, views[pipeline].bundle).tolist()
        place = tuple(DeviceId(device) for device in draw(st.sampled_from(rows)))
        if free.issuperset(place):
            free.difference_update(place)
            phase = draw(st.sampled_from(PHASES))
            since = draw(st.sampled_from([900.0, 985.0, 999.0]))
            seats.append(SeatView(SeatId(len(seats) + 1), pipeline, place, phase, since))
    waiting: list[RequestView] = []
    clearing = {device for seat in seats for device in seat.devices if seat.phase in ("leaving", "fenced")}
    for number in range(draw(st.integers(0, 3)) if requests else 0):
        among = tuple(sorted(draw(st.sets(st.sampled_from(devices), min_size=1, max_size=4))))
        priority = draw(st.sampled_from([Priority.INITIALISATION, Priority.TRAINING, Priority.SCORING]))
        since = draw(st.sampled_from([900.0, 999.0]))
        assigned = among if clearing.issuperset(among) and draw(st.booleans()) else ()
        clearing.difference_update(assigned)
        waiting.append(RequestView(number, priority, among, len(among), since, assigned))
    return Snapshot(NOW, topology, tuple(views), tuple(seats), tuple(held), tuple(waiting))


def carried_out(snapshot: Snapshot, plan: Plan) -> Snapshot:
    """The same moment with every move of the plan done, and every leaver gone."""
    gone = {shrink.seat for shrink in plan.shrinks}
    seats = [seat for seat in snapshot.seats if seat.seat not in gone and seat.phase not in ("leaving", "fenced")]
    index = {view.name: number for number, view in enumerate(snapshot.pipelines)}
    asleep = [view.asleep for view in snapshot.pipelines]
    for expand in plan.expands:
        asleep[index[expand.pipeline]] -= 1
        seats.append(SeatView(SeatId(1000 + len(seats)), index[expand.pipeline], expand.devices, "serving", 900.0))
    granted = {grant.request: grant.devices for grant in plan.grants}
    held = snapshot.held + tuple(device for devices in granted.values() for device in devices)
    waiting = tuple(request for request in snapshot.requests if request.request not in granted)
    views = tuple(
        msgspec.structs.replace(view, asleep=left) for view, left in zip(snapshot.pipelines, asleep, strict=True)
    )
    return msgspec.structs.replace(
        snapshot, pipelines=views, seats=tuple(seats), held=tuple(sorted(held)), requests=waiting
    )


@settings(max_examples=examples(150), deadline=None)
@given(snapshots())
def test_every_plan_is_valid_and_the_same_again(snapshot: Snapshot):
    plan = make_plan(snapshot)
    validate(snapshot, plan)
    assert make_plan(msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=Snapshot)) == plan


@settings(max_examples=examples(150), deadline=None)
@given(snapshots())
def test_workers_are_taken_only_for_a_pipeline_that_needs_them(snapshot: Snapshot):
    plan = make_plan(snapshot)
    wanted = {device for move in (*plan.expands, *plan.grants) for device in move.devices}
    seats = {seat.seat: seat for seat in snapshot.seats}
    assert all(wanted & set(seats[shrink.seat].devices) for shrink in plan.shrinks)


@settings(max_examples=examples(150), deadline=None)
@given(snapshots(requests=False))
def test_once_all_are_served_plans_come_to_rest(snapshot: Snapshot):
    """Hysteresis: at the same demand the moves end after a few rounds, and no device goes back and forth."""
    everyone = [msgspec.structs.replace(view, may_wake=True, asleep=32) for view in snapshot.pipelines]
    snapshot = msgspec.structs.replace(snapshot, pipelines=tuple(everyone))
    rounds_since_all_served = 0
    for _ in range(20):
        plan = make_plan(snapshot)
        if not plan:
            return
        served = {seat.pipeline for seat in snapshot.seats if seat.phase in ("serving", "waking")}
        if all(number in served for number, view in enumerate(snapshot.pipelines) if view.useful):
            rounds_since_all_served += 1
        assert rounds_since_all_served <= 4, "plans go on although all are served"
        snapshot = carried_out(snapshot, plan)


@settings(max_examples=examples(100), deadline=None)
@given(snapshots(), st.data())
def test_the_validator_refuses_a_plan_that_was_tampered_with(snapshot: Snapshot, data: st.DataObject):
    plan = make_plan(snapshot)
    view = data.draw(st.sampled_from(snapshot.pipelines))
    busy = set(snapshot.held)
    busy.update(d for seat in snapshot.seats for d in seat.devices if seat.phase in ("serving", "waking"))
    busy -= {d for seat in snapshot.seats for d in seat.devices if seat.seat in {s.seat for s in plan.shrinks}}
    wrong = []
    if busy:
        wrong.append(
            msgspec.structs.replace(plan, expands=(*plan.expands, Expand(view.name, (min(busy),) * view.bundle)))
        )
    if plan.expands:
        first = plan.expands[0]
        wrong.append(msgspec.structs.replace(plan, expands=(*plan.expands, first)))
        wrong.append(msgspec.structs.replace(plan, expands=(Expand(first.pipeline, (*first.devices, DeviceId(999))),)))
    if plan.shrinks:
        wrong.append(msgspec.structs.replace(plan, shrinks=(*plan.shrinks, plan.shrinks[0])))
        wrong.append(msgspec.structs.replace(plan, shrinks=()))
    if plan.grants:
        wrong.append(msgspec.structs.replace(plan, grants=(*plan.grants, plan.grants[0])))
    if plan.withdrawals:
        wrong.append(msgspec.structs.replace(plan, withdrawals=()))
        wrong.append(msgspec.structs.replace(plan, withdrawals=plan.withdrawals * 2))
    wrong.append(msgspec.structs.replace(plan, shrinks=(*plan.shrinks, Shrink(SeatId(777), False, ""))))
    for tampered in wrong:
        with pytest.raises(InvalidTransition):
            validate(snapshot, tampered)
