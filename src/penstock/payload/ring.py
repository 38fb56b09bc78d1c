"""The layout of a ring's bytes, and the arena that allocates space for bodies.

    header   256 bytes: magic, layout version, epoch, sizes, run id, writer and guardian
    readers  one record per reader process: pid, label, finalisations refused as orphaned
    words    one 64-bit word per slot (see `slot`): only a store to it commits a transition
    extents  per slot: offset, length and digest of the body
    arena    the bodies, at any 64-byte boundary

Bodies range from hundreds of bytes to hundreds of megabytes, so the arena is variable-size: a slot is a table
entry, not a place. Only the producer allocates, in its own memory. A ring outlives its producer for reading only, so
the allocator needs no crash safety.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_left
from typing import NamedTuple

from penstock.errors import InvalidTransition, RemoteProtocolError
from penstock.payload.slot import MAX_READERS

MAGIC = b"PENSTOCK"
LAYOUT_VERSION = 1
ALIGNMENT = 64
PAGE = 4096
MAX_SLOTS = 1 << 20
MAX_CAPACITY_BYTES = 1 << 42

FLAG_DIGESTS = 1

_HEADER = struct.Struct("<8sIIQIIQQQQ64s")
HEADER_BYTES = 256
READER = struct.Struct("<QQ48s")
"""pid, orphaned finalisations, label."""
READER_ORPHANS_OFFSET = 8
EXTENT = struct.Struct("<QQQ")
"""offset into the arena, length, digest."""
MAX_RUN_ID_BYTES = 64

NAME_PREFIX = "penstock-"
_NAME = re.compile(NAME_PREFIX + r"[0-9a-f]{32}")


def check_name(name: str) -> str:
    """Rejects anything but a ring's file name, so that no path received over a wire is ever opened."""
    if not _NAME.fullmatch(name):
        raise RemoteProtocolError(
            f"{name[:80]!r} is not a ring name (expected {NAME_PREFIX} and 32 hexadecimal digits)"
        )
    return name


