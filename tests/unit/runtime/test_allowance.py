"""What strangers may cost together."""

from __future__ import annotations

from penstock.runtime.listening import Allowance


def test_beyond_the_burst_the_pause_grows_with_what_is_owed() -> None:
    allowance = Allowance(per_s=10.0, burst=5.0)
    assert allowance.take(5, now=0.0) == 0.0
    assert allowance.take(2, now=0.0) == 0.2
    assert allowance.take(0, now=0.2) == 0.0
    assert allowance.take(1, now=0.2) == 0.1


def test_it_refills_up_to_the_burst_and_takes_back_what_was_not_a_stranger() -> None:
    allowance = Allowance(per_s=10.0, burst=3.0)
    assert [allowance.take_if_left(0.0) for _ in range(4)] == [True, True, True, False]
    assert [allowance.take_if_left(100.0) for _ in range(4)] == [True, True, True, False]
    allowance.give_back(1)
    assert [allowance.take_if_left(100.0) for _ in range(2)] == [True, False]
    allowance.give_back(100)
    assert [allowance.take_if_left(100.0) for _ in range(4)] == [True, True, True, False]
