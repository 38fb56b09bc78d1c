"""The slot's table: what each action leads to, and what a wrong one is answered."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from penstock.errors import InvalidTransition, Stale
from penstock.payload.slot import MAX_ATTEMPTS, MAX_GENERATION, TRANSITIONS, Action, Slot, SlotState

READY = Slot(SlotState.FREE, 6).begin().commit()


@pytest.mark.parametrize("state", SlotState)
@pytest.mark.parametrize(
    ("generation", "attempt", "reader"), [(0, 0, 0), (MAX_GENERATION, MAX_ATTEMPTS, 63), (5, 1, 2)]
)
def test_a_word_holds_everything(state: SlotState, generation: int, attempt: int, reader: int) -> None:
    slot = Slot(state, generation, attempt, reader)
    assert Slot.unpack(slot.pack()) == slot
    assert 0 <= slot.pack() < 1 << 64


@pytest.mark.parametrize(("state", "action"), list(product(SlotState, get_args(Action))))
def test_the_table_is_the_law(state: SlotState, action: Action) -> None:
    slot = Slot(state, 1)
    if (state, action) in TRANSITIONS:
        assert slot.after(action) is TRANSITIONS[state, action]
    else:
        with pytest.raises(InvalidTransition, match=f"cannot {action} a slot that is {state.name}"):
            slot.after(action)


def test_a_life() -> None:
    taken = READY.take(7, reader=3)
    assert taken == Slot(SlotState.READING, 7, 1, 3)
    assert taken.finalise("consume", taken) == Slot(SlotState.FREE, 7, 1)
    assert Slot(SlotState.FREE, 7, 1).begin() == Slot(SlotState.WRITING, 8)


def test_an_old_reference_is_stale_after_reuse() -> None:
    reused = Slot(SlotState.FREE, 7, 1).begin().commit()
    with pytest.raises(Stale, match="generation 7 is gone"):
        reused.take(7, reader=0)


@pytest.mark.parametrize("slot", [Slot(SlotState.FREE, 7), Slot(SlotState.WRITING, 7)])
def test_only_committed_payloads_can_be_taken(slot: Slot) -> None:
    with pytest.raises(Stale):
        slot.take(7, reader=0)


def test_a_fresh_reader_supersedes_and_the_first_becomes_an_orphan() -> None:
    first = READY.take(7, reader=1)
    second = first.take(7, reader=2)
    assert second.finalise("consume", first) is None
    assert second.finalise("release", first) is None
    assert second.finalise("consume", second) == Slot(SlotState.FREE, 7, 2)


@pytest.mark.parametrize("action", ["consume", "release"])
def test_the_same_reader_taking_twice_owns_only_its_last_attempt(action) -> None:
    first = READY.take(7, reader=1)
    second = first.take(7, reader=1)
    assert second.finalise(action, first) is None


def test_an_orphan_cannot_undo_the_reuse_of_its_slot() -> None:
    orphan = READY.take(7, reader=1)
    for later in (Slot(SlotState.FREE, 7, 1).begin, Slot(SlotState.FREE, 7, 1).begin().commit):
        assert later().finalise("consume", orphan) is None
        assert later().finalise("release", orphan) is None


def test_a_reclaimed_attempt_is_an_orphan_too() -> None:
    dead = READY.take(7, reader=1)
    assert dead.reclaim().finalise("consume", dead) is None
    assert dead.reclaim().take(7, reader=1).finalise("consume", dead) is None


def test_discard_frees_what_nobody_reads() -> None:
    assert READY.discard(7) == Slot(SlotState.FREE, 7)
    assert READY.discard(6) is None
    assert READY.take(7, reader=0).discard(7) is None


def test_counters_end_with_an_error_and_never_wrap() -> None:
    with pytest.raises(InvalidTransition, match="create a new ring"):
        Slot(SlotState.FREE, MAX_GENERATION).begin()
    with pytest.raises(Stale, match="given up"):
        Slot(SlotState.READY, 7, MAX_ATTEMPTS).take(7, reader=0)
