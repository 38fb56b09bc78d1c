"""Single decisions of the prefetch machine, read like a story. The property test covers the orders of events."""

from __future__ import annotations

import pytest

from penstock.errors import InvalidTransition, LocalProtocolError
from penstock.records.ids import PromptIndex, SampleId, Version
from penstock.records.prompt import PromptLease
from penstock.rollout import flow
from penstock.rollout.prefetch import Bounds, Prefetch


def lease(number: int, samples: int = 2) -> PromptLease:
    ids = tuple(SampleId(number * 10 + member) for member in range(samples))
    return PromptLease(PromptIndex(number), 0, ids, tuple(range(samples)), Version(0))


def granted(*numbers: int) -> flow.LeaseAnswered:
    return flow.LeaseAnswered(tuple(lease(number) for number in numbers), "granted")


def started(prefetch: bool = True, **bounds: int) -> Prefetch:
    machine = Prefetch(Bounds(**{"batch_samples": 4, "queue_samples": 8, **bounds}), prefetch=prefetch)
    [ask] = machine.handle(flow.Started(), 0.0)
    assert ask == flow.AskLease(machine.bounds.queue_samples if prefetch else machine.bounds.batch_samples)
    return machine


def test_nothing_is_leased_before_preflight_passed() -> None:
    machine = Prefetch(Bounds(), prefetch=True)
    assert machine.handle(flow.PrefetchSet(True), 0.0) == []


def test_the_first_lease_is_prepared_alone_to_learn_its_size_then_many_at_once() -> None:
    machine = started()
    assert machine.handle(granted(0, 1, 2, 3), 0.1) == [flow.Prepare((0,))]
    assert machine.handle(flow.PrepareEnded(0, 100), 0.2) == [flow.Prepare((1, 2, 3))]


def test_a_full_batch_starts_while_later_leases_are_still_prepared() -> None:
    machine = started()
    machine.handle(granted(0, 1, 2, 3), 0.1)
    machine.handle(flow.PrepareEnded(0), 0.2)
    effects = machine.handle(flow.PrepareEnded(1), 0.3)
    assert effects == [flow.Generate(0, (0, 1)), flow.AskLease(4)]
    machine.check()


def test_without_prefetch_the_next_ask_goes_out_with_the_delivery() -> None:
    machine = started(prefetch=False)
    machine.handle(granted(0), 0.1)
    assert machine.handle(flow.PrepareEnded(0), 0.2) == [flow.Generate(0, (0,))]
    assert machine.handle(flow.GenerateEnded(0), 0.3) == [flow.Postprocess((0,))]
    assert machine.handle(flow.PostprocessEnded(0), 0.4) == [flow.Deliver((0,)), flow.AskLease(4)]
    assert machine.handle(flow.DeliverEnded(), 0.5) == []


def test_flipping_prefetch_on_asks_at_once() -> None:
    machine = started(prefetch=False)
    machine.handle(granted(0), 0.1)
    machine.handle(flow.PrepareEnded(0), 0.2)
    assert machine.handle(flow.PrefetchSet(True), 0.3) == [flow.AskLease(8)]


def test_a_failed_batch_is_taken_apart_and_only_the_culprit_fails() -> None:
    machine = started(queue_samples=4)
    machine.handle(granted(0, 1), 0.1)
    machine.handle(flow.PrepareEnded(0), 0.2)
    machine.handle(flow.PrepareEnded(1), 0.3)
    machine.handle(flow.LeaseAnswered((), "exhausted"), 0.4)
    assert machine.handle(flow.GenerateEnded(0, failed=True), 0.5) == [flow.Generate(1, (0,))]
    assert machine.handle(flow.GenerateEnded(1, failed=True), 0.6) == [flow.Generate(2, (1,)), flow.Deliver((0,))]
    assert machine.handle(flow.GenerateEnded(2), 0.7) == [flow.Postprocess((1,))]


def test_refusals_back_off_unless_the_desk_did_the_waiting() -> None:
    machine = started()
    pauses = []
    for at in range(7):
        [ask] = machine.handle(flow.LeaseAnswered((), "version_too_old"), float(at))
        assert isinstance(ask, flow.AskLease)
        pauses.append(ask.after_s)
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert machine.handle(flow.LeaseAnswered((), "throttled", waited_s=5.0), 8.0) == [flow.AskLease(8, 0.0)]


