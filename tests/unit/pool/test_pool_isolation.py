"""Deadlines, rollback, fences, silence, restart: what happens when a worker does not answer."""

from __future__ import annotations

import re

import pytest

from penstock.errors import Stale
from penstock.pool import events as ev
from penstock.pool.pool import Pool
from penstock.pool.settings import PoolSection
from penstock.records.ids import MemberId, PipelineName
from penstock.records.pool import DeviceId, Topology

A, A0 = PipelineName("a"), MemberId("a-0")


def times(town) -> tuple[float, float, float]:
    settings = town.pool.settings
    return settings.wake_s + settings.report_s, settings.sleep_s + settings.report_s, settings.fence_s


def test_a_late_wake_is_rolled_back(make_town):
    town = make_town()
    town.open("a", workers=1)
    town.deaf = {"a-0"}
    town.demand("a", 100)
    wake_s, _, _ = times(town)
    town.after(wake_s)
    order = town.pool.orders(A0)[0]
    assert (order.action, order.abort) == ("sleep", True)
    town.tell(ev.MoveDone(A, A0, order.number))
    assert town.pool.orders(A0) == ()
    town.deaf.clear()
    town.after(town.pool.settings.bench_s)
    assert town.awake("a") == 1


def test_an_engine_that_has_to_be_started_has_so_much_longer_to_wake(make_town):
    town = make_town()
    town.open("a", workers=1, start_s=600.0)
    town.deaf = {"a-0"}
    town.demand("a", 100)
    order = town.pool.orders(A0)[0]
    assert order.within_s == 600.0 + town.pool.settings.wake_s
    wake_s, _, _ = times(town)
    town.after(600.0, step_s=10.0)
    assert town.pool.orders(A0) == (order,)
    town.tell(ev.ControllerRestarted())
    town.after(600.0 + wake_s - 1.0, step_s=1.0)
    assert town.pool.orders(A0) == (order,), "after a restart the whole time is allowed again"
    town.after(1.0)
    assert town.pool.orders(A0)[0].action == "sleep"


def test_a_resumed_run_finds_all_devices_free_and_its_past_is_replayed_by_the_settings_of_its_time(make_town):
    town = make_town((4,), turn_s=10.0)
    town.open("a")
    town.demand("a", 100)
    town.open("b")
    assert town.ask("b", 1, (0,)) == (0,)
    last = town.told(ev.WakeWorker)[-1].order.number
    town.tell(ev.SessionBegan(Topology((2,)), PoolSection(turn_s=1e6)))
    assert (town.pool.status(town.now).idle, town.pool.members()) == (2, ())
    town.open("a", workers=2, weight=3.0)
    town.demand("a", 100)
    assert [order.devices for order in (e.order for e in town.told(ev.WakeWorker)) if order.number > last] == [
        (0,),
        (1,),
    ]


def test_a_sleep_that_never_ends_is_fenced_and_the_devices_come_back(make_town):
    town = make_town()
    town.open("a", workers=1)
    town.demand("a", 100)
    town.deaf = {"a-0"}
    assert town.ask("a", 1, (0, 1, 2, 3)) is None
    _, sleep_s, fence_s = times(town)
    town.after(sleep_s)
    assert [effect.member for effect in town.told(ev.FenceMember)] == ["a-0"]
    assert town.held("a", 1) is None
    town.after(fence_s)
    assert town.held("a", 1) == (0, 1, 2, 3)


def test_the_devices_of_a_process_that_was_evicted_are_free_when_its_end_is_certain(make_town):
    town = make_town()
    town.open("a", workers=1)
    town.open("b")
    town.demand("a", 100)
    assert town.ask("b", 1, (1,)) == (1,)
    town.tell(ev.MemberEvicted(A, A0, "it stands still"))
    town.tell(ev.MemberEvicted(PipelineName("b"), MemberId("b-trainer"), "silent for 15 s"))
    assert [effect.member for effect in town.told(ev.FenceMember)] == ["a-0", "b-trainer"]
    town.open("c")
    assert town.ask("c", 1, (0,)) is None
    with pytest.raises(Stale, match="was evicted"):
        town.ask("b", 2, (2,))
    town.after(1)
    assert town.held("c", 1) is None, "it may still be there"
    town.tell(ev.MemberLost(A, A0, "killed"))
    assert town.held("c", 1) == (0,)
    town.after(town.pool.settings.fence_s)
    assert town.ask("c", 2, (1,)) == (1,), "without word of its end the fence decides"


def test_a_proof_of_death_ends_the_fence_early(make_town):
    town = make_town()
    town.open("a", workers=1)
    town.demand("a", 100)
    town.deaf = {"a-0"}
    town.ask("a", 1, (0, 1, 2, 3))
    town.after(times(town)[1])
    town.tell(ev.MemberLost(A, A0, "killed"))
    assert town.held("a", 1) == (0, 1, 2, 3)


def test_a_dead_worker_frees_its_devices_at_once(town):
    town.open("a", workers=1)
    town.open("b", workers=4)
    town.demand("a", 100)
    town.tell(ev.MemberLost(A, A0, "SIGKILL"))
    town.demand("b", 100)
    assert town.awake("b") == 4
    assert town.pool.status(0.0).shares[0].trouble.endswith("no live worker process to wake")


def test_a_worker_killed_in_mid_resize_frees_the_way(make_town):
    town = make_town()
    town.open("a")
    town.open("b")
    town.demand("a", 100)
    town.after(11)
    town.deaf = {f"a-{number}" for number in range(4)}
    town.demand("b", 100)
    town.after(2)
    going = town.told(ev.SleepWorker)
    assert len(going) == 2
    assert town.awake("b") == 0
    for effect in going:
        town.tell(ev.MemberLost(A, effect.member, "SIGKILL"))
    assert town.awake("b") == 2


