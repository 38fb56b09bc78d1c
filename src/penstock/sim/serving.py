"""The server's end of a simulated payload connection: does to the ring what the real exchange decides."""

from __future__ import annotations

from collections import deque

from penstock.errors import Stale
from penstock.payload.exchange import (
    CloseConnection,
    Code,
    ConnectionFailed,
    ConsumeSlots,
    Event,
    ExchangeLimits,
    ExchangeState,
    Received,
    ReleaseSlot,
    SendBody,
    SendStatus,
    ServerExchange,
    SlotRefused,
    SlotsConsumed,
    SlotTaken,
    TakeSlot,
    hello,
)
from penstock.records.payload import PayloadRef
from penstock.sim.engine import Engine
from penstock.sim.rings import SimRing

TOKEN = "simulated"
LIMITS = ExchangeLimits(hello_s=5.0, idle_s=60.0, send_s=10.0)


class Session:
    """One connection, from its hello on. It keeps the exchange's deadlines by itself, and ends with its server."""

    def __init__(self, engine: Engine, ring: SimRing) -> None:
        self.exchange = ServerExchange(TOKEN, ring.name, ring.epoch, engine.now, LIMITS)
        self.answer = b""
        self._engine = engine
        self._ring = ring
        self._taken: tuple[int, int] | None = None
        self.tell(Received(hello(TOKEN)))
        self._watch()

    def request(self, data: bytes) -> None:
        """A request and whatever arrived together with it."""
        while data:
            count = self.exchange.expects_bytes or len(data)
            self.tell(Received(data[:count]))
            data = data[count:]

    def close(self, reason: str = "closed by the client") -> None:
        self.tell(ConnectionFailed(reason))

    def tell(self, event: Event) -> None:
        """Does nothing for a dead server or a closed connection."""
        if not self._ring.writer.alive or self.exchange.state is ExchangeState.CLOSED:
            return
        waiting: deque[Event] = deque([event])
        while waiting:
            for effect in self.exchange.handle(waiting.popleft(), self._engine.now):
                match effect:
                    case TakeSlot(ref):
                        waiting.append(self._take(ref))
                    case SendBody(data) | SendStatus(data):
                        self.answer = data
                    case ReleaseSlot():
                        assert self._taken is not None
                        self._ring.finalise(*self._taken, "release")
                        self._taken = None
                    case ConsumeSlots(refs):
                        self._ring.consume(refs)
                        waiting.append(SlotsConsumed())
                    case CloseConnection():
                        pass
        self.exchange.check()

    def _take(self, ref: PayloadRef) -> SlotTaken | SlotRefused:
        try:
            self._taken = (ref.slot, self._ring.take(ref, self._ring.SERVER))
        except Stale as error:
            return SlotRefused(Code.STALE, str(error))
        self._engine.after(LIMITS.send_s + 1.0, self._watch)
        return SlotTaken(ref.size_bytes)

    def _watch(self) -> None:
        exchange, now = self.exchange, self._engine.now
        if exchange.state is ExchangeState.CLOSED:
            return
        if now >= exchange.deadline:
            self.close("past the deadline")
        else:
            self._engine.after(exchange.deadline - now, self._watch)
