"""Requests above generation: classes, order, atomic exchange, cancelling, time limits."""

from __future__ import annotations

import pytest

from penstock.errors import InvalidTransition, LocalProtocolError, Stale
from penstock.pool import events as ev
from penstock.pool.plan import Grant, Plan, RequestView, SeatView, Snapshot, Withdraw
from penstock.pool.validate import validate
from penstock.records.ids import MemberId, PipelineName
from penstock.records.pool import DeviceId, Priority, SeatId, Topology


def test_training_takes_devices_from_generation_by_abort(town):
    town.open("a")
    town.demand("a", 100)
    assert town.ask("a", 1, (0, 1)) == (0, 1)
    assert [(e.order.devices, e.order.abort) for e in town.told(ev.SleepWorker)] == [((0,), True), ((1,), True)]
    assert town.awake("a") == 2


def test_a_grant_waits_until_every_device_is_verified_free(town):
    town.open("a")
    town.demand("a", 100)
    town.deaf = {"a-0"}
    assert town.ask("a", 1, (0, 1)) is None
    order = town.pool.orders(MemberId("a-0"))[0]
    town.tell(ev.MoveDone(PipelineName("a"), MemberId("a-0"), order.number))
    assert town.held("a", 1) == (0, 1)


def test_training_is_never_preempted(town):
    town.open("a")
    town.open("b")
    assert town.ask("a", 1, (0, 1), priority=Priority.SCORING)
    assert town.ask("b", 1, (1, 2), priority=Priority.INITIALISATION) is None
    town.release("a", 1)
    assert town.held("b", 1) == (1, 2)


def test_classes_are_strict_whatever_the_arrival(town):
    town.open("a")
    assert town.ask("a", 1, (0,))
    for number, priority in enumerate((Priority.SCORING, Priority.TRAINING, Priority.INITIALISATION)):
        town.open(f"p{number}")
        town.now += 1
        assert town.ask(f"p{number}", 1, (0,), priority=priority) is None
    town.release("a", 1)
    assert town.held("p2", 1)
    town.release("p2", 1)
    assert town.held("p1", 1)
    town.release("p1", 1)
    assert town.held("p0", 1)


def test_a_plan_that_passes_over_a_class_is_refused():
    def view(number: int, priority: Priority) -> RequestView:
        return RequestView(number, priority, (DeviceId(0), DeviceId(1)), 1, 0.0)

    waiting = (view(1, Priority.SCORING), view(2, Priority.TRAINING))
    snapshot = Snapshot(0.0, Topology((2,)), (), requests=waiting)
    validate(snapshot, Plan(grants=(Grant(2, (DeviceId(0),)), Grant(1, (DeviceId(1),)))))
    with pytest.raises(InvalidTransition, match="device 0 to request 1 for scoring while training waits for it"):
        validate(snapshot, Plan(grants=(Grant(1, (DeviceId(0),)),)))


def test_a_plan_that_takes_a_promise_back_without_need_or_leaves_it_in_the_way_is_refused():
    devices = DeviceId(0), DeviceId(1)
    seat = SeatView(SeatId(1), -1, (DeviceId(0),), "leaving", 0.0)
    scoring = RequestView(1, Priority.SCORING, devices, 1, 0.0, assigned=(DeviceId(0),))
    training = RequestView(2, Priority.TRAINING, devices[:1], 1, 1.0)
    snapshot = Snapshot(1.0, Topology((2,)), (), (seat,), requests=(scoring, training))
    take_back, grant = (Withdraw(1),), Grant(2, devices[:1], (SeatId(1),))
    validate(snapshot, Plan(withdrawals=take_back, grants=(grant,)))
    validate(snapshot, Plan(withdrawals=take_back, grants=(grant, Grant(1, devices[1:]))))
    wrong = {
        "device 0 to request 1 for scoring while training waits for it": Plan(),
        "which belongs to request 1": Plan(grants=(grant,)),
        "from request 2, which has none": Plan(withdrawals=(Withdraw(2),)),
        "from request 1, which has none": Plan(withdrawals=take_back * 2, grants=(grant,)),
    }
    for reason, plan in wrong.items():
        with pytest.raises(InvalidTransition, match=reason):
            validate(snapshot, plan)
    alone = Snapshot(1.0, Topology((2,)), (), (seat,), requests=(scoring,))
    with pytest.raises(InvalidTransition, match="no higher class needs them"):
        validate(alone, Plan(withdrawals=take_back))


def test_a_pipeline_that_is_closed_is_told_so(town):
    town.open("a")
    town.tell(ev.PipelineClosed(PipelineName("a")))
    with pytest.raises(Stale, match="'a' is closed: it gets no more devices"):
        town.ask("a", 1, (0,), priority=Priority.INITIALISATION)


