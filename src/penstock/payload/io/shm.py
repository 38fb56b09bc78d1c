"""Rings in shared memory: the producer writes, any process of the same user on the same host reads without a copy.

A `Ring` belongs to one producing process; its methods may be called from any thread of it. Readers in other processes
use `RingReader`. A ring outlives its writer until it is unlinked: by `close`, or by `sweep` at the end of the run.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random, SystemRandom
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.errors import LocalProtocolError, RunFailed, Transient
from penstock.payload.io.bodies import Body, Joined, fill_and_digest
from penstock.payload.io.huge_pages import use_huge_pages
from penstock.payload.io.mapping import DIRECTORY, Mapping
from penstock.payload.ring import ALIGNMENT, HEADER_BYTES, MAX_SLOTS, NAME_PREFIX, Arena, Extent, Header
from penstock.payload.slot import (
    MAX_READERS,
    STATE_MASK,
    SlotState,
    abandon,
    begin,
    commit,
    discard,
    generation_of,
    reader_of,
)
from penstock.records.payload import PayloadRef, RingAddress
from penstock.records.section import LOOPBACK
from penstock.runtime.clock import monotonic, sleep
from penstock.runtime.process import start_time

if TYPE_CHECKING:
    from typing_extensions import Buffer

COMMIT_BYTES = 16 * 1024 * 1024
"""Memory is committed in steps of this size, so that a full /dev/shm causes a full ring and not a SIGBUS."""
GROW_PAUSE_S = 0.5
"""Pause before the next attempt to commit memory after the file system was full."""
HARVEST_WRITES = 64
"""Every write checks whether the oldest payload was freed, because its memory is warm and fresh memory is not. After
this number of writes it checks all payloads, for those freed out of order."""

SYSTEM_RANDOM = SystemRandom()

_STATE_MASK = np.uint64(STATE_MASK)


class RingStatistics(NamedTuple):
    """Slots by state, and counters since the ring was created."""

    free: int
    writing: int
    ready: int
    reading: int
    used_bytes: int
    capacity_bytes: int
    written: int
    discarded: int
    waited: int
    """Writes that found the ring full and had to wait."""
    waited_s: float
    orphans: int
    """Finalisations by superseded attempts, or of freed payloads: refused, and counted in the readers' records."""


