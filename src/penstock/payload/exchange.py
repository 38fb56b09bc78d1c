"""One exchange: one request, one status, one body. The same on every transport with a wire.

    client  ──hello──▶     once per connection: magic, version, digest of the run's token
            ──read──▶      one payload: all fields of its reference but the ring
            ◀──status──    OK, or the reason why not
            ◀──body──      the client checks its digest
            ──consume──▶   after use, on any connection: number of payloads and their references
            ◀──status──    all of them were freed

`ServerExchange` is the server side. It takes a slot per read and ends that attempt exactly once, by releasing it. Sent
is not received: only a consume request frees a payload. Until then it can be read again, by a client that lost a reply
or repeats a training step. Reads and consumes may be repeated.

The machine also sets the deadline of each wait, so that a stalled client costs only its own connection.
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
"""Payloads per consume request."""


class Code(IntEnum):
    OK = 0
    STALE = 1
    """Gone permanently."""
    BUSY = 2
    """Temporarily unavailable; retry."""
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
    """Exactly `ServerExchange.expects_bytes` bytes."""

    data: bytes


class SlotTaken(msgspec.Struct, frozen=True):
    size_bytes: int


class SlotRefused(msgspec.Struct, frozen=True):
    code: Code
    reason: str


class BodySent(msgspec.Struct, frozen=True):
    """The wire has accepted the whole body."""


class SlotsConsumed(msgspec.Struct, frozen=True):
    """All of them were freed, or were already gone."""


class ConnectionFailed(msgspec.Struct, frozen=True):
    """Closed, reset, or past the deadline."""

    reason: str


Event = Received | SlotTaken | SlotRefused | BodySent | SlotsConsumed | ConnectionFailed

# Effects


class TakeSlot(msgspec.Struct, frozen=True):
    ref: PayloadRef


class SendBody(msgspec.Struct, frozen=True):
    """Send the status, then the whole body of the taken slot."""

    header: bytes


class ReleaseSlot(msgspec.Struct, frozen=True):
    """End the read attempt, successful or not."""


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
    """How long a server waits for each step of a client."""

    hello_s: float = 5.0
    idle_s: float = 120.0
    """For the next complete request. Then the connection is closed, even if part of a request has arrived."""
    send_s: float = 10.0
    send_bytes_per_s: float = 4e6
    """A body may take `send_s` plus its size at this rate; a slower client is disconnected."""

    def body_s(self, size_bytes: int) -> float:
        """How long a body of this size may take."""
        return self.send_s + size_bytes / self.send_bytes_per_s


class ServerExchange:
    """One connection, seen from the server of one ring."""

    def __init__(self, token: str, ring: str, epoch: int, now: float, limits: ExchangeLimits | None = None) -> None:
        self._hello = hello(token)
        self._ring = ring
        self._epoch = epoch
        self._limits = limits or ExchangeLimits()
        self.state = ExchangeState.AWAITING_HELLO
        self.expects_bytes = HELLO.size
        """Bytes the client must send next; 0 while it is the server's turn."""
        self.deadline = now + self._limits.hello_s
        """When the current step must be complete."""
        self.served = 0
        """Bodies sent completely."""

    def __repr__(self) -> str:
        return f"<ServerExchange {self.state.name} until {self.deadline:.3f}, {self.served} served>"

    def handle(self, event: Event, now: float) -> list[Effect]:
        if (self.state, type(event).__name__) not in TRANSITIONS:
            raise InvalidTransition(f"event {type(event).__name__} is not allowed in state {self.state.name}")
        if isinstance(event, Received):
            if self.state is ExchangeState.AWAITING_REQUEST:
                return self._request(event.data, now)
            if self.state is ExchangeState.AWAITING_REFERENCES:
                self._enter(ExchangeState.CONSUMING)
                return [ConsumeSlots(tuple(PayloadRef(self._ring, *one) for one in REFERENCE.iter_unpack(event.data)))]
            return self._check_hello(event.data, now)
        if isinstance(event, SlotTaken):
            self._enter(ExchangeState.SENDING)
            self.deadline = now + self._limits.body_s(event.size_bytes)
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
        """Raises unless bytes are expected in exactly the states that receive."""
        if (self.expects_bytes > 0) != ((self.state, "Received") in TRANSITIONS):
            raise InvalidTransition(f"{self!r} expects {self.expects_bytes} bytes")

    def _check_hello(self, data: bytes, now: float) -> list[Effect]:
        if not hmac.compare_digest(data, self._hello):
            return [SendStatus(refused_hello()), *self._close("wrong hello")]
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
    """The first message of a client. Its length is fixed for any token, so that comparing takes constant time."""
    return HELLO.pack(MAGIC, VERSION, hashlib.sha256(b"penstock payload\0" + token.encode()).digest())


def refused_hello() -> bytes:
    """The status after a wrong hello."""
    return _refusal(Code.REFUSED, "wrong protocol version or token")


def read(ref: PayloadRef) -> bytes:
    """The request for one payload, answered by a status. Raises `Stale` if no ring can have issued `ref`."""
    try:
        if ref.size_bytes <= MAX_CAPACITY_BYTES:
            return REQUEST.pack(READ, *_fields(ref))
    except struct.error:
        pass
    raise Stale(f"no ring can have issued the reference {ref}")


def consume(refs: Sequence[PayloadRef]) -> bytes:
    """The request to free these payloads, 1 to `MAX_CONSUMED`, answered when all of them are freed."""
    return REQUEST.pack(CONSUME, len(refs), 0, 0, 0, 0) + b"".join(REFERENCE.pack(*_fields(ref)) for ref in refs)


def _fields(ref: PayloadRef) -> tuple[int, int, int, int, int]:
    return ref.epoch, ref.slot, ref.generation, ref.size_bytes, ref.digest


_CODES = {int(code): code for code in Code}


class Status(msgspec.Struct, frozen=True):
    code: Code
    length: int
    """Of the body when the code is OK, of the reason's text otherwise."""


def parse_status(raw: bytes | bytearray | memoryview, size_bytes: int) -> Status:
    """Parses the status before a body of `size_bytes`; an unexpected length raises before anything is allocated."""
    number, length = STATUS.unpack(raw)
    code = _CODES.get(number)
    if code is None:
        raise RemoteProtocolError(f"server answered with unknown status {number}")
    if code is Code.OK and length != size_bytes:
        raise RemoteProtocolError(f"server announced a body of {length} bytes, the reference states {size_bytes}")
    if code is not Code.OK and length > MAX_TEXT_BYTES:
        raise RemoteProtocolError(f"server announced a reason of {length} bytes, the limit is {MAX_TEXT_BYTES}")
    return Status(code, length)


def _refusal(code: Code, reason: str) -> bytes:
    text = reason.encode()[:MAX_TEXT_BYTES]
    return STATUS.pack(code, len(text)) + text
