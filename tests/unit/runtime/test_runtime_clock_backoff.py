from __future__ import annotations

import time

import pytest

from penstock.runtime.backoff import Backoff
from penstock.runtime.clock import ManualClock, SystemClock


def test_system_clock_ignores_a_stepped_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SystemClock()
    before = clock.now()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert clock.now() >= before


def test_system_clock_begins_no_earlier_than_what_is_on_record() -> None:
    recorded = time.time() + 3600
    assert SystemClock(not_before=recorded).now() >= recorded


def test_manual_clock_moves_when_told_and_never_back() -> None:
    clock = ManualClock(10.0)
    assert clock.advance(2.5) == clock.now() == 12.5
    with pytest.raises(ValueError, match="never runs backwards"):
        clock.advance(-1)


def test_backoff_doubles_to_its_cap_and_starts_again() -> None:
    backoff = Backoff(0.05, 0.3)
    assert [backoff.next_s() for _ in range(5)] == [0.05, 0.1, 0.2, 0.3, 0.3]
    assert backoff.attempts == 5
    backoff.reset()
    assert backoff.next_s() == 0.05


def test_backoff_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="first_s"):
        Backoff(0, 1)
