"""The life of one slot: every transition in one table, decided on one 64-bit word.

    FREE ──begin──▶ WRITING ──commit──▶ READY ──take──▶ READING ──consume──▶ FREE
                       └──abandon──▶ FREE  ▲               ├──release──▶ READY
                                           │               ├──reclaim──▶ READY   (its reader died)
                       discard: READY ▶ FREE               └──take─────▶ READING (a fresh reader supersedes)

The word holds the state, the reader, the read attempt and the generation, so that whoever stores it commits the whole
transition at once: a process killed before the store changed nothing, killed after it changed everything. The
generation grows with every use of the slot, the attempt with every take; a reference names a generation and a
finalisation names an attempt, so neither can touch a later use of the same slot. Exactly one attempt owns the
finalisation of a READING slot, the last one that took it; any other is an orphan and its finalisation changes nothing.

Only the producing process leaves FREE and WRITING, so these need no lock. READY and READING are left under the slot's
lock only.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, NamedTuple

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

_READER_SHIFT = STATE_BITS
_ATTEMPT_SHIFT = _READER_SHIFT + READER_BITS
_GENERATION_SHIFT = _ATTEMPT_SHIFT + ATTEMPT_BITS
STATE_MASK = (1 << STATE_BITS) - 1
_STATES = tuple(SlotState)


class Slot(NamedTuple):
    """One word, unpacked."""

    state: SlotState
    generation: int
    attempt: int = 0
    reader: int = 0

    def pack(self) -> int:
        return (
            self.state
            | self.reader << _READER_SHIFT
            | self.attempt << _ATTEMPT_SHIFT
            | self.generation << _GENERATION_SHIFT
        )

    @staticmethod
    def unpack(word: int) -> Slot:
        return Slot(
            _STATES[word & STATE_MASK],
            word >> _GENERATION_SHIFT,
            word >> _ATTEMPT_SHIFT & MAX_ATTEMPTS,
            word >> _READER_SHIFT & (MAX_READERS - 1),
        )

    def after(self, action: Action) -> SlotState:
        """The state that `action` leads to; `InvalidTransition` when this state does not allow it."""
        try:
            return TRANSITIONS[self.state, action]
        except KeyError:
            raise InvalidTransition(
                f"cannot {action} a slot that is {self.state.name} (generation {self.generation})"
            ) from None

    def begin(self) -> Slot:
        """Producer: start the next use of a FREE slot."""
        if self.generation >= MAX_GENERATION:
            raise InvalidTransition(f"slot was used {self.generation} times; create a new ring")
        return Slot(self.after("begin"), self.generation + 1)

    def commit(self) -> Slot:
        """Producer: the body, its length and its digest are in place."""
        return Slot(self.after("commit"), self.generation)

    def abandon(self) -> Slot:
        """Producer: the body could not be written; the generation stays spent."""
        return Slot(self.after("abandon"), self.generation)

    def take(self, generation: int, reader: int) -> Slot:
        """Reader: begin an attempt to read exactly `generation`; `Stale` when the slot no longer holds it."""
        if self.generation != generation or (self.state, "take") not in TRANSITIONS:
            raise Stale(
                f"generation {generation} is gone: the slot is {self.state.name} in generation {self.generation}"
            )
        if self.attempt >= MAX_ATTEMPTS:
            raise Stale(f"generation {generation} was read {self.attempt} times without success; given up")
        return Slot(self.after("take"), generation, self.attempt + 1, reader)

    def finalise(self, action: Literal["consume", "release"], attempt: Slot) -> Slot | None:
        """Reader: end `attempt`. None when it no longer owns the slot: count it, and change nothing."""
        if self != attempt:
            return None
        return Slot(self.after(action), self.generation, self.attempt)

    def reclaim(self) -> Slot:
        """Anyone who found the reader dead: the payload may be read again."""
        return Slot(self.after("reclaim"), self.generation, self.attempt)

    def discard(self, generation: int) -> Slot | None:
        """Producer: nobody needs `generation` any more. None when it is already gone or being read."""
        if self.generation != generation or self.state is not SlotState.READY:
            return None
        return Slot(self.after("discard"), self.generation, self.attempt)
