"""Shared by the servers of all wires: the ring, the token, and the exchange performed on the ring."""

from __future__ import annotations

import logging
import threading
from typing import NamedTuple, Protocol

from penstock.errors import LocalProtocolError, PenstockError, Stale, Transient
from penstock.payload.exchange import (
    CloseConnection,
    Code,
    ConnectionFailed,
    ConsumeSlots,
    Effect,
    Event,
    ExchangeLimits,
    ExchangeState,
    ReleaseSlot,
    SendBody,
    SendStatus,
    ServerExchange,
    SlotRefused,
    SlotsConsumed,
    SlotTaken,
    TakeSlot,
)
from penstock.payload.io.reader import Lease, RingReader
from penstock.runtime.clock import monotonic

log = logging.getLogger(__name__)

RELEASE_TRIES = 3
"""For a slot that is locked by another process; each takes `SLOT_LOCK_TIMEOUT_S`."""


class ServerStatistics(NamedTuple):
    connections: int
    accepted: int
    turned_away: int
    """Closed on arrival or to make room: more connections than allowed."""
    sent: int
    """Bodies sent completely."""
    broken_off: int
    """Bodies not sent completely."""
    consumed: int
    """Payloads freed by consume requests."""
    refused: int
    orphans: int
    """Bodies whose slot another reader took over, or whose client freed it, before the server noted that they were
    sent."""


class Service:
    """One ring, served to clients with the token."""

    def __init__(self, ring: str, token: str, *, directory: str, limits: ExchangeLimits | None, label: str) -> None:
        self.reader = RingReader.attach(ring, directory=directory, label=label, verify=False)
        self.lock = threading.Lock()
        self._token = token
        self._limits = limits or ExchangeLimits()
        self._counts = dict.fromkeys(ServerStatistics._fields[1:], 0)

    def count(self, what: str, number: int = 1) -> None:
        with self.lock:
            self._counts[what] += number

    def statistics(self, connections: int) -> ServerStatistics:
        with self.lock:
            return ServerStatistics(connections=connections, **self._counts)

    def new_exchange(self) -> ServerExchange:
        return ServerExchange(self._token, self.reader.name, self.reader.epoch, monotonic(), self._limits)


class Outlet(Protocol):
    """The sending side of a connection. Methods return the resulting event, or None if it follows later."""

    def send_body(self, header: bytes, body: memoryview) -> Event | None: ...

    def send_status(self, data: bytes) -> Event | None: ...

    def end(self, reason: str) -> None: ...


class Handler:
    """One client: its exchange, and the one slot that is being sent to it."""

    def __init__(self, service: Service, outlet: Outlet) -> None:
        self._service = service
        self._outlet = outlet
        self._lease: Lease | None = None
        self.exchange = service.new_exchange()

    def __repr__(self) -> str:
        return f"<Handler {self.exchange!r}>"

    @property
    def authenticated(self) -> bool:
        return self.exchange.state is not ExchangeState.AWAITING_HELLO

    @property
    def closed(self) -> bool:
        return self.exchange.state is ExchangeState.CLOSED

    def handle(self, event: Event | None) -> None:
        """Passes an event to the exchange and performs its effects, until it waits for the client."""
        while event is not None:
            effects = self.exchange.handle(event, monotonic())
            event = None
            for effect in effects:
                outcome = self._perform(effect)
                event = event if outcome is None else outcome

    def _perform(self, effect: Effect) -> Event | None:
        match effect:
            case TakeSlot(ref):
                try:
                    self._lease = self._service.reader.take(ref)
                except PenstockError as error:
                    self._service.count("refused")
                    return SlotRefused(Code.STALE if isinstance(error, Stale) else Code.BUSY, str(error))
                return SlotTaken(ref.size_bytes)
            case SendBody(header):
                assert self._lease is not None
                return self._outlet.send_body(header, self._lease.view)
            case ReleaseSlot():
                self._release()
            case ConsumeSlots(refs):
                try:
                    self._service.count("consumed", self._service.reader.consume(refs))
                except PenstockError as error:
                    return ConnectionFailed(f"could not consume: {error}")
                return SlotsConsumed()
            case SendStatus(data):
                failed = self._outlet.send_status(data)
                return None if self.closed else failed
            case CloseConnection(reason):
                log.debug("payload connection closes after %d served: %s", self.exchange.served, reason)
                self._outlet.end(reason)
        return None

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        assert lease is not None
        self._service.count("broken_off" if self.closed else "sent")
        for attempt in range(1, RELEASE_TRIES + 1):
            try:
                if not lease.released():
                    self._service.count("orphans")
                return
            except LocalProtocolError:
                return  # the server was closed and has released all slots
            except Transient as error:
                if attempt == RELEASE_TRIES:
                    log.warning("a payload stays taken until it is requested again or consumed: %s", error)
