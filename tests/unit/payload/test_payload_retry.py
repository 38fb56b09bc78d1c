"""Retry of one batch: deadlines that nest, rounds, and an exact account of what is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import InvalidTransition, LocalProtocolError
from penstock.payload.exchange import ExchangeLimits
from penstock.payload.retry import (
    BatchCancelled,
    BatchRetry,
    BeginCall,
    CallFailed,
    CallSucceeded,
    Effect,
    Failure,
    ReportMissing,
    RetryPolicy,
    TimePassed,
)
from penstock.records.payload import PayloadRef

A, B, C = (PayloadRef("ring", 1, slot, 1, 0, 0) for slot in range(3))
POLICY = RetryPolicy(call_s=10, slot_s=25, batch_s=40, rounds=3, calls_per_round=2, pause_s=1, concurrency=2)
RESET = Failure("reset", "by peer")


def begun(effects: list[Effect]) -> list[tuple[PayloadRef, float]]:
    return [(effect.ref, effect.deadline) for effect in effects if isinstance(effect, BeginCall)]


@pytest.mark.parametrize("times", [(10, 10, 40), (10, 50, 40), (0, 1, 2)])
def test_deadlines_must_nest(times: tuple[float, float, float]) -> None:
    with pytest.raises(LocalProtocolError, match="must nest"):
        RetryPolicy(*times)


def test_concurrency_is_bounded_and_duplicates_are_one() -> None:
    retry = BatchRetry([A, B, C, A], POLICY, 0.0)
    assert begun(retry.handle(TimePassed(), 0.0)) == [(A, 10), (B, 10)]
    assert begun(retry.handle(CallSucceeded(A), 3.0)) == [(C, 13)]
    retry.handle(CallSucceeded(B), 4.0)
    retry.handle(CallSucceeded(C), 5.0)
    assert retry.done
    assert retry.arrived == {A, B, C}
    retry.check()


def test_a_failed_call_is_repeated_at_once_and_then_in_the_next_round() -> None:
    retry = BatchRetry([A], POLICY, 0.0)
    retry.handle(TimePassed(), 0.0)
    assert begun(retry.handle(CallFailed(A, RESET), 1.0)) == [(A, 11)]
    assert retry.handle(CallFailed(A, RESET), 2.0) == []
    assert retry.wake_at(2.0) == 3.0
    assert begun(retry.handle(TimePassed(), 3.0)) == [(A, 13)]
    assert begun(retry.handle(CallFailed(A, RESET), 4.0)) == [(A, 14)]
    assert retry.handle(CallFailed(A, RESET), 5.0) == []
    assert retry.wake_at(5.0) == 7.0
    assert begun(retry.handle(TimePassed(), 7.0)) == [(A, 17)]
    assert begun(retry.handle(CallFailed(A, RESET), 8.0)) == [(A, 18)]
    assert retry.handle(CallFailed(A, RESET), 9.0) == [ReportMissing(A, Failure("reset", "by peer (after 6 calls)"))]
    assert retry.done


def test_a_stale_payload_is_never_asked_for_again() -> None:
    retry = BatchRetry([A, B], POLICY, 0.0)
    retry.handle(TimePassed(), 0.0)
    stale = Failure("stale", "generation 1 is gone")
    assert retry.handle(CallFailed(A, stale), 1.0) == [ReportMissing(A, stale)]
    retry.handle(CallSucceeded(B), 1.0)
    assert retry.done
    assert retry.missing == {A: stale}


def test_no_call_is_given_more_time_than_the_slot_has() -> None:
    retry = BatchRetry([A], POLICY, 0.0)
    retry.handle(TimePassed(), 0.0)
    timed_out = Failure("timed_out", "no answer")
    assert begun(retry.handle(CallFailed(A, timed_out), 10.0)) == [(A, 20)]
    retry.handle(CallFailed(A, timed_out), 20.0)
    assert begun(retry.handle(TimePassed(), 21.0)) == [(A, 25)]
    effects = retry.handle(CallFailed(A, timed_out), 25.0)
    assert effects == [
        ReportMissing(
            A,
            Failure("timed_out", "payload deadline of 25 s passed; last failure: timed_out, no answer (after 3 calls)"),
        )
    ]


def test_no_slot_is_given_more_time_than_the_batch_has() -> None:
    retry = BatchRetry([A, B, C], RetryPolicy(10, 25, 40, concurrency=1), 0.0)
    retry.handle(TimePassed(), 0.0)
    assert begun(retry.handle(CallSucceeded(A), 35.0)) == [(B, 40)]
    effects = retry.handle(CallFailed(B, RESET), 40.0)
    assert {effect.ref for effect in effects if isinstance(effect, ReportMissing)} == {B, C}
    assert retry.missing[C] == Failure("timed_out", "batch deadline of 40 s passed")
    assert retry.done


def test_deadlines_grow_with_the_size_as_those_of_the_server_do() -> None:
    rate = ExchangeLimits().send_bytes_per_s
    large, small = (PayloadRef("ring", 1, slot, 1, int(seconds * rate), 0) for slot, seconds in enumerate((100, 2)))
    retry = BatchRetry([large, small], POLICY, 0.0)
    assert begun(retry.handle(TimePassed(), 0.0)) == [(large, 110), (small, 12)]
    timed_out = Failure("timed_out", "no answer")
    assert begun(retry.handle(CallFailed(small, timed_out), 12.0)) == [(small, 24)]
    assert begun(retry.handle(CallFailed(small, timed_out), 24.0)) == []
    assert begun(retry.handle(TimePassed(), 25.0)) == [(small, 27)]
    assert begun(retry.handle(CallFailed(large, timed_out), 110.0)) == [(large, 125)]
    assert retry.deadline == 140.0


SLOW = Failure("timed_out", "after 3 of 9 bytes", partial=True)


def test_fewer_calls_share_a_slow_link() -> None:
    """They slow each other down: as many as before would time out again."""
    refs = [PayloadRef("ring", 1, slot, 1, 0, 0) for slot in range(8)]
    retry = BatchRetry(refs, replace(POLICY, concurrency=8), 0.0)
    assert len(begun(retry.handle(TimePassed(), 0.0))) == 8
    effects = [effect for ref in refs for effect in retry.handle(CallFailed(ref, SLOW), 10.0)]
    assert [ref for ref, _ in begun(effects)] == refs[:4], "calls of one time count once"
    assert [ref for ref, _ in begun(retry.handle(CallSucceeded(refs[0]), 11.0))] == [refs[4]]
    for ref in refs[1:4]:
        effects = retry.handle(CallFailed(ref, SLOW), 20.0)
    assert len(retry.arrived) == 1
    assert begun(effects) == [(refs[5], 25)]
    retry.check()


def test_a_server_that_does_not_answer_slows_no_other() -> None:
    refs = [PayloadRef("ring", 1, slot, 1, 0, 0) for slot in range(8)]
    retry = BatchRetry(refs, replace(POLICY, concurrency=4), 0.0)
    retry.handle(TimePassed(), 0.0)
    for ref in refs[:4]:
        assert len(begun(retry.handle(CallFailed(ref, Failure("timed_out", "no answer")), 10.0))) == 1


def test_cancelling_gives_up_what_is_queued_and_waits_for_what_is_not() -> None:
    retry = BatchRetry([A, B, C], POLICY, 0.0)
    retry.handle(TimePassed(), 0.0)
    effects = retry.handle(BatchCancelled("stop"), 1.0)
    assert effects == [ReportMissing(C, Failure("cancelled", "stop"))]
    assert not retry.done
    retry.handle(CallFailed(A, Failure("cancelled", "stop")), 1.0)
    retry.handle(CallFailed(B, RESET), 1.0)
    assert retry.done
    assert set(retry.missing) == {A, B, C}
    retry.check()


def test_an_answer_to_no_request_is_a_bug() -> None:
    with pytest.raises(InvalidTransition):
        BatchRetry([A], POLICY, 0.0).handle(CallSucceeded(A), 0.0)
