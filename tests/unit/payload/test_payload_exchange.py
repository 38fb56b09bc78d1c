"""The server's half of the exchange, and how the client reads what it is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.errors import InvalidTransition, RemoteProtocolError
from penstock.payload import slot
from penstock.payload.exchange import (
    MAX_CONSUMED,
    MAX_TEXT_BYTES,
    REQUEST,
    STATUS,
    TRANSITIONS,
    BodySent,
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
    Status,
    TakeSlot,
    consume,
    hello,
    parse_status,
    read,
)
from penstock.records.payload import PayloadRef

REF = PayloadRef("ring", 77, 3, 9, 1000, 0xABCDEF)
LIMITS = ExchangeLimits(hello_s=1, idle_s=10, send_s=2, send_bytes_per_s=1000)
CONSUME, REFERENCES = consume([REF])[: REQUEST.size], consume([REF])[REQUEST.size :]
STORY: list[Event] = [
    Received(hello("secret")),
    Received(read(REF)),
    SlotTaken(1000),
    BodySent(),
    Received(CONSUME),
    Received(REFERENCES),
    SlotsConsumed(),
]


def server(events: int = 0) -> ServerExchange:
    exchange = ServerExchange("secret", "ring", 77, 100.0, LIMITS)
    for event in STORY[:events]:
        exchange.handle(event, 100.0)
        exchange.check()
    return exchange


def test_one_exchange_from_hello_to_confirmation() -> None:
    exchange = server()
    told = [exchange.handle(event, 100.0) for event in STORY]
    assert told == [
        [],
        [TakeSlot(REF)],
        [SendBody(STATUS.pack(Code.OK, 1000))],
        [ReleaseSlot()],
        [],
        [ConsumeSlots((REF,))],
        [SendStatus(STATUS.pack(Code.OK, 0))],
    ]
    assert exchange.served == 1
    assert exchange.state is ExchangeState.AWAITING_REQUEST
    exchange.check()


@pytest.mark.parametrize(("events", "deadline"), [(0, 101), (1, 110), (3, 103), (4, 110), (5, 110), (7, 110)])
def test_everything_a_client_must_do_has_a_deadline(events: int, deadline: float) -> None:
    assert server(events).deadline == deadline


@pytest.mark.parametrize("bad", [hello("guess"), b"\0" * 40, hello("secret")[:-1] + b"x"])
def test_a_client_without_the_token_is_refused(bad: bytes) -> None:
    exchange = server()
    refusal, close = exchange.handle(Received(bad), 100.0)
    assert isinstance(refusal, SendStatus)
    assert isinstance(close, CloseConnection)
    assert parse_status(refusal.data[: STATUS.size], 1000).code is Code.REFUSED
    assert exchange.state is ExchangeState.CLOSED


@pytest.mark.parametrize("events", range(8))
def test_whatever_fails_a_held_slot_is_released_once(events: int) -> None:
    exchange = server(events)
    effects = exchange.handle(ConnectionFailed("reset"), 100.0)
    exchange.check()
    assert exchange.state is ExchangeState.CLOSED
    assert effects == [ReleaseSlot()] * (events == 3) + [CloseConnection("reset")]
    with pytest.raises(InvalidTransition):
        exchange.handle(ConnectionFailed("again"), 100.0)


@pytest.mark.parametrize("events", [1, 4, 7])
def test_a_client_may_say_on_any_connection_and_more_than_once_that_it_is_done(events: int) -> None:
    exchange = server(events)
    for _ in range(2):
        said = consume([REF, REF])
        assert exchange.handle(Received(said[: exchange.expects_bytes]), 100.0) == []
        assert exchange.expects_bytes == len(said) - REQUEST.size
        assert exchange.handle(Received(said[REQUEST.size :]), 100.0) == [ConsumeSlots((REF, REF))]
        exchange.handle(SlotsConsumed(), 100.0)


def test_a_consume_is_of_one_payload_or_more_and_bounded() -> None:
    exchange = server(1)
    assert exchange.handle(Received(consume([REF] * MAX_CONSUMED)[: REQUEST.size]), 100.0) == []
    for refs in ([], [REF] * (MAX_CONSUMED + 1)):
        (effect,) = server(1).handle(Received(consume(refs)[: REQUEST.size]), 100.0)
        assert effect == CloseConnection(f"{len(refs)} payloads to consume at once")


def test_a_consumption_that_failed_is_never_confirmed() -> None:
    exchange = server(6)
    assert exchange.handle(ConnectionFailed("could not consume"), 100.0) == [CloseConnection("could not consume")]
    with pytest.raises(InvalidTransition):
        exchange.handle(SlotsConsumed(), 100.0)


def test_a_refused_slot_leaves_the_connection_usable() -> None:
    exchange = server(2)
    (refusal,) = exchange.handle(SlotRefused(Code.STALE, "é" * 5000), 100.0)
    assert isinstance(refusal, SendStatus)
    assert parse_status(refusal.data[: STATUS.size], 1000) == Status(Code.STALE, MAX_TEXT_BYTES)
    assert exchange.handle(Received(read(REF)), 100.0) == [TakeSlot(REF)]


def test_an_unknown_request_closes() -> None:
    assert isinstance(server(1).handle(Received(REQUEST.pack(9, 1, 1, 1, 1, 1)), 100.0)[0], CloseConnection)


def test_an_event_out_of_place_is_a_bug() -> None:
    misplaced = [(0, BodySent()), (1, SlotTaken(1)), (3, Received(CONSUME)), (4, BodySent()), (6, Received(CONSUME))]
    for events, event in misplaced:
        with pytest.raises(InvalidTransition):
            server(events).handle(event, 100.0)


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (STATUS.pack(99, 0), "unknown status 99"),
        (STATUS.pack(Code.OK, 1 << 50), "announced a body of"),
        (STATUS.pack(Code.OK, 999), "announced a body of 999"),
        (STATUS.pack(Code.STALE, MAX_TEXT_BYTES + 1), "announced a reason of"),
    ],
)
def test_a_lying_status_is_refused_before_anything_is_allocated(raw: bytes, complaint: str) -> None:
    with pytest.raises(RemoteProtocolError, match=complaint):
        parse_status(raw, 1000)


@pytest.mark.parametrize("table", ["slot", "exchange"])
def test_the_document_draws_the_tables_in_the_code(table: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / "protocols" / "exchange.md").read_text()
    section = text.split(f"<!-- {table} table -->")[1].split("<!-- end -->")[0]
    rows = {
        tuple(cell.strip() for cell in row.strip("|").split("|")) for row in re.findall(r"^\|.*\|$", section, re.M)[2:]
    }
    if table == "slot":
        expected = {(state.name, action, after.name) for (state, action), after in slot.TRANSITIONS.items()}
    else:
        expected = {
            (state.name, event, " or ".join(after.name for after in afters))
            for (state, event), afters in TRANSITIONS.items()
        }
    assert rows == expected
