"""Payloads on their way into a ring: each writes itself into its place and is digested as it is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import xxhash

from penstock.errors import LocalProtocolError

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK_BYTES = 1 << 20
"""Copied and hashed piece by piece, so that the hash finds the bytes still in the cache."""


class Body(Protocol):
    """A payload that writes itself into its place."""

    @property
    def size_bytes(self) -> int: ...

    def fill(self, target: memoryview) -> Iterator[int]:
        """Write into `target`, of that size, front to back, and say now and then how many bytes are in place."""
        ...


class Joined:
    """Buffers one after the other, copied in pieces or each in one."""

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
    """Let `body` write itself into `target`; the digest of the whole, or 0 when digests are off."""
    at = 0
    if not digests or len(target) <= CHUNK_BYTES:
        for at in body.fill(target):  # noqa: B007 - how far it came is asked below
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
