"""Ports, retry and exchange under arbitrary events: what must hold whatever a network does."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.errors import InvalidTransition, RemoteProtocolError
from penstock.payload.exchange import (
    REFERENCE,
    REQUEST,
    STATUS,
    BodySent,
    Code,
    ConnectionFailed,
    ConsumeSlots,
    Effect,
    Event,
    ExchangeState,
    Received,
    ReleaseSlot,
    SendBody,
    ServerExchange,
    SlotRefused,
    SlotsConsumed,
    SlotTaken,
    TakeSlot,
    consume,
    hello,
    parse_status,
    read,
)
from penstock.payload.ports import CallFailed as PortFailed
from penstock.payload.ports import CallSucceeded as PortSucceeded
from penstock.payload.ports import Fault, Ports
from penstock.payload.retry import (
    BatchCancelled,
    BatchRetry,
    BeginCall,
    CallFailed,
    CallSucceeded,
    Failure,
    FailureKind,
    RetryPolicy,
    TimePassed,
)
from penstock.payload.retry import Effect as RetryEffect
from penstock.records.payload import PayloadRef
from profiles import examples

FAULTS: list[Fault] = ["refused", "reset", "truncated", "timed_out", "corrupt", "protocol"]
KINDS: list[FailureKind] = [*FAULTS, "stale", "busy"]


class PortsMachine(RuleBasedStateMachine):
    @initialize(count=st.integers(1, 4))
    def begin(self, count: int) -> None:
        self.numbers = list(range(1, count + 1))
        self.ports = Ports(self.numbers, first_s=1, cap_s=8)
        self.sick_until = dict.fromkeys(self.numbers, 0.0)
        self.last: dict[int, int] = {}
        self.calls = 0
        self.now = 1.0

    @rule(avoid=st.sets(st.integers(1, 4)))
    def call(self, avoid: set[int]) -> None:
        port = self.ports.choose(self.now, avoid)
        healthy = [one for one in self.numbers if self.sick_until[one] <= self.now and one not in avoid]
        if healthy:
            assert port in healthy
            assert all(self.last.get(port, -1) <= self.last.get(other, -1) for other in healthy)  # longest unused first
        self.calls += 1
        self.last[port] = self.calls

    @rule(port=st.integers(1, 4), fault=st.sampled_from(FAULTS))
    def fail(self, port: int, fault: Fault) -> None:
        if port in self.numbers:
            (effect,) = self.ports.handle(PortFailed(port, fault), self.now)
            assert self.now < getattr(effect, "until") <= self.now + 8  # noqa: B009
            self.sick_until[port] = getattr(effect, "until")  # noqa: B009

    @rule(port=st.integers(1, 4))
    def succeed(self, port: int) -> None:
        if port in self.numbers:
            self.ports.handle(PortSucceeded(port), self.now)
            self.sick_until[port] = 0.0

    @rule(seconds=st.floats(0.01, 20))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def sane(self) -> None:
        if hasattr(self, "ports"):
            self.ports.check()
            assert set(self.ports.quarantined(self.now)) == {
                port for port, until in self.sick_until.items() if until > self.now
            }


class RetryMachine(RuleBasedStateMachine):
    @initialize(count=st.integers(0, 6), concurrency=st.integers(1, 3), rounds=st.integers(1, 3))
    def begin(self, count: int, concurrency: int, rounds: int) -> None:
        self.policy = RetryPolicy(5, 12, 30, rounds, 2, 0.5, concurrency)
        self.refs = [PayloadRef("ring", 1, slot, 1, 0, 0) for slot in range(count)]
        self.now = 0.0
        self.retry = BatchRetry(self.refs, self.policy, 0.0)
        self.in_flight: dict[PayloadRef, float] = {}
        self.first_call: dict[PayloadRef, float] = {}
        self.calls: dict[PayloadRef, int] = {}
        self.stale: set[PayloadRef] = set()
        self.cancelled = False
        self.note(self.retry.handle(TimePassed(), self.now))

    def note(self, effects: list[RetryEffect]) -> None:
        for effect in effects:
            if isinstance(effect, BeginCall):
                assert effect.ref not in self.in_flight
                assert effect.ref not in self.stale
                assert not self.cancelled
                first = self.first_call.setdefault(effect.ref, self.now)
                assert self.now < effect.deadline <= min(self.now + 5, first + 12, 30)
                self.in_flight[effect.ref] = effect.deadline
                self.calls[effect.ref] = self.calls.get(effect.ref, 0) + 1
                assert self.calls[effect.ref] <= self.policy.rounds * 2

    def pick(self, which: int) -> PayloadRef | None:
        refs = sorted(self.in_flight, key=lambda ref: ref.slot)
        return refs[which % len(refs)] if refs else None

    @rule(which=st.integers(0, 5))
    def succeed(self, which: int) -> None:
        ref = self.pick(which)
        if ref is not None:
            del self.in_flight[ref]
            self.note(self.retry.handle(CallSucceeded(ref), self.now))

    @rule(which=st.integers(0, 5), kind=st.sampled_from(KINDS), partial=st.booleans())
    def fail(self, which: int, kind: FailureKind, partial: bool) -> None:
        ref = self.pick(which)
        if ref is not None:
            del self.in_flight[ref]
            if kind == "stale":
                self.stale.add(ref)
            self.note(self.retry.handle(CallFailed(ref, Failure(kind, "", partial)), self.now))

    @rule(seconds=st.floats(0.01, 6))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for ref, deadline in sorted(self.in_flight.items(), key=lambda item: item[1]):
            if deadline <= self.now:  # a transport ends its calls by their deadline
                del self.in_flight[ref]
                self.note(self.retry.handle(CallFailed(ref, Failure("timed_out", "")), self.now))
        self.note(self.retry.handle(TimePassed(), self.now))

    @rule()
    def cancel(self) -> None:
        if self.calls and self.now > 10:
            self.cancelled = True
            self.note(self.retry.handle(BatchCancelled("stop"), self.now))

    @invariant()
    def sane(self) -> None:
        if not hasattr(self, "retry"):
            return
        self.retry.check()
        assert len(self.in_flight) <= self.policy.concurrency
        if self.now >= 30 and not self.in_flight:
            assert self.retry.done
        if not self.retry.done:
            assert self.in_flight or self.retry.wake_at(self.now) > self.now  # never stuck

    def teardown(self) -> None:
        if hasattr(self, "retry"):
            self.now += 40
            for ref in list(self.in_flight):
                self.retry.handle(CallFailed(ref, Failure("timed_out", "")), self.now)
            self.retry.handle(TimePassed(), self.now)
            assert self.retry.done
            assert self.retry.arrived | set(self.retry.missing) == set(self.refs)
            assert not self.retry.arrived & set(self.retry.missing)


TestPorts = PortsMachine.TestCase
TestPorts.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestRetry = RetryMachine.TestCase
TestRetry.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)

REF = PayloadRef("ring", 77, 3, 9, 1000, 5)
OTHER = PayloadRef("ring", 77, 4, 2, 500, 6)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.binary(max_size=60).map(Received),
    st.sampled_from([hello("secret"), read(REF), consume([REF]), consume([REF, OTHER]), consume([])]).map(Received),
    st.binary(min_size=REQUEST.size, max_size=REQUEST.size).map(Received),
    st.just(SlotTaken(1000)),
    st.just(SlotRefused(Code.STALE, "gone")),
    st.just(BodySent()),
    st.just(SlotsConsumed()),
    st.just(ConnectionFailed("reset")),
)


def as_carried(exchange: ServerExchange, event: Event) -> Iterator[Event]:
    """What a client says reaches the exchange in pieces of what it asked for; a rest that is too short never does."""
    if not isinstance(event, Received):
        yield event
        return
    data = event.data
    while 0 < exchange.expects_bytes <= len(data):
        count = exchange.expects_bytes
        yield Received(data[:count])
        data = data[count:]


@settings(max_examples=examples(400), deadline=None)
@given(st.booleans(), st.lists(EVENTS, max_size=30))
def test_a_slot_taken_is_released_exactly_once_and_consumed_only_on_demand(known: bool, events: list[Event]) -> None:
    exchange = ServerExchange("secret", "ring", 77, 0.0)
    held = False
    for said in [*[Received(hello("secret"))] * known, *events]:
        for event in as_carried(exchange, said):
            try:
                effects: list[Effect] = exchange.handle(event, 0.0)
            except InvalidTransition:
                continue
            if isinstance(event, SlotTaken):
                held = True
            for effect in effects:
                if isinstance(effect, ReleaseSlot):
                    assert held
                    held = False
                if isinstance(effect, ConsumeSlots):
                    assert not held
                    assert isinstance(event, Received)
                    named = [PayloadRef("ring", *one) for one in REFERENCE.iter_unpack(event.data)]
                    assert list(effect.refs) == named
                if isinstance(effect, TakeSlot):
                    assert not held
                if isinstance(effect, SendBody):
                    assert held
            exchange.check()
    if exchange.state is not ExchangeState.CLOSED:
        effects = exchange.handle(ConnectionFailed("end"), 0.0)
        assert (ReleaseSlot() in effects) == held


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(min_size=STATUS.size, max_size=STATUS.size))
def test_no_status_makes_a_client_allocate_more_than_it_asked_for(raw: bytes) -> None:
    try:
        status = parse_status(raw, REF.size_bytes)
    except RemoteProtocolError:
        return
    assert status.length <= max(REF.size_bytes, 1024)