class Header(NamedTuple):
    """Read before anything else in a ring."""

    run_id: str
    epoch: int
    slots: int
    capacity_bytes: int
    writer_pid: int
    guardian_pid: int
    guardian_start: int
    """Start time in kernel ticks, so that a recycled pid is not mistaken for the guardian."""
    digests: bool = True

    def pack(self) -> bytes:
        run_id = self.run_id.encode()
        if not 0 < len(run_id) <= MAX_RUN_ID_BYTES:
            raise InvalidTransition(f"run id of {len(run_id)} bytes; a ring header holds 1 to {MAX_RUN_ID_BYTES}")
        return _HEADER.pack(
            MAGIC,
            LAYOUT_VERSION,
            FLAG_DIGESTS if self.digests else 0,
            self.epoch,
            self.slots,
            MAX_READERS,
            self.capacity_bytes,
            self.writer_pid,
            self.guardian_pid,
            self.guardian_start,
            run_id,
        ).ljust(HEADER_BYTES, b"\0")

    @staticmethod
    def unpack(raw: bytes, file_bytes: int) -> Header:
        """Parses an untrusted header; raises `RemoteProtocolError` unless it is complete and plausible."""
        if len(raw) < HEADER_BYTES:
            raise RemoteProtocolError(f"ring header is cut short: {len(raw)} of {HEADER_BYTES} bytes")
        magic, version, flags, epoch, slots, readers, capacity, writer, guardian, start, run_id = _HEADER.unpack_from(
            raw
        )
        if magic != MAGIC:
            raise RemoteProtocolError(f"not a ring: magic is {magic!r}")
        if version != LAYOUT_VERSION:
            raise RemoteProtocolError(f"ring has layout version {version}, this Penstock reads {LAYOUT_VERSION}")
        if flags & ~FLAG_DIGESTS or readers != MAX_READERS:
            raise RemoteProtocolError(f"ring header is damaged: flags {flags:#x}, {readers} readers")
        if not 0 < slots <= MAX_SLOTS or not 0 < capacity <= MAX_CAPACITY_BYTES:
            raise RemoteProtocolError(f"ring header is damaged: {slots} slots, capacity of {capacity} bytes")
        try:
            text = run_id.rstrip(b"\0").decode()
        except UnicodeDecodeError as error:
            raise RemoteProtocolError("ring header is damaged: run id is not text") from error
        header = Header(text, epoch, slots, capacity, writer, guardian, start, bool(flags & FLAG_DIGESTS))
        if header.layout.total_bytes != file_bytes:
            raise RemoteProtocolError(
                f"ring is {file_bytes} bytes long, its header states {header.layout.total_bytes}; was it truncated?"
            )
        return header

    @property
    def layout(self) -> Layout:
        words = HEADER_BYTES + MAX_READERS * READER.size
        extents = words + self.slots * 8
        arena = -(-(extents + self.slots * EXTENT.size) // PAGE) * PAGE
        return Layout(HEADER_BYTES, words, extents, arena, arena + self.capacity_bytes)


class Layout(NamedTuple):
    """Where each table begins, in bytes from the start of the file."""

    readers: int
    words: int
    extents: int
    arena: int
    total_bytes: int


class Extent(NamedTuple):
    offset: int
    size_bytes: int


class Arena:
    """Allocates byte ranges, lowest address first, and merges freed ranges.

    Lowest-first keeps a lightly used ring in few pages, which stay warm. The producer commits memory only up to the
    highest address ever allocated.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._holes: list[Extent] = [Extent(0, capacity_bytes)]

    def __repr__(self) -> str:
        return f"<Arena {self.used_bytes}/{self.capacity_bytes} bytes used, {len(self._holes)} holes>"

    @staticmethod
    def rounded(size_bytes: int) -> int:
        """Bytes that a body of `size_bytes` occupies."""
        return max(ALIGNMENT, -(-size_bytes // ALIGNMENT) * ALIGNMENT)

    def allocate(self, size_bytes: int) -> Extent | None:
        """Returns a range for a body, or None while no hole is large enough."""
        size = self.rounded(size_bytes)
        for index, hole in enumerate(self._holes):
            if hole.size_bytes < size:
                continue
            if hole.size_bytes == size:
                del self._holes[index]
            else:
                self._holes[index] = Extent(hole.offset + size, hole.size_bytes - size)
            self.used_bytes += size
            return Extent(hole.offset, size)
        return None

    def free(self, extent: Extent) -> None:
        """Frees a range returned by `allocate`."""
        offset, size = extent
        index = bisect_left(self._holes, extent)
        if index and self._holes[index - 1].offset + self._holes[index - 1].size_bytes > offset:
            raise InvalidTransition(f"{extent} was freed twice")
        if index < len(self._holes) and self._holes[index].offset < offset + size:
            raise InvalidTransition(f"{extent} was freed twice")
        self.used_bytes -= size
        if index < len(self._holes) and self._holes[index].offset == offset + size:
            size += self._holes.pop(index).size_bytes
        if index and self._holes[index - 1].offset + self._holes[index - 1].size_bytes == offset:
            index -= 1
            offset, before = self._holes.pop(index)
            size += before
        self._holes.insert(index, Extent(offset, size))

    def check(self) -> None:
        """Raises if holes overlap or touch, or if free and used bytes do not add up to the capacity."""
        end = -1
        for hole in self._holes:
            if hole.offset <= end or hole.size_bytes <= 0:
                raise InvalidTransition(f"holes of the arena overlap or touch: {self._holes}")
            end = hole.offset + hole.size_bytes
        free = sum(hole.size_bytes for hole in self._holes)
        if free + self.used_bytes != self.capacity_bytes or end > self.capacity_bytes:
            raise InvalidTransition(f"arena lost bytes: {free} free + {self.used_bytes} used != {self.capacity_bytes}")
