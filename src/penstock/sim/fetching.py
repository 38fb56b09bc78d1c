"""The trainer's fetching of payloads: real ports, retries and server exchanges, on a network that fails.

Payloads on the trainer's host are read where they lie; the others come over the network, from one of their ring's
ports, each of which may refuse, reset, fall silent, and be well again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from random import Random

import msgspec

from penstock.errors import InvalidTransition, Stale
from penstock.payload import retry as retries
from penstock.payload.exchange import STATUS, BodySent, Code, consume, parse_status, read
from penstock.payload.ports import CallFailed, CallSucceeded, Fault, Ports
from penstock.payload.retry import BatchRetry, BeginCall, Failure, RetryPolicy, TimePassed
from penstock.records.ids import SampleId
from penstock.records.payload import PayloadRef, RingAddress
from penstock.sim.engine import Body, Engine, Owner, Signal, Sleep, Until
from penstock.sim.faults import FaultLog, WholeFaults
from penstock.sim.rings import SimRing, digest_of
from penstock.sim.serving import Session

POLICY = RetryPolicy(call_s=4.0, slot_s=12.0, batch_s=30.0, concurrency=8)
TELL_S = 60.0
"""How long a producer is told again and again which of its payloads were used."""


class Broken(Exception):
    """A call that says something about its port."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(detail)
        self.failure = Failure(fault, detail)
        self.fault: Fault = fault


class Fetched(msgspec.Struct):
    """The payloads of one batch, until the step they are for is acknowledged."""

    missing: dict[PayloadRef, Failure] = {}
    copies: dict[PayloadRef, SampleId] = {}
    held: dict[PayloadRef, tuple[SimRing, int]] = {}
    """Read where they lie."""

    def sample(self, ref: PayloadRef) -> SampleId | None:
        """Whose payload this is, read now."""
        return self.copies[ref] if ref in self.copies else self.held[ref][0].read(ref.slot)


