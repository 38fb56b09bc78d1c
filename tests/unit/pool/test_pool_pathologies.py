"""One test for every way an older scheduler of this kind was seen to starve, hang or thrash."""

from __future__ import annotations

import pytest

from penstock.errors import LocalProtocolError
from penstock.pool import events as ev
from penstock.pool.plan import PipelineView, Snapshot
from penstock.pool.planner import make_plan
from penstock.pool.validate import validate
from penstock.records.ids import MemberId, PipelineName
from penstock.records.pool import DeviceId, SeatId, Topology


def test_evicted_holders_are_fenced_and_their_devices_are_used_again(make_town):
    town = make_town(fence_s=5.0)
    town.open("silent")
    town.open("other")
    town.demand("silent", 1000)
    town.demand("other", 1000)
    for number in range(4):
        town.tell(ev.MemberEvicted(PipelineName("silent"), MemberId(f"silent-{number}"), "not heard for 15 s"))
    for _ in range(10):
        town.after(1)
    assert {effect.pipeline for effect in town.told(ev.FenceMember)} == {"silent"}
    assert town.awake("other") == 4


def test_a_holder_that_finished_gives_way_at_once(town):
    town.open("a")
    town.open("b")
    town.demand("a", 100)
    town.progress("a", 100)
    assert town.awake("a") == 4, "no other pipeline wants the devices: its workers may stay awake"
    town.demand("b", 100)
    assert town.awake("b") == 4


def test_a_served_pipeline_that_reports_nothing_keeps_one_worker_and_is_named(make_town):
    town = make_town(demand_lease_s=60.0)
    town.open("mute")
    town.open("other")
    town.demand("mute", 1000)
    town.demand("other", 1000)
    for completed in range(0, 900, 10):
        town.progress("other", completed)
        town.after(1)
    assert (town.awake("mute"), town.awake("other")) == (1, 3)
    warnings = [log.message for log in town.told(ev.Log)]
    assert len(warnings) == 1
    assert "pipeline mute" in warnings[0]
    town.progress("mute", 500)
    town.progress("other", 900)
    town.after(11)
    assert town.awake("mute") == 3, "one report brings it back"


def test_three_equal_pipelines_on_two_bundles_take_turns(make_town):
    town = make_town((2,))
    for name in "abc":
        town.open(name)
        town.demand(name, 1000)
    served = dict.fromkeys("abc", 0)
    for _ in range(300):
        town.after(1)
        for name in served:
            served[name] += town.awake(name)
    assert min(served.values()) >= 0.8 * max(served.values()), served


def test_a_heavy_wide_pipeline_is_not_locked_out_by_a_narrow_one(make_town):
    town = make_town((8,))
    town.open("narrow")
    town.demand("narrow", 100)
    assert town.awake("narrow") == 8
    town.open("wide", bundle=8)
    town.demand("wide", 8000)
    town.after(11)
    assert town.awake("wide") == 1
    town.after(11)
    assert town.awake("narrow") > 0, "and the narrow one gets its turn again"


def test_one_sample_left_does_not_wake_eight_engines(make_town):
    town = make_town((8,))
    town.open("a")
    town.demand("a", 1)
    assert town.awake("a") == 1


def test_both_pipelines_lost_their_workers_to_training_and_both_come_back(town):
    # The order of events that hung a peer: training preempts everything, then demand is declared again.
    town.open("p1")
    town.open("p2")
    for round in range(10):
        town.demand("p1", 8)
        town.demand("p2", 8)
        town.after(11)
        assert town.awake("p1") >= 1
        assert town.awake("p2") >= 1
        town.progress("p1", 8)
        town.progress("p2", 8)
        assert town.ask("p1", round, (0, 1)) == (0, 1)
        assert town.ask("p2", round, (2, 3)) == (2, 3)
        assert (town.awake("p1"), town.awake("p2")) == (0, 0)
        town.release("p1", round)
        town.release("p2", round)


def test_a_demand_does_not_vanish_when_it_was_looked_at(town):
    town.open("a")
    town.demand("a", 10)
    assert town.ask("a", 1, (0, 1, 2, 3)) == (0, 1, 2, 3)
    assert town.awake("a") == 0
    town.after(100)
    town.release("a", 1)
    assert town.awake("a") == 4