def test_a_failed_wake_that_proved_nothing_is_put_to_sleep(town):
    town.open("a", workers=1)
    town.deaf = {"a-0"}
    town.demand("a", 100)
    order = town.pool.orders(A0)[0]
    town.tell(ev.MoveFailed(A, A0, order.number, released=False, error="weights would not load"))
    following = town.pool.orders(A0)[0]
    assert following.action == "sleep"
    assert following.number > order.number


def test_failures_in_a_row_wait_longer_and_success_forgets_them(make_town):
    town = make_town()
    town.open("a", workers=1)
    town.deaf = {"a-0"}
    town.demand("a", 100)
    benches = []
    for _ in range(4):
        order = town.pool.orders(A0)[0]
        town.tell(ev.MoveFailed(A, A0, order.number, released=True, error="no memory"))
        found = re.search(r"wakes no worker for (\d+) s", town.pool.status(town.now).shares[0].trouble)
        assert found is not None
        benches.append(float(found[1]))
        town.after(benches[-1])
    assert benches == [5.0, 10.0, 20.0, 40.0]
    town.tell(ev.MoveDone(A, A0, town.pool.orders(A0)[0].number))
    town.tell(ev.MemberLost(A, A0))
    town.tell(ev.WorkerJoined(A, MemberId("a-9")))
    assert town.awake("a") == 1


def test_an_evicted_trainer_loses_its_devices_after_the_fence(make_town):
    town = make_town(fence_s=5.0)
    town.open("a", workers=0)
    town.open("b", workers=0)
    assert town.ask("a", 1, (0, 1))
    town.after(3600)
    assert town.ask("b", 1, (0, 1)) is None, "the pool has no clock of its own for members"
    town.tell(ev.MemberEvicted(A, MemberId("a-trainer"), "not heard for 15 s"))
    assert [effect.member for effect in town.told(ev.FenceMember)] == ["a-trainer"]
    town.after(5)
    assert town.held("b", 1) == (0, 1)


def test_a_restarted_controller_forgets_no_member_and_gives_no_device_twice(make_town):
    town = make_town()
    town.open("a")
    town.open("b")
    town.demand("a", 100)
    town.demand("b", 100)
    town.deaf = {f"{name}-{number}" for name in "ab" for number in range(4)}
    assert town.ask("b", 1, (2, 3)) is None
    orders = {member: town.pool.orders(MemberId(member)) for member in town.deaf}
    assert any(orders.values())

    town.pool = town.replayed()
    town.now += 3600
    town.tell(ev.ControllerRestarted())
    assert all(town.pool.orders(MemberId(member)) == waiting for member, waiting in orders.items() if waiting)
    assert not town.told(ev.FenceMember), "no worker could report while the controller was away"
    for member, waiting in orders.items():
        for order in waiting:
            town.tell(ev.MoveDone(PipelineName(member[0]), MemberId(member), order.number))
    assert town.held("b", 1) == (2, 3)


def test_a_snapshot_restores_byte_for_byte(town):
    town.open("a")
    town.open("b", bundle=2)
    town.demand("a", 100)
    town.demand("b", 50)
    town.after(11)
    town.ask("a", 1, (0, 1))
    copy = Pool(town.pool.topology)
    copy.restore(town.pool.snapshot())
    copy.check()
    assert copy.snapshot() == town.pool.snapshot()
    assert copy.handle(ev.TimePassed(), town.now + 50) == town.pool.handle(ev.TimePassed(), town.now + 50)
    assert copy.snapshot() == town.pool.snapshot()
    town.journal.append((ev.TimePassed(), town.now + 50))


def test_a_bound_worker_wakes_on_its_own_devices_only(make_town):
    town = make_town()
    town.open("a", workers=0)
    town.tell(ev.WorkerJoined(A, A0, (DeviceId(3),)))
    town.demand("a", 100)
    assert [effect.order.devices for effect in town.told(ev.WakeWorker)] == [(3,)]


def test_a_worker_goes_back_to_the_devices_it_knows(make_town):
    town = make_town()
    town.open("a")
    town.demand("a", 100)
    where = {effect.member: effect.order.devices for effect in town.told(ev.WakeWorker)}
    for request in range(3):
        assert town.ask("a", request, (0, 1, 2, 3))
        town.effects.clear()
        town.release("a", request)
        assert {effect.member: effect.order.devices for effect in town.told(ev.WakeWorker)} == where


def test_an_evicted_worker_is_never_woken(make_town):
    town = make_town()
    town.open("a", workers=1)
    town.tell(ev.MemberEvicted(A, A0, "not heard for 15 s"))
    town.demand("a", 100)
    assert not town.told(ev.WakeWorker)
    assert town.pool.status(town.now).shares[0].trouble.endswith("no live worker process to wake")
    town.tell(ev.WorkerJoined(A, MemberId("a-1")))
    assert town.awake("a") == 1


def test_a_fence_is_asked_for_again_after_a_restart(make_town):
    town = make_town()
    town.open("a", workers=0)
    town.ask("a", 1, (0,))
    town.tell(ev.MemberEvicted(A, MemberId("a-trainer"), "not heard for 15 s"))
    assert len(town.told(ev.FenceMember)) == 1
    town.tell(ev.ControllerRestarted())
    assert [effect.member for effect in town.told(ev.FenceMember)] == ["a-trainer"] * 2