class Ring:
    """The producer's side. Create with `Ring.create`."""

    def __init__(self, mapping: Mapping) -> None:
        slots = mapping.header.slots
        self._mapping = mapping
        self._arena = Arena(mapping.header.capacity_bytes)
        self._lock = threading.Lock()
        self._free = list(range(slots - 1, -1, -1))
        self._extents: dict[int, Extent] = {}
        """Of all slots in use, oldest first."""
        self._committed_bytes = 0
        self._cannot_grow = ""
        """The reason, if the last attempt failed."""
        self._grow_again_at = 0.0
        self._writes_since_harvest = 0
        self._written = self._discarded = self._waited = 0
        self._waited_s = 0.0

    @classmethod
    def create(
        cls,
        run_id: str,
        *,
        capacity_bytes: int,
        slots: int,
        directory: str = DIRECTORY,
        digests: bool = True,
        guardian_pid: int | None = None,
        random: Random = SYSTEM_RANDOM,
    ) -> Ring:
        """Creates an empty ring with this process as its producer.

        `guardian_pid` is the process that lives as long as the run (by default the parent): a ring whose writer,
        readers and guardian are all dead is a leftover. Without `digests` bodies are not hashed.
        """
        if not 0 < slots <= MAX_SLOTS:
            raise LocalProtocolError(f"a ring has 1 to {MAX_SLOTS} slots, not {slots}")
        guardian = os.getppid() if guardian_pid is None else guardian_pid
        header = Header(
            run_id=run_id,
            epoch=random.getrandbits(63),
            slots=slots,
            capacity_bytes=-(-capacity_bytes // ALIGNMENT) * ALIGNMENT,
            writer_pid=os.getpid(),
            guardian_pid=guardian,
            # Process 1 outlives every run, so it cannot be a guardian.
            guardian_start=int(start_time(guardian) or 0) if guardian > 1 else 0,
            digests=digests,
        )
        path = Path(directory) / f"{NAME_PREFIX}{random.randbytes(16).hex()}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise RunFailed(
                f"cannot create a payload ring in {directory}: {error.strerror}; finished samples wait there for the "
                "trainer, so this user must be able to create files in it"
            ) from error
        try:
            os.ftruncate(fd, header.layout.total_bytes)
            os.posix_fallocate(fd, 0, header.layout.arena)
        except OSError as error:
            os.close(fd)
            path.unlink()
            raise RunFailed(
                f"cannot create a payload ring of {capacity_bytes} bytes in {directory}: {error.strerror}; "
                "make that file system larger (in a container: --shm-size), or lower rollout.ring_slots"
            ) from error
        mapping = Mapping(path, fd, header)
        mapping.become_writer()
        mapping.bytes[:HEADER_BYTES] = header.pack()
        return cls(mapping)

    def __repr__(self) -> str:
        return f"<Ring {self.name} {self._describe_load()}>"

    @property
    def name(self) -> str:
        return self._mapping.path.name

    @property
    def epoch(self) -> int:
        return self._mapping.header.epoch

    def address(
        self, *, host_id: str, host: str = LOOPBACK, tcp_ports: Sequence[int] = (), ucxx_ports: Sequence[int] = ()
    ) -> RingAddress:
        """The address for readers: on this host by name, from other hosts by the bound ports."""
        return RingAddress(self.name, self.epoch, host_id, host, tuple(tcp_ports), tuple(ucxx_ports))

    def write(self, buffers: Sequence[Buffer], *, timeout_s: float) -> PayloadRef:
        """Stores the concatenation of `buffers` and returns its reference; otherwise like `fill`."""
        return self.fill(Joined(buffers, in_pieces=self._mapping.header.digests), timeout_s=timeout_s)

    def fill(self, body: Body, *, timeout_s: float) -> PayloadRef:
        """Writes `body` into a slot and returns its reference.

        Waits up to `timeout_s` for room, then raises `Transient` naming the slow consumer: this is how backpressure
        reaches the generation loop. A full file system counts as a full ring. Blocking; call it from a worker thread.
        """
        size_bytes = body.size_bytes
        slot, offset, word = self._reserve(size_bytes, timeout_s)
        mapping = self._mapping
        try:
            digest = fill_and_digest(mapping.body(offset, size_bytes), body, mapping.header.digests)
            mapping.store_extent(slot, offset, size_bytes, digest)
        except BaseException:
            mapping.store(slot, abandon(word))
            raise
        mapping.store(slot, commit(word))
        return PayloadRef(self.name, self.epoch, slot, generation_of(word), size_bytes, digest)

    def discard(self, refs: Iterable[PayloadRef]) -> int:
        """Frees payloads that will not be requested; returns their number. One being read is left to its reader."""
        count = 0
        for ref in refs:
            if ref.ring != self.name or ref.epoch != self.epoch or not 0 <= ref.slot < self._mapping.header.slots:
                continue
            word = self._mapping.load(ref.slot)
            if generation_of(word) != ref.generation or word & STATE_MASK == SlotState.FREE:
                continue  # already gone, as most that expire: generations only grow, so this needs no lock
            if word & STATE_MASK == SlotState.READING:
                self._mapping.reclaim(ref.slot)
            self._mapping.lock(ref.slot)
            try:
                word = discard(self._mapping.load(ref.slot), ref.generation)
                if word is not None:
                    self._mapping.store(ref.slot, word)
                    count += 1
            finally:
                self._mapping.unlock(ref.slot)
        with self._lock:
            self._discarded += count
        return count

    def reclaim(self) -> int:
        """Makes payloads held by dead readers READY again; returns their number."""
        return sum(self._mapping.reclaim(slot) for slot in self._mapping.held_by())

    def in_place(self) -> bool:
        """Whether readers can still attach: a user or a cleanup job may have deleted the file."""
        with self._lock:
            return self._mapping.closed or self._mapping.in_place()

    def statistics(self) -> RingStatistics:
        with self._lock:
            self._harvest()
            free, writing, ready, reading = self._count_states()
            return RingStatistics(
                free=free,
                writing=writing,
                ready=ready,
                reading=reading,
                used_bytes=self._arena.used_bytes,
                capacity_bytes=self._arena.capacity_bytes,
                written=self._written,
                discarded=self._discarded,
                waited=self._waited,
                waited_s=self._waited_s,
                orphans=sum(self._mapping.orphans(reader) for reader in range(MAX_READERS)),
            )

    def check(self) -> None:
        """Raises if the allocator and the slots disagree."""
        with self._lock:
            self._harvest()
            self._arena.check()
            used = sum(extent.size_bytes for extent in self._extents.values())
            if used != self._arena.used_bytes or len(self._free) + len(self._extents) != self._mapping.header.slots:
                raise LocalProtocolError(f"ring {self.name} lost track of its slots: {self!r}")

    def close(self, unlink: bool = True) -> None:
        """Stops producing. With `unlink` no new reader can attach; attached readers keep their payloads.

        In a forked child of the producer this does nothing: the parent owns the ring.
        """
        if os.getpid() != self._mapping.header.writer_pid:
            return
        with self._lock:
            self._mapping.close()
        if unlink:
            self._mapping.path.unlink(missing_ok=True)

    def _reserve(self, size_bytes: int, timeout_s: float) -> tuple[int, int, int]:
        """Returns a WRITING slot, the offset of its body and its word."""
        if Arena.rounded(size_bytes) > self._arena.capacity_bytes:
            raise LocalProtocolError(
                f"a payload of {size_bytes} bytes can never fit into ring {self.name} of {self._arena.capacity_bytes} "
                "bytes; make the ring larger"
            )
        reserved = self._try_reserve(size_bytes)
        if reserved is not None:
            return reserved
        began = monotonic()
        pause_s = 2e-4
        while reserved is None:
            if monotonic() - began >= timeout_s:
                raise Transient(self._full(size_bytes, timeout_s))
            sleep(min(pause_s, max(0.0, timeout_s - (monotonic() - began))))
            pause_s = min(2 * pause_s, 5e-3)
            reserved = self._try_reserve(size_bytes)
        with self._lock:
            self._waited += 1
            self._waited_s += monotonic() - began
        return reserved

    def _try_reserve(self, size_bytes: int) -> tuple[int, int, int] | None:
        with self._lock:
            if self._mapping.closed:
                raise LocalProtocolError(f"ring {self.name} is closed; nothing more can be written to it")
            self._writes_since_harvest += 1
            oldest = next(iter(self._extents), None)
            if self._writes_since_harvest >= HARVEST_WRITES:
                self._harvest()
            elif oldest is not None and self._mapping.load(oldest) & STATE_MASK == SlotState.FREE:
                self._collect(oldest)
            extent = self._arena.allocate(size_bytes) if self._free else None
            if extent is None:
                self._harvest()
                extent = self._arena.allocate(size_bytes) if self._free else None
            if extent is None:
                return None
            if extent.offset + extent.size_bytes > self._committed_bytes:
                grown = False
                try:
                    grown = self._commit_memory(extent.offset + extent.size_bytes)
                finally:
                    if not grown:
                        self._arena.free(extent)
                if not grown:
                    if not self._extents:  # there is no payload whose release could make room
                        raise Transient(self._cannot_grow)
                    return None
            slot = self._free.pop()
            self._extents[slot] = extent
            # Stored under the lock: a harvest must not mistake the slot for a freed one.
            word = begin(self._mapping.load(slot))
            self._mapping.store(slot, word)
            self._written += 1
            return slot, extent.offset, word

    def _harvest(self) -> None:
        """Collects all slots that readers have freed."""
        self._writes_since_harvest = 0
        load = self._mapping.load
        for slot in [slot for slot in self._extents if load(slot) & STATE_MASK == SlotState.FREE]:
            self._collect(slot)

    def _collect(self, slot: int) -> None:
        self._arena.free(self._extents.pop(slot))
        self._free.append(slot)

    def _commit_memory(self, end: int) -> bool:
        """Commits memory up to `end`, a whole step if possible; false when the file system is full."""
        if self._extents and monotonic() < self._grow_again_at:
            return False
        start = self._mapping.layout.arena + self._committed_bytes
        for target in (min(self._arena.capacity_bytes, -(-end // COMMIT_BYTES) * COMMIT_BYTES), end):
            try:
                os.posix_fallocate(self._mapping.fd, start, target - self._committed_bytes)
            except OSError as error:
                self._cannot_grow = (
                    f"{self._mapping.path.parent} is full: ring {self.name} could not grow to {target} bytes "
                    f"({error.strerror}); make the ring smaller or that file system larger"
                )
                self._grow_again_at = monotonic() + GROW_PAUSE_S
                continue
            use_huge_pages(self._mapping.memory, start, self._mapping.layout.arena + target)
            self._committed_bytes = target
            self._cannot_grow, self._grow_again_at = "", 0.0
            return True
        return False

    def _count_states(self) -> list[int]:
        return np.bincount((self._mapping.word_array & _STATE_MASK).astype(np.int64), minlength=4).tolist()

    def _describe_load(self) -> str:
        free, writing, ready, reading = self._count_states()
        return (
            f"{self._arena.used_bytes} of {self._arena.capacity_bytes} bytes; slots: {free} free, {writing} being "
            f"written, {ready} ready, {reading} being read"
        )

    def _full(self, size_bytes: int, timeout_s: float) -> str:
        self.reclaim()
        mapping = self._mapping
        holders = Counter(reader_of(mapping.load(slot)) for slot in mapping.held_by())
        attached = [reader for reader in range(MAX_READERS) if mapping.reader_alive(reader)]
        ready = self._count_states()[SlotState.READY]
        if holders and holders.total() >= ready:
            reader, count = holders.most_common(1)[0]
            blame = f"{mapping.reader_name(reader)} holds {count} payloads without finishing"
        elif attached:
            names = ", ".join(mapping.reader_name(reader) for reader in attached)
            blame = f"{ready} payloads are waiting to be fetched by {names}"
        else:
            blame = f"{ready} payloads are waiting and no consumer has attached"
        return (
            f"ring {self.name} had no room for {size_bytes} bytes within {timeout_s} s: {blame} "
            f"({self._describe_load()}){self._cannot_grow and '; ' + self._cannot_grow}"
        )