def test_a_hung_move_stops_no_other_pipeline(make_town):
    town = make_town()
    town.open("hung", inference=(0, 1))
    town.open("fine", inference=(2, 3))
    town.deaf = {"hung-0", "hung-1"}
    town.demand("hung", 100)
    town.demand("fine", 100)
    assert (town.awake("hung"), town.awake("fine")) == (0, 2)
    town.open("third", inference=(2, 3))
    town.demand("third", 100)
    town.after(11)
    assert (town.awake("fine"), town.awake("third")) == (1, 1)


def test_waiting_callers_do_not_keep_a_release_from_being_heard(make_town):
    town = make_town()
    for number in range(8):
        town.open(f"p{number}", inference=(0,))
    assert town.ask("p0", 1, (0,)) == (0,)
    for number in range(1, 8):
        assert town.ask(f"p{number}", 1, (0,)) is None
    for number in range(7):
        town.release(f"p{number}", 1)
        assert town.held(f"p{number + 1}", 1) == (0,)


def test_a_failed_wake_costs_its_own_pipeline_only(town):
    town.open("bad")
    town.open("good")
    town.deaf = {f"bad-{number}" for number in range(4)}
    town.demand("bad", 100)
    for order in [effect.order for effect in town.told(ev.WakeWorker)]:
        worker = next(e.member for e in town.told(ev.WakeWorker) if e.order == order)
        town.tell(ev.MoveFailed(PipelineName("bad"), worker, order.number, released=True, error="out of memory"))
    town.demand("good", 100)
    assert town.awake("good") == 4
    assert town.pool.status(town.now).shares[0].trouble.startswith("bad wakes no worker for")
    town.deaf = set()
    town.after(60)
    assert town.awake("bad") == 2, "and it is tried again"


def test_more_moves_than_any_limit_is_no_error():
    count = 2048
    inference = tuple(DeviceId(device) for device in range(count))
    views = [PipelineView(PipelineName(f"p{i}"), 1, inference, 100, count) for i in range(4)]
    snapshot = Snapshot(0.0, Topology((8,) * (count // 8)), tuple(views))
    plan = make_plan(snapshot)
    validate(snapshot, plan)
    assert len(plan.expands) == count


def test_no_pipeline_is_shrunk_for_one_that_cannot_use_the_devices(town):
    town.open("a", inference=(0, 1))
    town.open("b", inference=(2, 3))
    town.demand("a", 10)
    town.demand("b", 100_000)
    town.after(30)
    assert (town.awake("a"), town.awake("b")) == (2, 2)
    assert not town.told(ev.SleepWorker)


def test_a_pipeline_closed_in_mid_move_leaves_no_debris(make_town):
    town = make_town()
    town.open("a")
    town.open("b")
    town.demand("a", 100)
    town.after(11)
    town.deaf = {f"a-{number}" for number in range(4)}
    town.demand("b", 100)
    leaving = town.told(ev.SleepWorker)
    assert leaving
    town.tell(ev.PipelineClosed(PipelineName("b")))
    for effect in leaving:
        town.tell(ev.MoveDone(effect.pipeline, effect.member, effect.order.number))
    town.after(1)
    assert {use.pipeline for use in town.pool.status(town.now).uses} == {"a"}


def test_an_answer_to_an_old_order_is_ignored(town):
    town.deaf = {"a-0"}
    town.open("a", workers=1)
    town.demand("a", 100)
    first = town.told(ev.WakeWorker)[0].order
    town.ask("a", 1, (0, 1, 2, 3))
    before = town.pool.snapshot()
    town.tell(ev.MoveDone(PipelineName("a"), MemberId("a-0"), first.number))
    assert town.pool.snapshot() == before
    assert town.pool.orders(MemberId("a-0"))[0].action == "sleep"
    assert SeatId(1) == town.pool.orders(MemberId("a-0"))[0].seat


def test_a_pipeline_comes_back_with_other_bundles_only_when_its_old_workers_are_gone(make_town):
    """Opened with bundles of one, closed while its worker leaves, opened again with bundles of two."""
    town = make_town()
    town.deaf = {"a-0"}
    town.open("a", workers=1)
    town.demand("a", 100)
    town.tell(ev.PipelineClosed(PipelineName("a")))
    with pytest.raises(LocalProtocolError, match="still leaves"):
        town.open("a", workers=1, bundle=2)
    town.tell(ev.MemberLost(PipelineName("a"), MemberId("a-0"), "gone"))
    town.open("a", workers=1, bundle=2)
