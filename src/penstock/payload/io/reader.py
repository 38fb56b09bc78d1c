"""Reads a ring: one lease per read attempt, ended exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import xxhash

from penstock.errors import LocalProtocolError, Stale
from penstock.payload import slot as slots
from penstock.payload.io.mapping import DIRECTORY, Mapping
from penstock.payload.slot import STATE_MASK, SlotState, reader_of, reclaim
from penstock.records.payload import PayloadRef, RingAddress

Finalisation = Literal["consume", "release"]


class Lease:
    """One read attempt. `view` is valid until exactly one of `consumed` and `released` is called.

    Both return whether this attempt still owned the payload. False means that a later reader took over (or may have,
    after this one was wrongly found dead): data read through `view` must then not be used.
    """

    __slots__ = ("_attempt", "reader", "ref", "view")

    def __init__(self, reader: RingReader, ref: PayloadRef, attempt: int, view: memoryview) -> None:
        self.ref = ref
        self.view = view
        self.reader = reader
        self._attempt: int | None = attempt

    def consumed(self) -> bool:
        """The payload was used and may be overwritten."""
        return self.reader.finalise([self], "consume") == 0

    def released(self) -> bool:
        """The payload stays readable for a later attempt."""
        return self.reader.finalise([self], "release") == 0

    def end(self, action: Finalisation) -> int:
        """Ends the lease; returns the word of its attempt."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            raise LocalProtocolError(f"slot {self.ref.slot} was already finalised by this lease; cannot {action} it")
        return attempt


