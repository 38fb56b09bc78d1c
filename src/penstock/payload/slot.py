"""The state machine of one slot: every transition in one table, on one 64-bit word.

    FREE ──begin──▶ WRITING ──commit──▶ READY ──take──▶ READING ──release──▶ READY
      ▲                └──abandon──▶ FREE ▲                ├──reclaim──▶ READY   (its reader died)
      └─────── consume, discard ──────────┴── consume ─────┴──take─────▶ READING (a new reader supersedes)

The word holds the state, the reader, the read attempt and the generation, so that one store commits the whole
transition: a process killed before the store has changed nothing, one killed after it everything. The
generation grows with every use of the slot, the attempt with every take; a reference names a generation and a
finalisation names an attempt, so neither can touch a later use of the same slot. Exactly one attempt owns the
finalisation of a READING slot, the last one that took it; any other is an orphan and its finalisation changes nothing.

Only the producing process leaves FREE and WRITING, so these need no lock. READY and READING are left under the slot's
lock only.

Every function takes a word and returns the next one. Words are plain integers: this runs several times per payload.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

from penstock.errors import InvalidTransition, Stale

Action = Literal["begin", "commit", "abandon", "take", "consume", "release", "reclaim", "discard"]


class SlotState(IntEnum):
    FREE = 0
    WRITING = 1
    READY = 2
    READING = 3


TRANSITIONS: dict[tuple[SlotState, Action], SlotState] = {
    (SlotState.FREE, "begin"): SlotState.WRITING,
    (SlotState.WRITING, "commit"): SlotState.READY,
    (SlotState.WRITING, "abandon"): SlotState.FREE,
    (SlotState.READY, "take"): SlotState.READING,
    (SlotState.READY, "consume"): SlotState.FREE,
    (SlotState.READY, "discard"): SlotState.FREE,
    (SlotState.READING, "take"): SlotState.READING,
    (SlotState.READING, "consume"): SlotState.FREE,
    (SlotState.READING, "release"): SlotState.READY,
    (SlotState.READING, "reclaim"): SlotState.READY,
}

STATE_BITS, READER_BITS, ATTEMPT_BITS, GENERATION_BITS = 2, 6, 20, 36
MAX_READERS = 1 << READER_BITS
MAX_ATTEMPTS = (1 << ATTEMPT_BITS) - 1
MAX_GENERATION = (1 << GENERATION_BITS) - 1

STATE_MASK = (1 << STATE_BITS) - 1
_READER_SHIFT = STATE_BITS
_ATTEMPT_SHIFT = _READER_SHIFT + READER_BITS
_GENERATION_SHIFT = _ATTEMPT_SHIFT + ATTEMPT_BITS
_NEXT: dict[Action, dict[int, int]] = {}
for (_state, _action), _next in TRANSITIONS.items():
    _NEXT.setdefault(_action, {})[int(_state)] = int(_next)
_TAKE, _CONSUME, _DISCARD = _NEXT["take"], _NEXT["consume"], _NEXT["discard"]


def pack(state: SlotState, generation: int, attempt: int = 0, reader: int = 0) -> int:
    return state | reader << _READER_SHIFT | attempt << _ATTEMPT_SHIFT | generation << _GENERATION_SHIFT


def state_of(word: int) -> SlotState:
    return SlotState(word & STATE_MASK)


def generation_of(word: int) -> int:
    return word >> _GENERATION_SHIFT


def attempt_of(word: int) -> int:
    return word >> _ATTEMPT_SHIFT & MAX_ATTEMPTS


def reader_of(word: int) -> int:
    return word >> _READER_SHIFT & (MAX_READERS - 1)


def after(word: int, action: Action) -> int:
    """The state that `action` leads to; `InvalidTransition` when the present one does not allow it."""
    state = _NEXT[action].get(word & STATE_MASK)
    if state is None:
        raise InvalidTransition(
            f"cannot {action} a slot that is {state_of(word).name} (generation {generation_of(word)})"
        )
    return state


def begin(word: int) -> int:
    """Producer: start the next use of a FREE slot."""
    generation = word >> _GENERATION_SHIFT
    if generation >= MAX_GENERATION:
        raise InvalidTransition(f"slot was used {generation} times; create a new ring")
    return after(word, "begin") | generation + 1 << _GENERATION_SHIFT


def commit(word: int) -> int:
    """Producer: the body, its length and its digest are in place."""
    return word & ~STATE_MASK | after(word, "commit")


def abandon(word: int) -> int:
    """Producer: the body could not be written; the generation stays used."""
    return word & ~STATE_MASK | after(word, "abandon")


def take(word: int, generation: int, reader: int) -> int:
    """Reader: begin an attempt to read exactly `generation`; raises `Stale` when the slot does not hold it."""
    state = _TAKE.get(word & STATE_MASK)
    if state is None or word >> _GENERATION_SHIFT != generation:
        raise Stale(
            f"generation {generation} is gone: the slot is {state_of(word).name} in generation {generation_of(word)}"
        )
    attempt = attempt_of(word) + 1
    if attempt > MAX_ATTEMPTS:
        raise Stale(f"generation {generation} was read {attempt - 1} times without success; no more attempts allowed")
    return state | reader << _READER_SHIFT | attempt << _ATTEMPT_SHIFT | generation << _GENERATION_SHIFT


def finalise(word: int, action: Literal["consume", "release"], attempt: int) -> int | None:
    """Reader: end the attempt that `take` returned. None for an orphan: store nothing, count it."""
    if word != attempt:
        return None
    return _without_reader(word) | after(word, action)


def consume(word: int, generation: int) -> int | None:
    """Reader that used its own copy: free `generation`, even if an orphan still reads it.

    None when it is already gone.
    """
    state = _CONSUME.get(word & STATE_MASK)
    return None if state is None or word >> _GENERATION_SHIFT != generation else _without_reader(word) | state


def discard(word: int, generation: int) -> int | None:
    """Producer: `generation` is no longer needed. None when it is already gone or being read."""
    state = _DISCARD.get(word & STATE_MASK)
    return None if state is None or word >> _GENERATION_SHIFT != generation else _without_reader(word) | state


def reclaim(word: int) -> int:
    """Any process that finds the reader dead: make the payload readable again."""
    return _without_reader(word) | after(word, "reclaim")


def _without_reader(word: int) -> int:
    return word >> _ATTEMPT_SHIFT << _ATTEMPT_SHIFT
