"""The pool under any sequence of events: devices are conserved, and its journal replays to the same bytes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.errors import PenstockError
from penstock.pool import events as ev
from penstock.pool.lease import Hold
from penstock.pool.pool import Pool
from penstock.pool.settings import PoolSection
from penstock.pool.state import State
from penstock.records.ids import MemberId, PipelineName
from penstock.records.pool import DeviceId, OrderNumber, Priority, Topology
from penstock.wire.codec import decode_section
from profiles import examples

NAMES = [PipelineName(name) for name in "abc"]
DEVICES = 6
numbers = st.integers(0, 3)
pipelines = st.sampled_from(NAMES)

TOPOLOGY = Topology((4, 2))


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.settings = PoolSection(
            turn_s=3.0, payback=3.0, wake_s=4.0, drain_s=2.0, sleep_s=2.0, report_s=1.0,
            fence_s=3.0, demand_lease_s=15.0, bench_s=2.0,
        )  # fmt: skip
        self.pool = Pool(TOPOLOGY, self.settings)
        self.now = 0.0
        self.journal: list[tuple[ev.Event, float]] = []
        self.orders: dict[MemberId, list[OrderNumber]] = {}
        self.holders: dict[tuple[MemberId, int], tuple[DeviceId, ...]] = {}
        self.completed = dict.fromkeys(NAMES, 0)
        self.requests = 0
        self.asked_at: dict[int, float] = {}

    def tell(self, event: ev.Event) -> None:
        before, bytes_before = self.pool.revision, self.pool.snapshot()
        try:
            effects = self.pool.handle(event, self.now)
        except PenstockError:
            assert self.pool.snapshot() == bytes_before, "a refused event changed something"
            return
        if self.pool.revision == before:
            assert self.pool.snapshot() == bytes_before, "a change without a revision would be lost in a restart"
        else:
            self.journal.append((event, self.now))
        for effect in effects:
            if isinstance(effect, ev.WakeWorker | ev.SleepWorker):
                assert self.pool.orders(effect.member)[0].number >= effect.order.number
                self.orders.setdefault(effect.member, []).append(effect.order.number)
            elif isinstance(effect, ev.GrantDevices):
                assert self.pool.granted(effect.member, effect.request) is not None
        self._look_at_classes()

    def _look_at_classes(self) -> None:
        """No request is promised what a higher class waits for, and none becomes younger by losing a promise."""
        waiting = [hold for hold in self.holds() if hold.state == "waiting"]
        for hold in self.holds():
            if hold.state in ("waiting", "assigned"):
                assert hold.since == self.asked_at.setdefault(hold.hold, hold.since)
            if hold.state == "assigned":
                above = [one for one in waiting if one.priority < hold.priority and set(one.among) & set(hold.devices)]
                assert not above, f"{hold} was promised what {above} wait for"

    def holds(self) -> list[Hold]:
        _, state = msgspec.msgpack.decode(self.pool.snapshot(), type=tuple[int, State], dec_hook=decode_section)
        return list(state.holds.values())

    def held(self) -> list[Hold]:
        return [hold for hold in self.holds() if hold.state == "held"]

    def promised(self) -> list[Hold]:
        """Requests with a promise that a higher class could take."""
        return [hold for hold in self.holds() if hold.state == "assigned" and hold.priority > min(Priority)]

    @rule(name=pipelines, bundle=st.sampled_from([1, 2]), weight=st.sampled_from([1.0, 2.0]))
    def open(self, name: PipelineName, bundle: int, weight: float) -> None:
        inference = tuple(DeviceId(device) for device in range(DEVICES))
        self.tell(ev.PipelineOpened(name, inference, bundle=bundle, weight=weight))
        for number in range(3):
            self.tell(ev.WorkerJoined(name, MemberId(f"{name}{number}")))

    @rule(name=pipelines)
    def close(self, name: PipelineName) -> None:
        self.tell(ev.PipelineClosed(name))

    @rule(name=pipelines, number=numbers)
    def join(self, name: PipelineName, number: int) -> None:
        self.tell(ev.WorkerJoined(name, MemberId(f"{name}{number}")))

    @rule(name=pipelines, number=numbers)
    def lose(self, name: PipelineName, number: int) -> None:
        self.tell(ev.MemberLost(name, MemberId(f"{name}{number}")))

    @rule(name=pipelines, number=st.sampled_from([*range(4), "t"]))
    def evict(self, name: PipelineName, number: int | str) -> None:
        member = MemberId(f"{name}{number}")
        idle = self.pool.status(self.now).idle
        self.tell(ev.MemberEvicted(name, member, "injected"))
        assert not self.pool.orders(member)
        assert self.pool.status(self.now).idle <= idle, "no device is free before the end is certain"

    @rule(name=pipelines, remaining=st.integers(-1, 50), more=st.integers(-1, 20))
    def count(self, name: PipelineName, remaining: int, more: int) -> None:
        self.completed[name] = max(0, self.completed[name] + more)
        self.tell(ev.DemandCounted(name, remaining, self.completed[name]))

    @rule(
        name=pipelines,
        priority=st.sampled_from(list(Priority)),
        among=st.sets(st.integers(0, DEVICES - 1), min_size=1, max_size=4),
        fewer=st.booleans(),
        release=st.none() | st.integers(0, 10),
    )
    def request(
        self, name: PipelineName, priority: Priority, among: set[int], fewer: bool, release: int | None
    ) -> None:
        self.requests += 1
        count = max(1, len(among) - 1) if fewer else len(among)
        devices = tuple(DeviceId(device) for device in among)
        member = MemberId(f"{name}t")
        self.tell(ev.DevicesRequested(name, member, self.requests, priority, devices, count, 25.0, release))

    @precondition(lambda self: self.promised())
    @rule(data=st.data())
    def outrank(self, data: st.DataObject) -> None:
        """A higher class asks for devices that are promised: the promise is taken back, nothing that is held is."""
        promised = data.draw(st.sampled_from(self.promised()))
        priority = data.draw(st.sampled_from([one for one in Priority if one < promised.priority]))
        name = data.draw(pipelines)
        held = {hold.hold: hold.devices for hold in self.held()}
        self.requests += 1
        asked = (self.requests, priority, promised.devices, len(promised.devices), 25.0)
        self.tell(ev.DevicesRequested(name, MemberId(f"{name}t"), *asked))
        if any(hold.request == self.requests for hold in self.holds()):
            after = next(hold for hold in self.holds() if hold.hold == promised.hold)
            assert not set(after.devices) & set(promised.devices)
        assert held.items() <= {hold.hold: hold.devices for hold in self.held()}.items()

    @precondition(lambda self: self.held())
    @rule(data=st.data(), priority=st.sampled_from(list(Priority)[:-1]))
    def change_class(self, data: st.DataObject, priority: Priority) -> None:
        """A holder gives back and asks again in one event: no request of a lower class comes in between."""
        held = data.draw(st.sampled_from(self.held()))
        self.requests += 1
        asked = (self.requests, priority, held.devices, len(held.devices), 25.0, held.request)
        self.tell(ev.DevicesRequested(held.pipeline, held.member, *asked))
        for hold in self.holds():
            if hold.state == "held" and hold.since == self.now and set(hold.devices) & set(held.devices):
                assert hold.priority <= priority or hold.member == held.member

    @rule(name=pipelines, back=numbers)
    def release(self, name: PipelineName, back: int) -> None:
        self.tell(ev.DevicesReleased(name, MemberId(f"{name}t"), self.requests - back))

    @rule(name=pipelines, back=numbers)
    def cancel(self, name: PipelineName, back: int) -> None:
        self.tell(ev.RequestCancelled(name, MemberId(f"{name}t"), self.requests - back))

    @precondition(lambda self: any(self.orders.values()))
    @rule(data=st.data(), outcome=st.sampled_from(["done", "done", "done", "released", "failed"]))
    def answer(self, data: st.DataObject, outcome: str) -> None:
        member = data.draw(st.sampled_from(sorted(name for name, numbers in self.orders.items() if numbers)))
        number = data.draw(st.sampled_from(self.orders[member]))
        name = PipelineName(member[0])
        if outcome == "done":
            self.tell(ev.MoveDone(name, member, number))
        else:
            self.tell(ev.MoveFailed(name, member, number, outcome == "released", "injected"))

    @rule()
    def everybody_obeys(self) -> None:
        for member in sorted(self.orders):
            for order in self.pool.orders(member):
                self.tell(ev.MoveDone(PipelineName(member[0]), member, order.number))

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tell(ev.TimePassed())

    @rule(away_s=st.sampled_from([1.0, 1000.0]))
    def restart(self, away_s: float) -> None:
        """The controller is killed and comes back from its journal."""
        fresh = Pool(TOPOLOGY, self.settings)
        for event, at in self.journal:
            fresh.handle(event, at)
        assert fresh.snapshot() == self.pool.snapshot()
        restored = Pool(TOPOLOGY, self.settings)
        restored.restore(fresh.snapshot())
        assert restored.snapshot() == fresh.snapshot()
        self.pool = restored
        self.now += away_s
        self.tell(ev.ControllerRestarted())

    @rule(turn_s=st.sampled_from([1.0, 6.0]))
    def begin_another_life(self, turn_s: float) -> None:
        """The run is resumed, with other settings: no member is left, and no number is used twice."""
        self.tell(ev.SessionBegan(TOPOLOGY, self.settings.model_copy(update={"turn_s": turn_s})))
        assert not self.pool.members()
        assert self.pool.status(self.now).idle == DEVICES
        self.orders.clear()

    @invariant()
    def nothing_is_broken(self) -> None:
        self.pool.check()
        status = self.pool.status(self.now)
        assert status.idle + status.generating + status.held + status.moving == DEVICES
        assert min(status.idle, status.generating, status.held, status.moving) >= 0

    def teardown(self) -> None:
        fresh = Pool(TOPOLOGY, self.settings)
        for event, at in self.journal:
            fresh.handle(event, at)
        assert fresh.snapshot() == self.pool.snapshot()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
TestPoolMachine = pytest.mark.timeout(300)(TestPoolMachine)