def test_stop_gives_the_line_back_and_finishes_what_is_in_the_engine() -> None:
    machine = started()
    machine.handle(granted(0, 1, 2), 0.1)
    machine.handle(flow.PrepareEnded(0), 0.2)
    machine.handle(flow.PrepareEnded(1), 0.3)
    machine.handle(flow.LeaseAnswered((), "throttled"), 0.4)
    effects = machine.handle(flow.StopRequested("enough"), 0.5)
    assert flow.ReturnLeases((2,), (SampleId(20), SampleId(21))) in effects
    machine.handle(flow.LeaseAnswered((), "throttled"), 0.6)
    machine.handle(flow.ReturnEnded(), 0.7)
    assert machine.handle(flow.PrepareEnded(2), 0.8) == [], "late news of a lease given back"
    machine.handle(flow.GenerateEnded(0), 0.9)
    machine.handle(flow.PostprocessEnded(0), 1.0)
    machine.handle(flow.PostprocessEnded(1), 1.1)
    assert machine.handle(flow.DeliverEnded(), 1.2)[-1:] in ([flow.Finish("enough")], [flow.Deliver((1,))])
    machine.check()


def test_bytes_held_stop_preparation_and_asking_until_they_are_freed() -> None:
    machine = started(queue_bytes=100, queue_samples=12)
    machine.handle(granted(0, 1, 2), 0.1)
    effects = machine.handle(flow.PrepareEnded(0, 150), 0.2)
    assert effects == [flow.Generate(0, (0,))], "a lone lease goes ahead: only generating it frees its bytes"
    assert machine.handle(flow.LeaseAnswered((), "throttled"), 0.3) == []
    machine.handle(flow.GenerateEnded(0, (150,)), 0.4)
    assert flow.Prepare((1,)) in machine.handle(flow.PostprocessEnded(0), 0.5)


def test_an_answer_that_was_not_asked_for_is_a_bug() -> None:
    machine = Prefetch(Bounds(), prefetch=True)
    with pytest.raises(InvalidTransition, match="was not sent"):
        machine.handle(granted(0), 0.0)


def test_bounds_below_one_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="batch_samples must be at least 1"):
        Prefetch(Bounds(batch_samples=0), prefetch=True)


def test_repr_says_what_you_want_to_know_in_a_hang() -> None:
    machine = started()
    machine.handle(granted(0, 1), 0.125)
    assert "leased=2, preparing=2" in repr(machine)
    assert "oldest: ticket 0" in repr(machine)


def test_every_stage_has_its_row_and_ends_are_ends() -> None:
    assert set(flow.TRANSITIONS) == set(flow.Stage)
    assert flow.TRANSITIONS[flow.Stage.DELIVERED] == flow.TRANSITIONS[flow.Stage.RETURNED] == {}


def filled(calls: int) -> Prefetch:
    """A request engine with this number of calls of two samples each, and as many more prepared."""
    machine = started(batch_samples=2, queue_samples=4 * calls, concurrency=calls)
    machine.handle(granted(*range(2 * calls)), 0.1)
    for ticket in range(2 * calls):
        machine.handle(flow.PrepareEnded(ticket), 0.2)
    assert machine.generating == calls
    return machine


def next_calls(machine: Prefetch, ended: int) -> int:
    """How many calls are begun when one ends."""
    effects = machine.handle(flow.GenerateEnded(ended), 1.0)
    machine.check()
    return sum(isinstance(effect, flow.Generate) for effect in effects)


def test_concurrency_follows_the_room_that_the_engine_has() -> None:
    machine = filled(8)
    machine.handle(flow.EnginePolled(decoding=8, waiting=8), 0.5)
    assert machine.concurrency == 8, "as many wait as are decoded: a free place is taken at once"
    machine.handle(flow.EnginePolled(decoding=4, waiting=12), 0.6)
    assert machine.concurrency == 4, "long contexts: the engine has room for half as many"
    assert [next_calls(machine, batch) for batch in range(5)] == [0, 0, 0, 0, 1]
    machine.handle(flow.EnginePolled(decoding=8, waiting=0), 2.0)
    assert machine.concurrency == 5
    for _ in range(9):
        machine.handle(flow.EnginePolled(decoding=8, waiting=0), 2.0)
    assert machine.concurrency == 8, "never above the bound"


def test_completions_that_the_engine_threw_out_lower_concurrency() -> None:
    machine = filled(8)
    machine.handle(flow.EnginePolled(decoding=14, waiting=2, preempted=3), 0.5)
    assert machine.concurrency == 6


def test_an_engine_that_stands_still_for_new_weights_changes_nothing() -> None:
    machine = filled(4)
    machine.handle(flow.EnginePolled(decoding=0, waiting=8), 0.5)
    assert machine.concurrency == 4
