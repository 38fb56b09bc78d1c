"""Bodies that are written into a ring, digested while they are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import xxhash

from penstock.errors import LocalProtocolError

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK_BYTES = 1 << 20
"""Bodies are copied and hashed in pieces of this size: each is hashed while it is in the CPU cache."""


class Body(Protocol):
    """A payload that can write itself into memory."""

    @property
    def size_bytes(self) -> int: ...

    def fill(self, target: memoryview) -> Iterator[int]:
        """Writes `size_bytes` into `target`, front to back; yields the number of bytes written so far."""
        ...


class Joined:
    """The concatenation of buffers, copied in pieces or each at once."""

    def __init__(self, buffers: Sequence[Buffer], *, in_pieces: bool) -> None:
        self._views = [view.cast("B") for view in map(memoryview, buffers) if view.nbytes]
        self.size_bytes = sum(map(len, self._views))
        self._chunk_bytes = CHUNK_BYTES if in_pieces else max(1, self.size_bytes)

    def fill(self, target: memoryview) -> Iterator[int]:
        # numpy copies without holding the interpreter's lock; a slice assignment of a memoryview does not.
        out = np.frombuffer(target, np.uint8)
        at = 0
        for view in self._views:
            source = np.frombuffer(view, np.uint8)
            for start in range(0, len(view), self._chunk_bytes):
                piece = source[start : start + self._chunk_bytes]
                out[at : at + len(piece)] = piece
                at += len(piece)
                yield at


def fill_and_digest(target: memoryview, body: Body, digests: bool) -> int:
    """Fills `target` from `body`; returns the digest of the whole, or 0 when digests are off."""
    at = 0
    if not digests or len(target) <= CHUNK_BYTES:
        for at in body.fill(target):  # noqa: B007 - checked below
            pass
        digest = xxhash.xxh3_64_intdigest(target) if digests else 0
    else:
        hasher = xxhash.xxh3_64()
        for end in body.fill(target):
            hasher.update(target[at:end])
            at = end
        digest = hasher.intdigest()
    if at != len(target):
        raise LocalProtocolError(f"a payload of {len(target)} bytes wrote only {at} of them")
    return digest
