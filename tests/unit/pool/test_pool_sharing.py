"""Who gets how many workers, when."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError, LocalProtocolError
from penstock.pool import events as ev
from penstock.pool.demand import Demand
from penstock.pool.plan import PipelineView, Plan, SeatView, Snapshot
from penstock.pool.planner import make_plan
from penstock.records.ids import PipelineName
from penstock.records.pool import DeviceId, SeatId, Topology


def test_one_pipeline_gets_everything_at_once(town):
    town.open("a")
    town.demand("a", 100)
    assert town.awake("a") == 4


def test_a_count_that_changes_nothing_is_a_no_op(town):
    town.open("a")
    town.demand("a", 100)
    before = town.pool.revision
    town.tell(ev.DemandCounted(PipelineName("a"), 100, 0))
    assert town.pool.revision == before


def test_two_equal_pipelines_share_evenly(town):
    town.open("a")
    town.open("b")
    town.demand("a", 100)
    town.demand("b", 100)
    town.after(11)
    assert (town.awake("a"), town.awake("b")) == (2, 2)


def test_devices_follow_remaining_work(make_town):
    # 8 devices in bundles of 2; a has 20 left, b has 60: 1 bundle and 3.
    town = make_town((8,))
    town.open("a", bundle=2)
    town.open("b", bundle=2)
    town.demand("a", 100)
    town.progress("a", 80)
    town.demand("b", 60)
    town.after(11)
    assert (town.awake("a"), town.awake("b")) == (1, 3)


def test_weight_counts_like_work(make_town):
    town = make_town((8,))
    town.open("a", weight=3.0)
    town.open("b")
    town.demand("a", 100)
    town.demand("b", 100)
    town.after(40)
    assert (town.awake("a"), town.awake("b")) == (6, 2)


def test_one_remaining_sample_wakes_one_worker(make_town):
    town = make_town((8,))
    town.open("a", concurrency=4)
    town.demand("a", 1)
    assert town.awake("a") == 1


def test_a_quota_caps_a_pipeline(town):
    town.open("a", max_bundles=1)
    town.demand("a", 100)
    assert town.awake("a") == 1


@pytest.mark.parametrize(("remaining", "completed"), [(-1, 10), (10, 5)])
def test_a_count_that_cannot_be_is_an_error_and_changes_nothing(town, remaining, completed):
    town.open("a")
    town.demand("a", 100)
    town.progress("a", 8)
    before = town.pool.snapshot()
    with pytest.raises(LocalProtocolError, match="count both from the same ledger"):
        town.tell(ev.DemandCounted(PipelineName("a"), remaining, completed))
    assert town.pool.snapshot() == before


def test_a_count_for_a_pipeline_that_was_never_opened_is_an_error(town):
    with pytest.raises(LocalProtocolError, match="not open in the pool"):
        town.demand("a", 3)


def test_the_pace_is_that_of_a_worker_with_work():
    demand = Demand()
    demand.count(100, 0, 0, now=0.0)
    demand.count(80, 20, 2, now=10.0)
    assert demand.pace == pytest.approx(1.0)
    demand.count(0, 100, 2, now=50.0)
    demand.count(100, 100, 2, now=500.0)
    assert demand.pace == pytest.approx(1.0), "the pause between two rounds does not count"


def test_a_bundle_that_fits_nowhere_is_refused_at_the_door(make_town):
    town = make_town((2, 2))
    with pytest.raises(ConfigError, match="neighbouring"):
        town.open("a", bundle=3)


def test_a_bundle_larger_than_a_node_takes_whole_nodes(make_town):
    town = make_town((2, 2, 2, 2))
    town.open("a", bundle=4)
    town.demand("a", 100)
    assert sorted(use.devices for use in town.pool.status(0.0).uses) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_small_bundles_leave_whole_blocks_for_large_ones(make_town):
    town = make_town((8, 8))
    town.open("small", concurrency=25, workers=4)
    town.open("large", bundle=8)
    town.demand("small", 100)
    town.demand("large", 100)
    assert town.awake("large") == 1
    assert town.awake("small") == 4


# ------------------------------------------------------------------------------------------------- when a move pays

EIGHT = tuple(DeviceId(device) for device in range(8))


def plan_for(a: PipelineView, b: PipelineView, a_has: int, b_has: int) -> Plan:
    """Eight devices, the first for workers of a, the next for workers of b, all of them serving for long."""
    owners = [0] * a_has + [1] * b_has
    seats = tuple(SeatView(SeatId(n), owner, (EIGHT[n],), "serving", 0.0) for n, owner in enumerate(owners))
    return make_plan(Snapshot(1000.0, Topology((8,)), (a, b), seats))


def view(name: str, remaining: int, **more) -> PipelineView:
    values = {"useful": min(8, remaining), "worth": 1, "overdue": False, **more}
    return PipelineView(name=PipelineName(name), bundle=1, inference=EIGHT, remaining=remaining, **values)


def test_idle_devices_are_taken_up_to_the_equal_part_whatever_it_costs():
    assert len(plan_for(view("a", 100), view("b", 0), 1, 0).expands) == 3


def test_beyond_the_equal_part_idle_devices_are_taken_while_that_pays():
    assert len(plan_for(view("a", 100, worth=6), view("b", 0), 1, 0).expands) == 5


def test_workers_without_work_are_replaced_while_that_pays():
    plan = plan_for(view("a", 100, worth=6), view("b", 0), 4, 4)
    assert (len(plan.shrinks), len(plan.expands)) == (2, 2)
    assert not plan_for(view("a", 100, worth=4), view("b", 0), 4, 4)


def test_a_pipeline_below_its_share_takes_busy_workers_only_when_it_was_so_for_long():
    plan = plan_for(view("a", 100, worth=8), view("b", 300, worth=8), 4, 4)
    assert not plan
    assert plan.short == ("b",)
    later = plan_for(view("a", 100, worth=8), view("b", 300, worth=1, overdue=True), 4, 4)
    assert (len(later.shrinks), len(later.expands), later.short) == (2, 2, ())


def test_what_others_have_beyond_their_part_is_given_back_at_once():
    plan = plan_for(view("a", 100, worth=8), view("b", 100), 6, 2)
    assert (len(plan.shrinks), len(plan.expands)) == (2, 2)
    assert not plan_for(view("a", 100, worth=8), view("b", 20), 6, 2), "it is below its part, but not below its share"


def test_a_pipeline_stands_where_it_trains():
    plan = plan_for(view("a", 100, home=EIGHT[4:6]), view("b", 0), 0, 0)
    assert sorted(expand.devices for expand in plan.expands) == [(0,), (1,), (4,), (5,)]


@pytest.mark.parametrize(("away_s", "borrowed"), [(40.0, 2), (20.0, 0)])
def test_where_others_train_a_worker_is_woken_only_if_they_stay_away_for_long(away_s, borrowed):
    a = view("a", 100, worth=6, stay_s=30.0)
    b = view("b", 0, lingers=True, home=EIGHT[6:], away_s=away_s)
    assert len(plan_for(a, b, 4, 2).expands) == borrowed


def test_no_worker_lingers_where_another_pipeline_trains():
    idle = view("a", 0, lingers=True)
    assert not plan_for(idle, view("b", 100), 4, 3).shrinks
    plan = plan_for(idle, view("b", 100, home=EIGHT[:2]), 4, 3)
    assert [shrink.seat for shrink in plan.shrinks] == [0]
    assert [expand.devices for expand in plan.expands] == [(0,)]


def test_a_pipeline_without_a_worker_never_waits_for_a_move_to_pay():
    assert len(plan_for(view("a", 100), view("b", 1), 8, 0).expands) == 1


def carry_out(town, took_s: float) -> None:
    """All workers carry out what is ordered, which takes its time."""
    town.now += took_s
    for member in town.pool.members():
        for order in town.pool.orders(member):
            town.tell(ev.MoveDone(PipelineName(member[0]), member, order.number))


def test_what_pays_is_measured_from_wakes_and_completed_samples(make_town):
    """Waking takes 2 s and a worker makes one sample a second: with payback 10, each worker needs 20 samples."""
    town = make_town((8,), payback=10.0)
    town.deaf = {f"{name}-{number}" for name in "ab" for number in range(8)}
    town.open("a")
    town.open("b", workers=1)
    town.demand("a", 8)
    carry_out(town, 2.0)
    assert town.awake("a") == 8, "nothing is known yet about what waking costs"
    town.now += 1.0
    town.progress("a", 8)
    town.ask("b", 0, EIGHT)
    carry_out(town, 1.0)
    town.now += 100.0
    town.release("b", 0)
    town.demand("a", 120)
    town.after(1)
    carry_out(town, 2.0)
    town.after(1)
    assert town.awake("a") + len([o for m in town.pool.members() for o in town.pool.orders(m)]) == 6
