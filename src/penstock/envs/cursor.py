"""Maps a position of an endless stream to a row of a finite set, and to reproducible draws. Pure and stateless.

Each epoch visits every row exactly once, in its own order. The order is a keyed permutation computed for one position
at a time (a Feistel network, repeated until the result is inside the range), so a cursor over a billion rows needs no
memory, resumes at once and has random access.
"""

from __future__ import annotations

import struct

import xxhash

from penstock.errors import ConfigError, LocalProtocolError

_ROUNDS = 6


def draw(seed: int, position: int, purpose: int = 0) -> int:
    """128 reproducible bits for one position of one seed; different purposes give independent bits."""
    return xxhash.xxh3_128_intdigest(struct.pack("<qqq", seed, position, purpose))


def digits(seed: int, position: int, base: int, count: int) -> list[int]:
    """`count` reproducible draws from `range(base)` for one position."""
    drawn: list[int] = []
    purpose = 0
    while len(drawn) < count:
        purpose += 1
        bits = draw(seed, position, purpose)
        for _ in range(min(count - len(drawn), 64 // max(base.bit_length(), 1) or 1)):
            bits, digit = divmod(bits, base)
            drawn.append(digit)
    return drawn


class Cursor:
    """Maps stream positions to rows of a set of `rows`, with a new permutation in each epoch."""

    def __init__(self, rows: int, seed: int, *, epochs: int | None = None, shuffle: bool = True) -> None:
        if rows < 1:
            raise ConfigError("a prompt stream needs at least one row, found none")
        if epochs is not None and epochs < 1:
            raise ConfigError(f"epochs must be at least 1 (or left out for an endless stream), found {epochs}")
        self.rows = rows
        self.seed = seed
        self.epochs = epochs
        self.shuffle = shuffle
        half_bits = max(((rows - 1).bit_length() + 1) // 2, 1)
        self._half_bits = half_bits
        self._half_mask = (1 << half_bits) - 1

    @property
    def count(self) -> int | None:
        """Number of positions of the stream; None if it is endless."""
        return None if self.epochs is None else self.rows * self.epochs

    def row(self, position: int) -> int:
        """The row at `position`."""
        if position < 0 or (self.epochs is not None and position >= self.rows * self.epochs):
            raise LocalProtocolError(f"prompt position {position} is outside the stream of {self.count} positions")
        epoch, offset = divmod(position, self.rows)
        if not self.shuffle:
            return offset
        # The permuted range is a power of two, at most four times too large: a few rounds end inside the set.
        row = self._permuted(epoch, offset)
        while row >= self.rows:
            row = self._permuted(epoch, row)
        return row

    def _permuted(self, epoch: int, value: int) -> int:
        left, right = value >> self._half_bits, value & self._half_mask
        for round_number in range(_ROUNDS):
            key = struct.pack("<qqqq", self.seed, epoch, round_number, right)
            left, right = right, left ^ (xxhash.xxh3_64_intdigest(key) & self._half_mask)
        return (left << self._half_bits) | right

    def __repr__(self) -> str:
        return f"Cursor(rows={self.rows}, seed={self.seed}, epochs={self.epochs}, shuffle={self.shuffle})"
