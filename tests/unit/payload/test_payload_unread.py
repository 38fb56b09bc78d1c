"""Payloads that nobody freed expire with the version of their samples."""

from __future__ import annotations

from penstock.payload.unread import Unread
from penstock.records.payload import PayloadRef


def payload(slot: int) -> PayloadRef:
    return PayloadRef("ring", 1, slot, 1, 10, 0)


def test_payloads_expire_with_their_version_and_once_more_a_version_later() -> None:
    unread = Unread()
    for slot, version in enumerate((3, 3, 4, 6)):
        unread.delivered(version, payload(slot))
    assert unread.expire(3) == []
    assert unread.expire(5) == [payload(0), payload(1), payload(2)]
    assert unread.expire(5) == []
    assert set(unread.tracked()) == {payload(slot) for slot in range(4)}
    assert unread.expire(6) == [payload(0), payload(1), payload(2)]
    assert list(unread.tracked()) == [payload(3)]
    assert "{6: 1}" in repr(unread)


def test_a_step_back_of_the_trainer_brings_nothing_back() -> None:
    unread = Unread()
    unread.delivered(7, payload(0))
    unread.delivered(2, payload(1))
    assert unread.expire(6) == [payload(1)]
    unread.delivered(5, payload(2))
    assert unread.expire(4) == []
    assert unread.expire(8) == [payload(1), payload(0), payload(2)]