class SimFetcher:
    """One trainer incarnation's fetcher."""

    def __init__(
        self,
        engine: Engine,
        owner: Owner,
        host: str,
        random: Random,
        faults: FaultLog,
        settings: WholeFaults,
        find_ring: Callable[[str], SimRing],
        network_s: float,
    ) -> None:
        self.calls = 0
        self._engine = engine
        self._owner = owner
        self._host = host
        self._random = random
        self._faults = faults
        self._settings = settings
        self._find_ring = find_ring
        self._network_s = network_s
        self._ports: dict[str, Ports] = {}

    def fetch(self, refs: Iterable[PayloadRef], addresses: Sequence[RingAddress], into: Fetched) -> Body:
        """Gets every payload by the nearest way, within the policy's time; what could not be had is missing."""
        known = {address.ring for address in addresses}
        remote: list[PayloadRef] = []
        for ref in refs:
            ring = self._find_ring(ref.ring)
            if ref.ring not in known:
                into.missing[ref] = Failure("unknown_ring", "no address is known")
            elif ring.host != self._host:
                remote.append(ref)
            else:
                try:
                    into.held[ref] = (ring, ring.take(ref, ring.attach(self._owner)))
                except Stale as error:
                    into.missing[ref] = Failure("stale", str(error))
        if remote:
            yield from self._fetch_remote(remote, into)

    def consumed(self, fetched: Fetched) -> None:
        """The step was acknowledged: the payloads may be overwritten, as soon as their producers hear of it."""
        for ref, (ring, attempt) in fetched.held.items():
            ring.finalise(ref.slot, attempt, "consume")
        by_ring: dict[str, list[PayloadRef]] = {}
        for ref in fetched.copies:
            by_ring.setdefault(ref.ring, []).append(ref)
        for ring, refs in by_ring.items():
            self._engine.spawn(self._owner, self._tell(self._find_ring(ring), refs))

    def _tell(self, ring: SimRing, refs: list[PayloadRef]) -> Body:
        engine, until, pause_s = self._engine, self._engine.now + TELL_S, 0.1
        tried: set[int] = set()
        while engine.now < until:
            outcome = yield from self._called(ring, tried, lambda port: self._consume(ring, port, refs))
            if outcome is None:
                return
            yield Sleep(pause_s)
            pause_s = min(5.0, 2 * pause_s)

    def _consume(self, ring: SimRing, port: int, refs: list[PayloadRef]) -> Body:
        session = yield from self._connect(ring, port, self._engine.now + POLICY.call_s)
        session.request(consume(refs))
        yield Sleep(self._network_s)
        lost = self._faults.strikes("confirmation lost", self._settings.lose_acknowledgement, self._engine.now)
        status = parse_status(session.answer, 0) if session.answer else None
        session.close()
        if lost or status is None or status.code is not Code.OK:
            raise Broken("reset", "it was not confirmed")

    def _fetch_remote(self, refs: list[PayloadRef], into: Fetched) -> Body:
        engine = self._engine
        retry = BatchRetry(refs, POLICY, engine.now)
        landed: deque[tuple[PayloadRef, SampleId | Failure]] = deque()
        news = Signal()
        tried: dict[PayloadRef, set[int]] = {ref: set() for ref in refs}

        def call(ref: PayloadRef, deadline: float) -> Body:
            outcome = yield from self._call(ref, deadline, tried[ref])
            landed.append((ref, outcome))
            engine.fire(news)

        effects = retry.handle(TimePassed(), engine.now)
        while True:
            for effect in effects:
                if isinstance(effect, BeginCall):
                    engine.spawn(self._owner, call(effect.ref, effect.deadline))
            retry.check()
            if retry.done:
                break
            if not landed:
                engine.after(max(0.0, min(1.0, retry.wake_at(engine.now) - engine.now)), engine.fire, news)
                yield Until(news)
            event: retries.Event = TimePassed()
            if landed:
                ref, outcome = landed.popleft()
                if isinstance(outcome, Failure):
                    event = retries.CallFailed(ref, outcome)
                else:
                    into.copies[ref] = outcome
                    event = retries.CallSucceeded(ref)
            effects = retry.handle(event, engine.now)
        into.missing.update(retry.missing)

    def _call(self, ref: PayloadRef, deadline: float, tried: set[int]) -> Body:
        """One call for one payload. Returns whose payload came, or why none did."""
        ring = self._find_ring(ref.ring)
        self.calls += 1
        return (yield from self._called(ring, tried, lambda port: self._read(ring, port, ref, deadline)))

    def _called(self, ring: SimRing, tried: set[int], exchange: Callable[[int], Body]) -> Body:
        """Lets the ports decide which of them is called, and tells them how that went."""
        ports = self._ports.setdefault(ring.name, Ports(tuple(ring.ports)))
        port = ports.choose(self._engine.now, tried)
        tried.add(port)
        try:
            outcome = yield from exchange(port)
        except Broken as broken:
            ports.handle(CallFailed(port, broken.fault), self._engine.now)
            outcome = broken.failure
        else:
            ports.handle(CallSucceeded(port), self._engine.now)
        ports.check()
        return outcome

    def _connect(self, ring: SimRing, port: int, deadline: float) -> Body:
        yield Sleep(self._network_s)
        condition = ring.ports[port]
        if not ring.writer.alive:
            raise Broken("refused", "the producer is dead")
        if condition == "refusing":
            self._faults.count("payload port refused")
            raise Broken("refused", "nobody listens")
        if condition == "silent" or ring.writer.wedged:
            self._faults.count("payload port timed out")
            yield Sleep(max(0.0, deadline - self._engine.now))
            raise Broken("timed_out", "no answer")
        return Session(self._engine, ring)

    def _read(self, ring: SimRing, port: int, ref: PayloadRef, deadline: float) -> Body:
        engine, faults, settings = self._engine, self._faults, self._settings
        session = yield from self._connect(ring, port, deadline)
        session.request(read(ref))
        status = parse_status(session.answer[: STATUS.size], ref.size_bytes)
        if status.code is not Code.OK:
            session.close()
            return Failure("stale" if status.code is Code.STALE else "busy", "the server says so")
        transfer_s = self._network_s + ref.size_bytes * 1e-8
        if faults.strikes("payload transfer slow", settings.slow_transfer, engine.now):
            transfer_s += self._random.uniform(0.5, 2.5) * POLICY.call_s
        if engine.now + transfer_s > deadline:
            yield Sleep(max(0.0, deadline - engine.now))
            # The server may go on sending to nobody: its own deadline ends that, or a later reader does.
            raise Broken("timed_out", "the body did not come in time")
        yield Sleep(transfer_s)
        if not ring.writer.alive:
            raise Broken("reset", "the producer died")
        if ring.ports[port] == "resetting":
            faults.count("payload connection reset")
            session.close("reset")
            raise Broken("truncated", "reset in the middle of the body")
        found = ring.read(ref.slot)
        session.tell(BodySent())
        session.close()
        if found is None or digest_of(found) != ref.digest:
            raise InvalidTransition(f"{ref} was being read and holds the payload of {found}")
        if faults.strikes("payload damaged on its way", settings.corrupt_transfer, engine.now):
            raise Broken("corrupt", "the body hashes to something else")
        return found