class RingReader:
    """The consumer side: one attachment of one process, usable from all its threads.

    Several payloads are handled under one lock: a batch costs little more than one payload.
    """

    def __init__(self, mapping: Mapping, reader: int, verify: bool) -> None:
        self._mapping = mapping
        self._reader = reader
        self._verify = verify and mapping.header.digests
        self.name = mapping.path.name
        self.epoch = mapping.header.epoch
        self._slots = mapping.header.slots
        self.leases = 0
        """Read attempts not yet finalised."""

    @classmethod
    def attach(
        cls, address: RingAddress | str, *, directory: str = DIRECTORY, label: str = "reader", verify: bool = True
    ) -> RingReader:
        """Maps a ring by address or name; raises `Stale` when it is gone. Errors of the producer name `label`."""
        name = address if isinstance(address, str) else address.ring
        mapping = Mapping.open(name, directory)
        try:
            if isinstance(address, RingAddress) and address.epoch != mapping.header.epoch:
                raise Stale(f"ring {name} is in epoch {mapping.header.epoch}, the address has {address.epoch}")
            return cls(mapping, mapping.become_reader(label), verify)
        except BaseException:
            mapping.close()
            raise

    def __repr__(self) -> str:
        return f"<RingReader {self.name} as {self._mapping.reader_name(self._reader)}, {self.leases} leases>"

    def take(self, ref: PayloadRef) -> Lease:
        """Begins a read of exactly the payload of `ref`, superseding an unfinished attempt.

        Raises `Stale` when it is gone permanently: consumed, discarded, overwritten, or damaged (wrong digest).
        """
        if not self._is_ours(ref):
            raise self._foreign(ref)
        self._mapping.lock(ref.slot)
        try:
            taken = self._take(ref)
        finally:
            self._mapping.unlock(ref.slot)
        if self._verify:
            taken = self._verified(taken)
        if isinstance(taken, Stale):
            raise taken
        return taken

    def take_all(self, refs: Sequence[PayloadRef]) -> list[Lease | Stale]:
        """Like `take` for several payloads: for each its lease, or the error."""
        ours = [ref.slot for ref in refs if self._is_ours(ref)]
        if not ours:
            return [self._foreign(ref) for ref in refs]
        first, count = self._lock(ours)
        try:
            taken = [self._take(ref) if self._is_ours(ref) else self._foreign(ref) for ref in refs]
        finally:
            self._mapping.unlock(first, count)
        return [self._verified(one) for one in taken] if self._verify else taken

    def finalise(self, leases: Sequence[Lease], action: Finalisation) -> int:
        """Ends read attempts; returns the number of orphans, whose slots were not changed.

        Raises `Transient` if another process has one of the slots locked: no attempt is ended then.
        """
        if not leases:
            return 0
        mapping = self._mapping
        orphans = 0
        first, count = self._lock([lease.ref.slot for lease in leases])
        try:
            attempts = [(lease.ref.slot, lease.end(action)) for lease in leases]
            self.leases -= len(attempts)
            for slot, attempt in attempts:
                word = slots.finalise(mapping.load(slot), action, attempt)
                if word is not None:
                    mapping.store(slot, word)
                else:
                    mapping.count_orphan(self._reader)
                    orphans += 1
        finally:
            mapping.unlock(first, count)
        return orphans

    def consume(self, refs: Iterable[PayloadRef]) -> int:
        """Frees payloads of which a complete, verified copy was used; returns how many were still there."""
        ours = [ref for ref in refs if self._is_ours(ref)]
        if not ours:
            return 0
        mapping = self._mapping
        freed = 0
        first, count = self._lock([ref.slot for ref in ours])
        try:
            for ref in ours:
                word = slots.consume(mapping.load(ref.slot), ref.generation)
                if word is not None:
                    mapping.store(ref.slot, word)
                    freed += 1
        finally:
            mapping.unlock(first, count)
        return freed

    def writer_alive(self) -> bool:
        return self._mapping.writer_alive()

    def close(self) -> None:
        """Detach. Payloads still being read become readable by others; views stay valid memory, not valid data."""
        mapping = self._mapping
        if not mapping.closed:
            for slot in mapping.held_by(self._reader):
                mapping.lock(slot)
                try:
                    word = mapping.load(slot)
                    if word & STATE_MASK == SlotState.READING and reader_of(word) == self._reader:
                        mapping.store(slot, reclaim(word))
                finally:
                    mapping.unlock(slot)
        mapping.close()

    def _is_ours(self, ref: PayloadRef) -> bool:
        return ref.epoch == self.epoch and ref.ring == self.name and 0 <= ref.slot < self._slots

    def _foreign(self, ref: PayloadRef) -> Stale:
        return Stale(f"the reference (slot {ref.slot}, epoch {ref.epoch}) is not one of ring {self.name}")

    def _take(self, ref: PayloadRef) -> Lease | Stale:
        """For a reference of this ring whose slot is locked."""
        mapping = self._mapping
        try:
            attempt = slots.take(mapping.load(ref.slot), ref.generation, self._reader)
        except Stale as error:
            return error
        offset, size_bytes, digest = mapping.extent(ref.slot)
        if size_bytes != ref.size_bytes or digest != ref.digest or offset + size_bytes > mapping.header.capacity_bytes:
            return Stale(
                f"slot {ref.slot} of ring {self.name} holds {size_bytes} bytes with digest {digest:016x}, "
                f"the reference states {ref.size_bytes} with {ref.digest:016x}"
            )
        mapping.store(ref.slot, attempt)
        self.leases += 1
        return Lease(self, ref, attempt, mapping.view(offset, size_bytes))

    def _verified(self, taken: Lease | Stale) -> Lease | Stale:
        if isinstance(taken, Stale) or xxhash.xxh3_64_intdigest(taken.view) == taken.ref.digest:
            return taken
        taken.consumed()
        return Stale(f"payload in slot {taken.ref.slot} of ring {self.name} is corrupt: its digest does not match")

    def _lock(self, numbers: Sequence[int]) -> tuple[int, int]:
        """Locks all slots from the lowest to the highest of `numbers`; returns the arguments of `unlock`."""
        first = min(numbers)
        count = max(numbers) - first + 1
        self._mapping.lock(first, count)
        return first, count
