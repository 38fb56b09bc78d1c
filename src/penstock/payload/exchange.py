"""One exchange: one request, one status, one body. The same on every transport with a wire.

    client  ──hello──▶     once per connection: magic, version, digest of the run's token
            ──read──▶      which payload, named as exactly as a reference names it
            ◀──status──    here it comes, or why not
            ◀──body──      the client checks its digest
            ──consume──▶   when it has used payloads, on any connection: how many, and which
            ◀──status──    all of them were freed

The server's half is `ServerExchange`. It takes a slot per read and ends that attempt exactly once, by releasing it:
sent is not received, so only the client's word that it is done with a payload consumes it, and until then the payload
can be read again, by a client that lost a reply or repeats a training step. Sending it twice does no harm.

The machine also sets the deadline of whatever it waits for, so that a client that stalls costs its own connection only.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec

from penstock.errors import InvalidTransition, RemoteProtocolError, Stale
from penstock.payload.ring import MAX_CAPACITY_BYTES
from penstock.records.payload import PayloadRef

MAGIC = b"PSTK"
VERSION = 3
HELLO = struct.Struct("<4sB3x32s")
REQUEST = struct.Struct("<B7xQQQQQ")
REFERENCE = struct.Struct("<QQQQQ")
"""epoch, slot, generation, length, digest: the fields of a read, and each of the payloads after a consume."""
STATUS = struct.Struct("<B7xQ")
READ, CONSUME = 1, 2
MAX_TEXT_BYTES = 1024
MAX_CONSUMED = 1024
"""By one request."""


class Code(IntEnum):
    OK = 0
    STALE = 1
    """Gone for good."""
    BUSY = 2
    """Not now; try again."""
    REFUSED = 3
    """The hello was not accepted."""


class ExchangeState(IntEnum):
    AWAITING_HELLO = 0
    AWAITING_REQUEST = 1
    AWAITING_REFERENCES = 2
    TAKING = 3
    SENDING = 4
    CONSUMING = 5
    CLOSED = 6


# Events


class Received(msgspec.Struct, frozen=True):
    """Exactly the bytes that `ServerExchange.expects_bytes` asked for."""

    data: bytes


class SlotTaken(msgspec.Struct, frozen=True):
    size_bytes: int


class SlotRefused(msgspec.Struct, frozen=True):
    code: Code
    reason: str


class BodySent(msgspec.Struct, frozen=True):
    """All of it was handed to the wire."""


class SlotsConsumed(msgspec.Struct, frozen=True):
    """All of them, or they were gone already."""


class ConnectionFailed(msgspec.Struct, frozen=True):
    """Closed, reset, or past the deadline."""

    reason: str


Event = Received | SlotTaken | SlotRefused | BodySent | SlotsConsumed | ConnectionFailed

# Effects


class TakeSlot(msgspec.Struct, frozen=True):
    ref: PayloadRef


class SendBody(msgspec.Struct, frozen=True):
    """The status, and the whole body of the slot that was taken right after it."""

    header: bytes


class ReleaseSlot(msgspec.Struct, frozen=True):
    """The attempt has ended, well or not."""


class ConsumeSlots(msgspec.Struct, frozen=True):
    refs: tuple[PayloadRef, ...]


class SendStatus(msgspec.Struct, frozen=True):
    data: bytes


class CloseConnection(msgspec.Struct, frozen=True):
    reason: str


Effect = TakeSlot | SendBody | ReleaseSlot | ConsumeSlots | SendStatus | CloseConnection

TRANSITIONS: dict[tuple[ExchangeState, str], tuple[ExchangeState, ...]] = {
    (ExchangeState.AWAITING_HELLO, "Received"): (ExchangeState.AWAITING_REQUEST, ExchangeState.CLOSED),
    (ExchangeState.AWAITING_REQUEST, "Received"): (
        ExchangeState.TAKING,
        ExchangeState.AWAITING_REFERENCES,
        ExchangeState.CLOSED,
    ),
    (ExchangeState.AWAITING_REFERENCES, "Received"): (ExchangeState.CONSUMING,),
    (ExchangeState.TAKING, "SlotTaken"): (ExchangeState.SENDING,),
    (ExchangeState.TAKING, "SlotRefused"): (ExchangeState.AWAITING_REQUEST,),
    (ExchangeState.SENDING, "BodySent"): (ExchangeState.AWAITING_REQUEST,),
    (ExchangeState.CONSUMING, "SlotsConsumed"): (ExchangeState.AWAITING_REQUEST,),
    **{
        (state, "ConnectionFailed"): (ExchangeState.CLOSED,)
        for state in ExchangeState
        if state is not ExchangeState.CLOSED
    },
}


class ExchangeLimits(NamedTuple):
    """How long a server waits for each thing a client must do."""

    hello_s: float = 5.0
    idle_s: float = 120.0
    """For the next complete request: an idle connection is evicted after it, a dribbled request too."""
    send_s: float = 10.0
    send_bytes_per_s: float = 4e6
    """A body may take `send_s` plus its size at this rate; a client that reads slower is cut off."""


class ServerExchange:
    """One connection, seen from the server of one ring."""

    def __init__(self, token: str, ring: str, epoch: int, now: float, limits: ExchangeLimits | None = None) -> None:
        self._hello = hello(token)
        self._ring = ring
        self._epoch = epoch
        self._limits = limits or ExchangeLimits()
        self.state = ExchangeState.AWAITING_HELLO
        self.expects_bytes = HELLO.size
        """How many bytes the client owes now; 0 while it is our turn."""
        self.deadline = now + self._limits.hello_s
        """When the thing that is waited for must be complete."""
        self.served = 0
        """Bodies sent completely."""

    def __repr__(self) -> str:
        return f"<ServerExchange {self.state.name} until {self.deadline:.3f}, {self.served} served>"

    def handle(self, event: Event, now: float) -> list[Effect]:
        if (self.state, type(event).__name__) not in TRANSITIONS:
            raise InvalidTransition(f"{type(event).__name__} came while {self.state.name}")
        if isinstance(event, Received):
            if self.state is ExchangeState.AWAITING_REQUEST:
                return self._request(event.data, now)
            if self.state is ExchangeState.AWAITING_REFERENCES:
                self._enter(ExchangeState.CONSUMING)
                return [ConsumeSlots(tuple(PayloadRef(self._ring, *one) for one in REFERENCE.iter_unpack(event.data)))]
            return self._greet(event.data, now)
        if isinstance(event, SlotTaken):
            self._enter(ExchangeState.SENDING)
            self.deadline = now + self._limits.send_s + event.size_bytes / self._limits.send_bytes_per_s
            return [SendBody(STATUS.pack(Code.OK, event.size_bytes))]
        if isinstance(event, BodySent):
            self.served += 1
            self._await_request(now)
            return [ReleaseSlot()]
        if isinstance(event, SlotRefused):
            self._await_request(now)
            return [SendStatus(_refusal(event.code, event.reason))]
        if isinstance(event, SlotsConsumed):
            self._await_request(now)
            return [SendStatus(STATUS.pack(Code.OK, 0))]
        return self._close(event.reason)

    def check(self) -> None:
        """Raise if the client owes bytes in a state in which it is our turn, or the other way round."""
        if (self.expects_bytes > 0) != ((self.state, "Received") in TRANSITIONS):
            raise InvalidTransition(f"{self!r} expects {self.expects_bytes} bytes")

    def _greet(self, data: bytes, now: float) -> list[Effect]:
        if not hmac.compare_digest(data, self._hello):
            refusal = SendStatus(_refusal(Code.REFUSED, "wrong protocol version or token"))
            return [refusal, *self._close("wrong hello")]
        self._await_request(now)
        return []

    def _request(self, data: bytes, now: float) -> list[Effect]:
        kind, *fields = REQUEST.unpack(data)
        if kind == READ:
            self._enter(ExchangeState.TAKING)
            return [TakeSlot(PayloadRef(self._ring, *fields))]
        if kind == CONSUME and 0 < fields[0] <= MAX_CONSUMED:
            self._enter(ExchangeState.AWAITING_REFERENCES, fields[0] * REFERENCE.size)
            self.deadline = now + self._limits.idle_s
            return []
        return self._close(f"unknown request {kind}" if kind != CONSUME else f"{fields[0]} payloads to consume at once")

    def _await_request(self, now: float) -> None:
        self._enter(ExchangeState.AWAITING_REQUEST, REQUEST.size)
        self.deadline = now + self._limits.idle_s

    def _enter(self, state: ExchangeState, expects_bytes: int = 0) -> None:
        self.state = state
        self.expects_bytes = expects_bytes

    def _close(self, reason: str) -> list[Effect]:
        effects: list[Effect] = [ReleaseSlot()] if self.state is ExchangeState.SENDING else []
        self._enter(ExchangeState.CLOSED)
        return [*effects, CloseConnection(reason)]


def hello(token: str) -> bytes:
    """What a client sends first. Of fixed length whatever the token, so that comparing takes constant time."""
    return HELLO.pack(MAGIC, VERSION, hashlib.sha256(b"penstock payload\0" + token.encode()).digest())


def read(ref: PayloadRef) -> bytes:
    """The request for one payload; its answer is parsed by `parse_status`. `Stale` if no ring can have given `ref`."""
    try:
        if ref.size_bytes <= MAX_CAPACITY_BYTES:
            return REQUEST.pack(READ, *_fields(ref))
    except struct.error:
        pass
    raise Stale(f"no ring can have given the reference {ref}")


def consume(refs: Sequence[PayloadRef]) -> bytes:
    """That these payloads, 1 to `MAX_CONSUMED`, were used; the answer comes when all of them are freed."""
    return REQUEST.pack(CONSUME, len(refs), 0, 0, 0, 0) + b"".join(REFERENCE.pack(*_fields(ref)) for ref in refs)


def _fields(ref: PayloadRef) -> tuple[int, int, int, int, int]:
    return ref.epoch, ref.slot, ref.generation, ref.size_bytes, ref.digest


_CODES = {int(code): code for code in Code}


class Status(msgspec.Struct, frozen=True):
    code: Code
    length: int
    """Of the body when the code is OK, of the reason's text otherwise."""


def parse_status(raw: bytes | bytearray | memoryview, size_bytes: int) -> Status:
    """Read a status that comes before a body of `size_bytes`; no length that was not expected allocates anything."""
    number, length = STATUS.unpack(raw)
    code = _CODES.get(number)
    if code is None:
        raise RemoteProtocolError(f"server answered with unknown status {number}")
    if code is Code.OK and length != size_bytes:
        raise RemoteProtocolError(f"server announced a body of {length} bytes, the reference says {size_bytes}")
    if code is not Code.OK and length > MAX_TEXT_BYTES:
        raise RemoteProtocolError(f"server announced a reason of {length} bytes, the limit is {MAX_TEXT_BYTES}")
    return Status(code, length)


def _refusal(code: Code, reason: str) -> bytes:
    text = reason.encode()[:MAX_TEXT_BYTES]
    return STATUS.pack(code, len(text)) + text
