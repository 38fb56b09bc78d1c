"""One exchange: one request, one status, one body, one acknowledgement. The same on every carrier with a wire.

    client  ──hello──▶            once per connection: magic, version, digest of the run's token
            ──request──▶          which payload, named as exactly as a reference names it
            ◀──status──           here it comes, or why not
            ◀──body──
            ──acknowledgement──▶  complete and digest-checked: consumed; or not: released

The server's half is `ServerExchange`. It takes a slot per request and finalises it exactly once: consumed only on the
client's acknowledgement, released on everything else that can happen, so that a lost reply loses no sample. It also
sets the deadline of whatever it waits for, so that a client that stalls costs its own connection only.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from enum import IntEnum
from typing import NamedTuple

from penstock.errors import InvalidTransition, RemoteProtocolError
from penstock.records.payload import PayloadRef

MAGIC = b"PSTK"
VERSION = 1
HELLO = struct.Struct("<4sB3x32s")
REQUEST = struct.Struct("<B7xQQQQQ")
STATUS = struct.Struct("<B7xQ")
READ = 1
MAX_TEXT_BYTES = 1024


class Code(IntEnum):
    OK = 0
    STALE = 1
    """Gone for good."""
    BUSY = 2
    """Not now; try again."""
    REFUSED = 3
    """The hello was not accepted."""


class Ack(IntEnum):
    CONSUMED = 1
    RELEASED = 2


class ExchangeState(IntEnum):
    AWAITING_HELLO = 0
    AWAITING_REQUEST = 1
    TAKING = 2
    SENDING = 3
    AWAITING_ACK = 4
    CLOSED = 5


# Events


class Received(NamedTuple):
    """Exactly the bytes that `ServerExchange.expects_bytes` asked for."""

    data: bytes


class SlotTaken(NamedTuple):
    size_bytes: int


class SlotRefused(NamedTuple):
    code: Code
    reason: str


class BodySent(NamedTuple):
    pass


class ConnectionFailed(NamedTuple):
    """Closed, reset, or past the deadline."""

    reason: str


Event = Received | SlotTaken | SlotRefused | BodySent | ConnectionFailed

# Effects


class TakeSlot(NamedTuple):
    ref: PayloadRef


class SendRefusal(NamedTuple):
    data: bytes


class SendBody(NamedTuple):
    """The status, and the whole body of the slot that was taken right after it."""

    header: bytes


class FinaliseSlot(NamedTuple):
    consumed: bool


class CloseConnection(NamedTuple):
    reason: str


Effect = TakeSlot | SendRefusal | SendBody | FinaliseSlot | CloseConnection

TRANSITIONS: dict[tuple[ExchangeState, str], tuple[ExchangeState, ...]] = {
    (ExchangeState.AWAITING_HELLO, "Received"): (ExchangeState.AWAITING_REQUEST, ExchangeState.CLOSED),
    (ExchangeState.AWAITING_REQUEST, "Received"): (ExchangeState.TAKING, ExchangeState.CLOSED),
    (ExchangeState.TAKING, "SlotTaken"): (ExchangeState.SENDING,),
    (ExchangeState.TAKING, "SlotRefused"): (ExchangeState.AWAITING_REQUEST,),
    (ExchangeState.SENDING, "BodySent"): (ExchangeState.AWAITING_ACK,),
    (ExchangeState.AWAITING_ACK, "Received"): (ExchangeState.AWAITING_REQUEST, ExchangeState.CLOSED),
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
    ack_s: float = 30.0


class ServerExchange:
    """One connection, seen from the server of one ring."""

    def __init__(self, token: str, ring: str, epoch: int, now: float, limits: ExchangeLimits | None = None) -> None:
        self._hello = hello(token)
        self._ring = ring
        self._epoch = epoch
        self._limits = limits or ExchangeLimits()
        self.state = ExchangeState.AWAITING_HELLO
        self.deadline = now + self._limits.hello_s
        """When the thing that is waited for must be complete."""
        self.served = 0
        self._holds_slot = False

    def __repr__(self) -> str:
        return f"<ServerExchange {self.state.name} until {self.deadline:.3f}, {self.served} served>"

    @property
    def expects_bytes(self) -> int:
        """How many bytes the client owes now; 0 while it is our turn."""
        return _EXPECTED_BYTES.get(self.state, 0)

    def handle(self, event: Event, now: float) -> list[Effect]:
        if (self.state, type(event).__name__) not in TRANSITIONS:
            raise InvalidTransition(f"{type(event).__name__} came while {self.state.name}")
        if isinstance(event, Received):
            if self.state is ExchangeState.AWAITING_REQUEST:
                return self._request(event.data)
            if self.state is ExchangeState.AWAITING_ACK:
                return self._acknowledge(event.data, now)
            return self._greet(event.data, now)
        if isinstance(event, SlotTaken):
            self._holds_slot = True
            limit_s = self._limits.send_s + event.size_bytes / self._limits.send_bytes_per_s
            self._enter(ExchangeState.SENDING, now + limit_s)
            return [SendBody(STATUS.pack(Code.OK, event.size_bytes))]
        if isinstance(event, SlotRefused):
            self._enter(ExchangeState.AWAITING_REQUEST, now + self._limits.idle_s)
            return [SendRefusal(_refusal(event.code, event.reason))]
        if isinstance(event, BodySent):
            self._enter(ExchangeState.AWAITING_ACK, now + self._limits.ack_s)
            return []
        return self._close(event.reason)

    def check(self) -> None:
        """Raise unless a slot is held exactly while its body is being sent or acknowledged."""
        if self._holds_slot != (self.state in (ExchangeState.SENDING, ExchangeState.AWAITING_ACK)):
            raise InvalidTransition(f"{self!r} {'holds a' if self._holds_slot else 'has no'} slot")

    def _greet(self, data: bytes, now: float) -> list[Effect]:
        if not hmac.compare_digest(data, self._hello):
            refusal = SendRefusal(_refusal(Code.REFUSED, "wrong protocol version or token"))
            return [refusal, *self._close("wrong hello")]
        self._enter(ExchangeState.AWAITING_REQUEST, now + self._limits.idle_s)
        return []

    def _request(self, data: bytes) -> list[Effect]:
        kind, epoch, slot, generation, size_bytes, digest = REQUEST.unpack(data)
        if kind != READ:
            return self._close(f"unknown request {kind}")
        self.state = ExchangeState.TAKING
        return [TakeSlot(PayloadRef(self._ring, epoch, slot, generation, size_bytes, digest))]

    def _acknowledge(self, data: bytes, now: float) -> list[Effect]:
        consumed = data[0] == Ack.CONSUMED
        if not consumed and data[0] != Ack.RELEASED:
            return self._close(f"unknown acknowledgement {data[0]}")
        self._holds_slot = False
        self.served += consumed
        self._enter(ExchangeState.AWAITING_REQUEST, now + self._limits.idle_s)
        return [FinaliseSlot(consumed)]

    def _enter(self, state: ExchangeState, deadline: float) -> None:
        self.state = state
        self.deadline = deadline

    def _close(self, reason: str) -> list[Effect]:
        effects: list[Effect] = [FinaliseSlot(consumed=False)] if self._holds_slot else []
        self._holds_slot = False
        self.state = ExchangeState.CLOSED
        return [*effects, CloseConnection(reason)]


_EXPECTED_BYTES = {
    ExchangeState.AWAITING_HELLO: HELLO.size,
    ExchangeState.AWAITING_REQUEST: REQUEST.size,
    ExchangeState.AWAITING_ACK: 1,
}


def hello(token: str) -> bytes:
    """What a client sends first. Of fixed length whatever the token, so that comparing takes constant time."""
    return HELLO.pack(MAGIC, VERSION, hashlib.sha256(b"penstock payload\0" + token.encode()).digest())


def request(ref: PayloadRef) -> bytes:
    return REQUEST.pack(READ, ref.epoch, ref.slot, ref.generation, ref.size_bytes, ref.digest)


class Status(NamedTuple):
    code: Code
    length: int
    """Of the body when the code is OK, of the reason's text otherwise."""


def parse_status(raw: bytes | bytearray | memoryview, ref: PayloadRef) -> Status:
    """Read the answer to `request(ref)`; nothing is ever allocated by a length that was not expected."""
    number, length = STATUS.unpack(raw)
    try:
        code = Code(number)
    except ValueError:
        raise RemoteProtocolError(f"server answered with unknown status {number}") from None
    if code is Code.OK and length != ref.size_bytes:
        raise RemoteProtocolError(f"server announced a body of {length} bytes, the reference says {ref.size_bytes}")
    if code is not Code.OK and length > MAX_TEXT_BYTES:
        raise RemoteProtocolError(f"server announced a reason of {length} bytes, the limit is {MAX_TEXT_BYTES}")
    return Status(code, length)


def _refusal(code: Code, reason: str) -> bytes:
    text = reason.encode()[:MAX_TEXT_BYTES]
    return STATUS.pack(code, len(text)) + text
