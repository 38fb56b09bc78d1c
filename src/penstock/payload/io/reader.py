"""Reading a ring: one lease per read attempt, and exactly one end to each."""

from __future__ import annotations

from typing import Literal

import xxhash

from penstock.errors import LocalProtocolError, Stale
from penstock.payload.io.mapping import DIRECTORY, Mapping
from penstock.payload.slot import Slot, SlotState
from penstock.records.payload import PayloadRef, RingAddress


class Lease:
    """One read attempt. `view` is good until exactly one of `consumed` and `released` is called.

    Both return whether this attempt still owned the payload. False means that a later reader took over (or, after a
    wrong verdict of death, may have): what was seen through `view` must then not be used.
    """

    __slots__ = ("_attempt", "_reader", "ref", "view")

    def __init__(self, reader: RingReader, ref: PayloadRef, attempt: Slot, view: memoryview) -> None:
        self.ref = ref
        self.view = view
        self._reader = reader
        self._attempt: Slot | None = attempt

    def consumed(self) -> bool:
        """The payload arrived completely and may be overwritten."""
        return self._finalise("consume")

    def released(self) -> bool:
        """The payload is still wanted, by a later attempt."""
        return self._finalise("release")

    def _finalise(self, action: Literal["consume", "release"]) -> bool:
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            raise LocalProtocolError(f"slot {self.ref.slot} was already finalised by this lease; cannot {action} it")
        return self._reader._finalise(self.ref.slot, attempt, action)


class RingReader:
    """A consumer's side: one attachment of one process, usable from all its threads."""

    def __init__(self, mapping: Mapping, reader: int, verify: bool) -> None:
        self._mapping = mapping
        self._reader = reader
        self._verify = verify and mapping.header.digests
        self.leases = 0
        """Read attempts not yet finalised."""

    @classmethod
    def attach(
        cls, address: RingAddress | str, *, directory: str = DIRECTORY, label: str = "reader", verify: bool = True
    ) -> RingReader:
        """Map a ring by address or name; `Stale` when it is gone. `label` names this consumer to the producer."""
        name = address if isinstance(address, str) else address.ring
        mapping = Mapping.open(name, directory)
        try:
            if isinstance(address, RingAddress) and address.epoch != mapping.header.epoch:
                raise Stale(f"ring {name} is in epoch {mapping.header.epoch}, the address says {address.epoch}")
            return cls(mapping, mapping.become_reader(label), verify)
        except BaseException:
            mapping.close()
            raise

    def __repr__(self) -> str:
        return (
            f"<RingReader {self._mapping.path.name} as {self._mapping.reader_name(self._reader)}, {self.leases} leases>"
        )

    @property
    def name(self) -> str:
        return self._mapping.path.name

    @property
    def epoch(self) -> int:
        return self._mapping.header.epoch

    def take(self, ref: PayloadRef) -> Lease:
        """Begin to read exactly what `ref` names, superseding an attempt that is still going on.

        `Stale` when it is gone for good: consumed, discarded, overwritten, or damaged (the digest does not match).
        """
        mapping = self._mapping
        header = mapping.header
        if ref.ring != mapping.path.name or ref.epoch != header.epoch or not 0 <= ref.slot < header.slots:
            raise Stale(f"the reference (slot {ref.slot}, epoch {ref.epoch}) is not one of ring {mapping.path.name}")
        mapping.lock_slot(ref.slot)
        try:
            attempt = mapping.load(ref.slot).take(ref.generation, self._reader)
            offset, size_bytes, digest = mapping.extent(ref.slot)
            if size_bytes != ref.size_bytes or digest != ref.digest or offset + size_bytes > header.capacity_bytes:
                raise Stale(
                    f"slot {ref.slot} of ring {mapping.path.name} holds {size_bytes} bytes with digest {digest:016x}, "
                    f"the reference promises {ref.size_bytes} with {ref.digest:016x}"
                )
            mapping.store(ref.slot, attempt)
            self.leases += 1
        finally:
            mapping.unlock_slot(ref.slot)
        lease = Lease(self, ref, attempt, mapping.view(offset, size_bytes))
        if self._verify and xxhash.xxh3_64_intdigest(lease.view) != digest:
            lease.consumed()
            raise Stale(f"payload in slot {ref.slot} of ring {mapping.path.name} is corrupt: its digest does not match")
        return lease

    def writer_alive(self) -> bool:
        return self._mapping.writer_alive()

    def close(self) -> None:
        """Detach. Payloads still being read become readable by others; views stay valid memory, not valid data."""
        if not self._mapping.closed:
            for slot in self._mapping.held_by(self._reader):
                with self._mapping.slot_lock(slot):
                    held = self._mapping.load(slot)
                    if held.state is SlotState.READING and held.reader == self._reader:
                        self._mapping.store(slot, held.reclaim())
        self._mapping.close()

    def _finalise(self, slot: int, attempt: Slot, action: Literal["consume", "release"]) -> bool:
        mapping = self._mapping
        mapping.lock_slot(slot)
        try:
            self.leases -= 1
            after = mapping.load(slot).finalise(action, attempt)
            if after is None:
                mapping.count_orphan(self._reader)
                return False
            mapping.store(slot, after)
            return True
        finally:
            mapping.unlock_slot(slot)
