"""The slot's table: what each action leads to, and what a wrong one is answered."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from penstock.errors import InvalidTransition, Stale
from penstock.payload import slot
from penstock.payload.slot import MAX_ATTEMPTS, MAX_GENERATION, TRANSITIONS, Action, SlotState, pack

FREE_AGAIN = pack(SlotState.FREE, 7, 1)
READY = slot.commit(slot.begin(pack(SlotState.FREE, 6)))


@pytest.mark.parametrize("state", SlotState)
@pytest.mark.parametrize(
    ("generation", "attempt", "reader"), [(0, 0, 0), (MAX_GENERATION, MAX_ATTEMPTS, 63), (5, 1, 2)]
)
def test_a_word_holds_everything(state: SlotState, generation: int, attempt: int, reader: int) -> None:
    word = pack(state, generation, attempt, reader)
    assert 0 <= word < 1 << 64
    assert slot.state_of(word) is state
    assert (slot.generation_of(word), slot.attempt_of(word), slot.reader_of(word)) == (generation, attempt, reader)


@pytest.mark.parametrize(("state", "action"), list(product(SlotState, get_args(Action))))
def test_the_table_is_the_law(state: SlotState, action: Action) -> None:
    if (state, action) in TRANSITIONS:
        assert slot.after(pack(state, 1), action) == TRANSITIONS[state, action]
    else:
        with pytest.raises(InvalidTransition, match=f"cannot {action} a slot that is {state.name}"):
            slot.after(pack(state, 1), action)


def test_a_life() -> None:
    assert pack(SlotState.READY, 7) == READY
    taken = slot.take(READY, 7, reader=3)
    assert taken == pack(SlotState.READING, 7, 1, 3)
    assert slot.finalise(taken, "release", taken) == pack(SlotState.READY, 7, 1)
    assert slot.finalise(taken, "consume", taken) == FREE_AGAIN
    assert slot.begin(FREE_AGAIN) == pack(SlotState.WRITING, 8)
    assert slot.abandon(slot.begin(FREE_AGAIN)) == pack(SlotState.FREE, 8)


def test_an_old_reference_is_stale_after_reuse() -> None:
    reused = slot.commit(slot.begin(FREE_AGAIN))
    with pytest.raises(Stale, match="generation 7 is gone"):
        slot.take(reused, 7, reader=0)
    assert slot.consume(reused, 7) is None


@pytest.mark.parametrize("state", [SlotState.FREE, SlotState.WRITING])
def test_only_committed_payloads_can_be_taken(state: SlotState) -> None:
    with pytest.raises(Stale):
        slot.take(pack(state, 7), 7, reader=0)
    assert slot.consume(pack(state, 7), 7) is None
    assert slot.discard(pack(state, 7), 7) is None


def test_a_fresh_reader_supersedes_and_the_first_becomes_an_orphan() -> None:
    first = slot.take(READY, 7, reader=1)
    second = slot.take(first, 7, reader=2)
    assert slot.finalise(second, "consume", first) is None
    assert slot.finalise(second, "release", first) is None
    assert slot.finalise(second, "consume", second) == pack(SlotState.FREE, 7, 2)


@pytest.mark.parametrize("action", ["consume", "release"])
def test_the_same_reader_taking_twice_owns_only_its_last_attempt(action) -> None:
    first = slot.take(READY, 7, reader=1)
    second = slot.take(first, 7, reader=1)
    assert slot.finalise(second, action, first) is None


def test_an_orphan_cannot_undo_the_reuse_of_its_slot() -> None:
    orphan = slot.take(READY, 7, reader=1)
    writing = slot.begin(FREE_AGAIN)
    for later in (writing, slot.commit(writing), slot.take(slot.commit(writing), 8, reader=1)):
        assert slot.finalise(later, "consume", orphan) is None
        assert slot.finalise(later, "release", orphan) is None


def test_a_reclaimed_attempt_is_an_orphan_too() -> None:
    dead = slot.take(READY, 7, reader=1)
    assert slot.finalise(slot.reclaim(dead), "consume", dead) is None
    assert slot.finalise(slot.take(slot.reclaim(dead), 7, reader=1), "consume", dead) is None


def test_consuming_a_copy_makes_who_still_reads_an_orphan() -> None:
    late = slot.take(READY, 7, reader=2)
    freed = slot.consume(late, 7)
    assert freed == FREE_AGAIN
    assert slot.finalise(FREE_AGAIN, "release", late) is None
    assert slot.consume(READY, 7) == pack(SlotState.FREE, 7)
    assert slot.consume(READY, 6) is None


def test_discard_frees_what_is_not_being_read() -> None:
    assert slot.discard(READY, 7) == pack(SlotState.FREE, 7)
    assert slot.discard(READY, 6) is None
    assert slot.discard(slot.take(READY, 7, reader=0), 7) is None


def test_counters_end_with_an_error_and_never_wrap() -> None:
    with pytest.raises(InvalidTransition, match="create a new ring"):
        slot.begin(pack(SlotState.FREE, MAX_GENERATION))
    with pytest.raises(Stale, match="no more attempts allowed"):
        slot.take(pack(SlotState.READY, 7, MAX_ATTEMPTS), 7, reader=0)
