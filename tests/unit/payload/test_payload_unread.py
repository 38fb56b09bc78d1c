"""Payloads that were not freed expire with the version of their samples."""

from __future__ import annotations

from penstock.payload.exchange import ExchangeLimits
from penstock.payload.unread import LONGEST_READ_S, Unread
from penstock.records.payload import PayloadRef


def payload(slot: int, size_bytes: int = 10) -> PayloadRef:
    return PayloadRef("ring", 1, slot, 1, size_bytes, 0)


def test_payloads_expire_with_their_version() -> None:
    unread = Unread()
    for slot, version in enumerate((3, 3, 4, 6)):
        unread.delivered(version, payload(slot))
    assert unread.expire(3, 0.0) == []
    assert unread.expire(5, 1.0) == [payload(0), payload(1), payload(2)]
    assert unread.expire(5, 2.0) == []
    assert "{6: 1}" in repr(unread)


def test_each_comes_once_more_when_no_read_of_it_can_still_be_going_on() -> None:
    unread = Unread()
    unread.delivered(3, payload(0))
    unread.delivered(9, payload(1))
    assert unread.expire(4, 10.0) == [payload(0)]
    assert unread.expire(4, 9.9 + LONGEST_READ_S) == []
    assert unread.expire(4, 10.0 + LONGEST_READ_S) == [payload(0)]
    assert unread.expire(4, 11.0 + LONGEST_READ_S) == []


def test_a_large_payload_comes_again_when_no_server_can_still_send_it() -> None:
    unread = Unread()
    large, small = payload(0, 1_000_000_000), payload(1)
    longest_s = ExchangeLimits().body_s(large.size_bytes)
    assert longest_s > LONGEST_READ_S
    unread.delivered(3, large)
    unread.delivered(4, small)
    assert unread.expire(4, 0.0) == [large]
    assert unread.expire(5, 1.0) == [small]
    assert unread.expire(5, 1.0 + LONGEST_READ_S) == [small]
    assert unread.expire(5, longest_s - 0.1) == []
    assert unread.expire(5, longest_s) == [large]
    assert unread.expire(5, longest_s + 1.0) == []


def test_a_step_back_of_the_trainer_brings_nothing_back() -> None:
    unread = Unread()
    unread.delivered(7, payload(0))
    unread.delivered(2, payload(1))
    assert unread.expire(6, 0.0) == [payload(1)]
    unread.delivered(5, payload(2))
    assert unread.expire(4, 1.0) == []
    assert unread.expire(8, 2.0) == [payload(0), payload(2)]
