"""Simulated payload rings: the real slots and the real arena, with the name of a sample where the bytes would be.

Memory is kept by offset, as it lies in a real ring, so a slot given away too early shows as another sample's payload.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from penstock.errors import InvalidTransition, Stale
from penstock.payload import slot as slots
from penstock.payload.ring import Arena, Extent
from penstock.payload.slot import MAX_READERS, SlotState, generation_of, reader_of, state_of
from penstock.records.ids import SampleId
from penstock.records.payload import PayloadRef, RingAddress
from penstock.sim.engine import Owner

TRAINERS_HOST = "host0"


def digest_of(sample: SampleId) -> int:
    """Stands for the hash of a payload's bytes."""
    return (sample * 0x9E3779B97F4A7C15) & (1 << 64) - 1


class SimRing:
    """One worker's ring. It outlives its writer: in shared memory on its host, and nowhere else."""

    SERVER = 0
    """The reader that the worker's own servers are."""

    def __init__(self, writer: Owner, host: str, *, slots: int, capacity_bytes: int, ports: int) -> None:
        self.name = f"ring of {writer.name}"
        self.epoch = sum(writer.name.encode())
        self.writer = writer
        self.host = host
        self.ports = {9000 + number: "well" for number in range(ports)}
        """The condition of each port: well, refusing, resetting or silent."""
        self.words = [0] * slots
        self.orphans = 0
        self.waits = 0
        """Writes that found no room at first."""
        self._arena = Arena(capacity_bytes)
        self._free = list(range(slots - 1, -1, -1))
        self._extents: dict[int, Extent] = {}
        """Of all slots in use, oldest first."""
        self._described: dict[int, tuple[int, int]] = {}
        """Length and digest, by slot."""
        self._memory: dict[int, tuple[int, SampleId | None]] = {}
        """By offset: how many bytes, and of which sample; None while they are being written."""
        self._readers: dict[int, Owner] = {self.SERVER: writer}

    @property
    def address(self) -> RingAddress:
        return RingAddress(self.name, self.epoch, self.host, self.host, tuple(self.ports))

    # -- the producer -------------------------------------------------------------------------------------------

    def begin(self, size_bytes: int) -> int | None:
        """A slot to write to; None while there is no room."""
        oldest = next(iter(self._extents), None)
        if oldest is not None and state_of(self.words[oldest]) is SlotState.FREE:
            self._take_back(oldest)
        extent = self._arena.allocate(size_bytes) if self._free else None
        if extent is None:
            self._harvest()
            extent = self._arena.allocate(size_bytes) if self._free else None
        if extent is None:
            return None
        slot = self._free.pop()
        self._extents[slot] = extent
        self.words[slot] = slots.begin(self.words[slot])
        end = extent.offset + extent.size_bytes
        for offset, (size, _) in list(self._memory.items()):
            if offset < end and extent.offset < offset + size:
                del self._memory[offset]
        self._memory[extent.offset] = (extent.size_bytes, None)
        return slot

    def commit(self, slot: int, sample: SampleId, size_bytes: int) -> PayloadRef:
        """The body is written; the one reference to it."""
        extent = self._extents[slot]
        self._memory[extent.offset] = (extent.size_bytes, sample)
        self._described[slot] = (size_bytes, digest_of(sample))
        self.words[slot] = slots.commit(self.words[slot])
        return PayloadRef(
            self.name, self.epoch, slot, generation_of(self.words[slot]), size_bytes, self._described[slot][1]
        )

    def discard(self, refs: Iterable[PayloadRef]) -> int:
        """Frees payloads that nobody will ask for; one that a live reader reads is left to it."""
        count = 0
        for ref in refs:
            if not self._is_ours(ref):
                continue
            self._reclaim(ref.slot)
            word = slots.discard(self.words[ref.slot], ref.generation)
            if word is not None:
                self.words[ref.slot] = word
                count += 1
        return count

    # -- readers ------------------------------------------------------------------------------------------------

    def attach(self, owner: Owner) -> int:
        """A reader's number: one whose former holder is dead may be taken over, with what that one was reading."""
        for number in range(MAX_READERS):
            holder = self._readers.get(number)
            if holder is owner and number != self.SERVER:
                return number
            if holder is None or (not holder.alive and number != self.SERVER):
                for slot in self._extents:
                    if reader_of(self.words[slot]) == number:
                        self._reclaim(slot)
                self._readers[number] = owner
                return number
        raise InvalidTransition(f"{self.name} has no reader's record left")

    def take(self, ref: PayloadRef, reader: int) -> int:
        """Begins to read exactly what `ref` names; the attempt. `Stale` when it is gone for good."""
        if not self._is_ours(ref):
            raise Stale(f"{ref} is not one of {self.name}")
        attempt = slots.take(self.words[ref.slot], ref.generation, reader)
        if self._described[ref.slot] != (ref.size_bytes, ref.digest):
            raise Stale(f"slot {ref.slot} of {self.name} holds something else than {ref}")
        self.words[ref.slot] = attempt
        return attempt

    def read(self, slot: int) -> SampleId | None:
        """Whose bytes lie now where the slot's body is."""
        extent = self._extents.get(slot)
        return None if extent is None else self._memory.get(extent.offset, (0, None))[1]

    def finalise(self, slot: int, attempt: int, action: Literal["consume", "release"]) -> bool:
        """Ends an attempt; False if it no longer owned the slot."""
        word = slots.finalise(self.words[slot], action, attempt)
        if word is None:
            self.orphans += 1
            return False
        self.words[slot] = word
        return True

    def consume(self, refs: Iterable[PayloadRef]) -> None:
        """Frees payloads of which a complete copy was used; those gone already stay gone."""
        for ref in refs:
            word = slots.consume(self.words[ref.slot], ref.generation) if self._is_ours(ref) else None
            if word is not None:
                self.words[ref.slot] = word

    # -- audit --------------------------------------------------------------------------------------------------

    def occupied(self) -> dict[int, tuple[SlotState, int]]:
        """State and generation of every slot that holds, or is about to hold, a payload."""
        return {
            slot: (state_of(word), generation_of(word))
            for slot, word in enumerate(self.words)
            if state_of(word) is not SlotState.FREE
        }

    def check(self) -> None:
        self._harvest()
        self._arena.check()
        used = sum(extent.size_bytes for extent in self._extents.values())
        if used != self._arena.used_bytes or len(self._free) + len(self._extents) != len(self.words):
            raise InvalidTransition(f"{self!r} lost track of its slots")

    def __repr__(self) -> str:
        states = [state.name for state, _ in self.occupied().values()]
        return f"<SimRing {self.name} on {self.host}: {self._arena!r}, slots in use {states}>"

    def _harvest(self) -> None:
        for slot in [slot for slot in self._extents if state_of(self.words[slot]) is SlotState.FREE]:
            self._take_back(slot)

    def _take_back(self, slot: int) -> None:
        self._arena.free(self._extents.pop(slot))
        self._free.append(slot)

    def _reclaim(self, slot: int) -> None:
        word = self.words[slot]
        if state_of(word) is SlotState.READING and not self._readers[reader_of(word)].alive:
            self.words[slot] = slots.reclaim(word)

    def _is_ours(self, ref: PayloadRef) -> bool:
        return ref.ring == self.name and ref.epoch == self.epoch and 0 <= ref.slot < len(self.words)