def test_a_lower_class_cannot_have_what_a_higher_one_waits_for(town):
    town.open("a")
    town.open("b")
    town.open("c")
    assert town.ask("a", 1, (1,))
    assert town.ask("b", 1, (0, 1), priority=Priority.TRAINING) is None
    assert town.ask("c", 1, (0,), priority=Priority.SCORING) is None
    town.release("a", 1)
    assert town.held("b", 1) == (0, 1)
    assert town.held("c", 1) is None


def test_within_a_class_one_may_overtake_until_patience_ends(make_town):
    town = make_town()
    for name in "abcd":
        town.open(name)
    assert town.ask("a", 1, (1,))
    assert town.ask("b", 1, (0, 1)) is None
    assert town.ask("c", 1, (0,)) == (0,), "device 0 would only have stood idle"
    town.release("c", 1)
    town.after(town.pool.settings.patience_s)
    assert town.ask("d", 1, (0,)) is None, "now the first in line keeps what it needs"
    town.release("a", 1)
    assert town.held("b", 1) == (0, 1)
    town.release("b", 1)
    assert town.held("d", 1) == (0,)


def test_a_steady_stream_of_small_requests_does_not_starve_a_large_one(make_town):
    town = make_town()
    town.open("large")
    town.open("small")
    assert town.ask("small", 0, (0,))
    assert town.ask("large", 1, (0, 1, 2, 3)) is None
    for number in range(1, 100):
        town.ask("small", number, (number % 4,))
        town.after(1)
        town.release("small", number - 1) if town.held("small", number - 1) else None
        if town.held("large", 1):
            break
    assert town.held("large", 1) == (0, 1, 2, 3)
    assert town.now <= town.pool.settings.patience_s + 2


def test_the_pool_chooses_when_the_request_leaves_a_choice(town):
    town.open("a")
    assert town.ask("a", 1, (0, 1, 2, 3), count=2) == (0, 1)
    assert town.ask("a", 2, (0, 1, 2, 3), count=2) == (2, 3)


def test_a_choice_falls_on_devices_that_disturb_no_pipeline(town):
    town.open("a", inference=(0, 1))
    town.demand("a", 100)
    assert town.ask("a", 1, (0, 1, 2, 3), count=2) == (2, 3)
    assert not town.told(ev.SleepWorker)


def test_release_and_request_are_one_step(town):
    town.open("a")
    town.open("b")
    assert town.ask("a", 1, (0, 1))
    assert town.ask("b", 1, (0, 1), priority=Priority.SCORING) is None
    assert town.ask("a", 2, (0, 1), priority=Priority.INITIALISATION, release=1) == (0, 1)
    assert town.held("b", 1) is None
    assert town.held("a", 1) is None


def test_exchanging_what_one_does_not_hold_changes_nothing(town):
    town.open("a")
    assert town.ask("a", 1, (0,))
    before = town.pool.snapshot()
    with pytest.raises(LocalProtocolError, match="does not hold"):
        town.ask("a", 2, (1,), release=7)
    assert town.pool.snapshot() == before


def test_the_same_request_again_is_the_same_request(town):
    town.open("a")
    assert town.ask("a", 1, (0,))
    before = town.pool.revision
    assert town.ask("a", 1, (0,)) == (0,)
    assert town.pool.revision == before
    town.release("a", 1)
    with pytest.raises(Stale, match="has ended"):
        town.ask("a", 1, (0,))


def test_a_request_ends_at_its_time_limit(town):
    town.open("a")
    town.open("b")
    town.ask("a", 1, (0,))
    assert town.ask("b", 1, (0,), timeout_s=5.0) is None
    town.after(5)
    assert [(e.member, e.kind) for e in town.told(ev.RejectRequest)] == [("b-trainer", "timed_out")]
    town.release("a", 1)
    assert town.held("b", 1) is None


def test_a_cancelled_request_lets_the_next_one_in(town):
    town.open("a")
    town.open("b")
    town.demand("a", 100)
    town.deaf = {"a-0", "a-1", "a-2", "a-3"}
    assert town.ask("a", 1, (0, 1, 2, 3)) is None
    assert town.ask("b", 1, (0,)) is None
    town.tell(ev.RequestCancelled(PipelineName("a"), MemberId("a-trainer"), 1))
    assert [(e.member, e.kind) for e in town.told(ev.RejectRequest)] == [("a-trainer", "cancelled")]
    order = town.pool.orders(MemberId("a-0"))[0]
    town.tell(ev.MoveDone(PipelineName("a"), MemberId("a-0"), order.number))
    assert town.held("b", 1) == (0,)


def test_generation_does_not_ask_for_devices(town):
    town.open("a")
    with pytest.raises(LocalProtocolError, match="declare demand"):
        town.ask("a", 1, (0,), priority=Priority.GENERATION)


def test_no_worker_is_woken_where_a_request_waits(town):
    town.open("a")
    town.open("b")
    town.ask("a", 1, (1,))
    assert town.ask("b", 1, (0, 1)) is None
    town.demand("a", 100)
    assert sorted(e.order.devices for e in town.told(ev.WakeWorker)) == [(2,), (3,)]


def leave(town, member: str) -> None:
    """A worker that did not answer carries out its order after all."""
    town.deaf.discard(member)
    order = town.pool.orders(MemberId(member))[0]
    town.tell(ev.MoveDone(PipelineName(member.rsplit("-", 1)[0]), MemberId(member), order.number))


@pytest.fixture
def leaving(town):
    """Pipeline `a` generates on all four devices, and its workers are slow to leave."""
    town.open("a")
    town.demand("a", 100)
    for name in "bcdef":
        town.open(name)
    town.deaf = {"a-0", "a-1", "a-2", "a-3"}
    return town


def test_a_promise_passes_to_a_higher_class_that_comes_before_it_is_kept(leaving):
    assert leaving.ask("b", 1, (0,), priority=Priority.SCORING) is None
    assert leaving.ask("c", 1, (0,), priority=Priority.TRAINING) is None
    assert leaving.ask("d", 1, (0,), priority=Priority.INITIALISATION) is None
    leave(leaving, "a-0")
    assert (leaving.held("d", 1), leaving.held("c", 1), leaving.held("b", 1)) == ((0,), None, None)
    leaving.release("d", 1)
    assert (leaving.held("c", 1), leaving.held("b", 1)) == ((0,), None)
    leaving.release("c", 1)
    assert leaving.held("b", 1) == (0,)


def test_what_is_held_and_what_the_same_class_was_promised_stays(leaving):
    assert leaving.ask("b", 1, (0,)) is None
    assert leaving.ask("c", 1, (0,)) is None
    leave(leaving, "a-0")
    assert leaving.held("b", 1) == (0,)
    assert leaving.ask("d", 1, (0,), priority=Priority.INITIALISATION) is None
    assert leaving.held("b", 1) == (0,)


def test_a_request_that_lost_its_promise_keeps_its_place_and_its_age(leaving):
    assert leaving.ask("b", 1, (0, 1), priority=Priority.SCORING) is None
    leaving.after(20)
    assert leaving.ask("c", 1, (0,), priority=Priority.SCORING) is None
    assert leaving.ask("d", 1, (0, 1), priority=Priority.INITIALISATION) is None
    leave(leaving, "a-0")
    leave(leaving, "a-1")
    assert leaving.held("d", 1) == (0, 1)
    leaving.after(leaving.pool.settings.patience_s - 20)
    assert leaving.ask("d", 2, (1,), release=1) == (1,)
    assert leaving.held("c", 1) is None, "b has waited its patience and is not overtaken on device 0 any more"
    leaving.release("d", 2)
    assert leaving.held("b", 1) == (0, 1)


def test_a_request_that_lost_its_promise_still_ends_at_its_time_limit(leaving):
    assert leaving.ask("b", 1, (0,), priority=Priority.SCORING, timeout_s=20.0) is None
    leaving.after(15)
    assert leaving.ask("c", 1, (0,)) is None
    leaving.after(4)
    assert not leaving.told(ev.RejectRequest)
    leaving.after(1)
    assert [(e.member, e.kind) for e in leaving.told(ev.RejectRequest)] == [("b-trainer", "timed_out")]


def test_a_promise_is_also_lost_to_a_higher_class_that_has_to_wait_for_more(leaving):
    assert leaving.ask("c", 1, (1,)) is None
    leave(leaving, "a-1")
    assert leaving.held("c", 1) == (1,)
    assert leaving.ask("b", 1, (0,), priority=Priority.SCORING) is None
    assert leaving.ask("d", 1, (0, 1), priority=Priority.INITIALISATION) is None
    leave(leaving, "a-0")
    assert leaving.held("b", 1) is None, "nothing of a lower class comes in between"
    leaving.release("c", 1)
    assert leaving.held("d", 1) == (0, 1)


def test_what_a_lost_promise_leaves_over_goes_to_others(leaving):
    assert leaving.ask("b", 1, (0, 1), priority=Priority.SCORING) is None
    assert leaving.ask("c", 1, (0,)) is None
    assert leaving.ask("e", 1, (1,), priority=Priority.TRAINING) is None
    leave(leaving, "a-1")
    assert leaving.held("e", 1) == (1,)


def test_a_request_with_a_choice_that_lost_its_promise_is_promised_another_place(leaving):
    assert leaving.ask("b", 1, (0, 1), count=1, priority=Priority.SCORING) is None
    assert leaving.ask("c", 1, (0,)) is None
    leave(leaving, "a-1")
    assert leaving.held("b", 1) == (1,)


def test_a_choice_falls_on_devices_that_are_not_promised(leaving):
    assert leaving.ask("b", 1, (0,), priority=Priority.SCORING) is None
    leaving.deaf = {"a-0"}
    assert leaving.ask("c", 1, (0, 1), count=1) == (1,)
    leave(leaving, "a-0")
    assert leaving.held("b", 1) == (0,)
