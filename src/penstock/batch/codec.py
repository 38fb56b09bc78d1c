"""Encodes and decodes a sample's typed arrays: each array is copied once when written, and never when read.

    preamble   magic "PSTK" · format version u16 · array count u16 · header bytes u32 · body bytes u64 · reserved u32
    entry      name length u8 · dtype code u8 · dimensions u8 · zero u8 · name (ASCII) · extents u64 each
    body       the arrays in the order of their entries, C order, little-endian, each starting on a multiple of 16

Offsets are not transmitted: they follow from the entries, so they cannot be wrong. The decoder trusts no other field:
every length is checked against the bytes that arrived before an array is made, only the dtypes listed here are
accepted, and the buffer must end exactly where the header states.
"""

from __future__ import annotations

import bisect
import itertools
import math
import struct
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from penstock.errors import LocalProtocolError, RemoteProtocolError

FORMAT_VERSION = 1
MAGIC = b"PSTK"
ALIGNMENT_BYTES = 16
MAX_ARRAYS = 64
MAX_DIMENSIONS = 8
MAX_NAME_BYTES = 63

DTYPES: dict[int, str] = {
    1: "|u1",
    2: "|i1",
    3: "<u2",
    4: "<i2",
    5: "<u4",
    6: "<i4",
    7: "<u8",
    8: "<i8",
    9: "<f2",
    10: "<f4",
    11: "<f8",
}
"""Every dtype that can be encoded, by its code. Masks are uint8; codes are never reused."""

_CODES = {text: code for code, text in DTYPES.items()}
_DTYPES = {code: np.dtype(text) for code, text in DTYPES.items()}
_PREAMBLE = struct.Struct("<4sHHIQI")
_ENTRY = struct.Struct("<BBBB")
_EXTENTS = tuple(struct.Struct(f"<{dimensions}Q") for dimensions in range(MAX_DIMENSIONS + 1))

STRIDE_BYTES = 1 << 18
"""Bytes written between two reports of progress: they are still in the cache when they are hashed."""

Chunks = Sequence[np.ndarray]
"""Arrays that are joined along the first axis when they are written."""


class Encoded:
    """A sample laid out but not yet written. It refers to its arrays, which must not change before it is written."""

    __slots__ = ("_header", "_parts", "size_bytes")

    def __init__(self, header: bytes, parts: list[tuple[int, tuple[int, ...], Chunks]], size_bytes: int) -> None:
        self._header = header
        self._parts = parts
        self.size_bytes = size_bytes

    def fill(self, target: memoryview | bytearray) -> Iterator[int]:
        """Writes the sample into `target`, front to back; yields the number of bytes in place after each part.

        Every byte is copied once, from the engine's array to its place, without the interpreter.
        """
        out = np.frombuffer(target, np.uint8)
        end = len(self._header)
        out[:end] = np.frombuffer(self._header, np.uint8)
        for start, shape, chunks in self._parts:
            out[end:start] = 0
            dtype = chunks[0].dtype
            end = start + math.prod(shape) * dtype.itemsize
            place = out[start:end].view(dtype).reshape(shape)
            for pieces, row, row_end in _strides(chunks):
                np.concatenate(pieces, out=place[row:row_end], casting="no")
                yield start + place.strides[0] * row_end
        out[end : self.size_bytes] = 0
        yield self.size_bytes

    def __bytes__(self) -> bytes:
        written = bytearray(self.size_bytes)
        for _ in self.fill(written):
            pass
        return bytes(written)

    def __repr__(self) -> str:
        return f"<Encoded sample of {len(self._parts)} arrays in {self.size_bytes} bytes>"


def encode(arrays: Mapping[str, np.ndarray | Chunks]) -> Encoded:
    """The sample, ready to be written. LocalProtocolError if an array of it cannot be encoded."""
    if len(arrays) > MAX_ARRAYS:
        raise LocalProtocolError(f"a sample has {len(arrays)} arrays; the format holds at most {MAX_ARRAYS}")
    entries: list[bytes] = []
    sizes: list[tuple[int, tuple[int, ...], Chunks]] = []
    for name, value in arrays.items():
        encoded_name = name.encode("ascii", "replace")
        chunks, shape = ([value], value.shape) if isinstance(value, np.ndarray) else (value, _joined_shape(name, value))
        dtype = chunks[0].dtype
        code = _CODES.get(dtype.str)
        dimensions = len(shape)
        if code is None:
            raise LocalProtocolError(
                f"array {name!r} has dtype {dtype}, which cannot be encoded; use one of "
                f"{', '.join(str(dtype) for dtype in _DTYPES.values())} (masks as uint8)"
            )
        if dimensions > MAX_DIMENSIONS or not 0 < len(encoded_name) <= MAX_NAME_BYTES or not name.isascii():
            raise LocalProtocolError(
                f"array {name!r} with {dimensions} dimensions cannot be encoded: names are 1 to {MAX_NAME_BYTES} ASCII "
                f"characters and arrays have at most {MAX_DIMENSIONS} dimensions"
            )
        entries += (
            _ENTRY.pack(len(encoded_name), code, dimensions, 0),
            encoded_name,
            _EXTENTS[dimensions].pack(*shape),
        )
        size = math.prod(shape) * dtype.itemsize
        if size:
            # A scalar is written as an array of one element.
            sizes.append((size, shape or (1,), chunks if shape else [chunks[0].reshape(1)]))
    entry_bytes = b"".join(entries)
    header_bytes = _aligned(_PREAMBLE.size + len(entry_bytes))
    end = header_bytes
    parts: list[tuple[int, tuple[int, ...], Chunks]] = []
    for size, shape, chunks in sizes:
        parts.append((end, shape, chunks))
        end = _aligned(end + size)
    preamble = _PREAMBLE.pack(MAGIC, FORMAT_VERSION, len(arrays), header_bytes, end - header_bytes, 0)
    return Encoded(preamble + entry_bytes, parts, end)


def decode(buffer: bytes | bytearray | memoryview) -> dict[str, np.ndarray]:
    """The arrays as read-only views of `buffer`, which they keep alive. RemoteProtocolError if it is not a sample."""
    view = memoryview(buffer).toreadonly()
    if view.ndim != 1 or view.itemsize != 1:
        view = view.cast("B")
    size = len(view)
    if size < _PREAMBLE.size:
        raise RemoteProtocolError(f"an encoded sample of {size} bytes is shorter than its preamble, {_PREAMBLE.size}")
    magic, version, count, header_bytes, body_bytes, reserved = _PREAMBLE.unpack_from(view)
    if magic != MAGIC or reserved:
        raise RemoteProtocolError(f"not an encoded sample: it begins with {bytes(view[:4])!r}, expected {MAGIC!r}")
    if version != FORMAT_VERSION:
        raise RemoteProtocolError(
            f"a sample has format version {version}, expected {FORMAT_VERSION}: run one release on both sides"
        )
    if header_bytes + body_bytes != size or header_bytes % ALIGNMENT_BYTES or count > MAX_ARRAYS:
        raise RemoteProtocolError(
            f"an encoded sample claims {count} arrays in {header_bytes} + {body_bytes} bytes, but {size} bytes arrived"
        )
    header = view[:header_bytes]
    arrays: dict[str, np.ndarray] = {}
    position = _PREAMBLE.size
    offset = header_bytes
    try:
        for _ in range(count):
            name_bytes, code, dimensions, zero = _ENTRY.unpack_from(header, position)
            position += _ENTRY.size
            name = str(header[position : position + name_bytes], "ascii")
            position += name_bytes
            dtype = _DTYPES[code]
            shape = _EXTENTS[dimensions].unpack_from(header, position)
            position += 8 * dimensions
            elements = math.prod(shape)
            end = offset + elements * dtype.itemsize
            named = bool(name) and len(name) == name_bytes and name not in arrays and not zero
            if not named or end > size or max(shape, default=0) > size:
                raise RemoteProtocolError(
                    f"array {name!r} of an encoded sample claims shape {shape} of {dtype} at byte {offset}, "
                    f"but {size} bytes arrived (or its name is empty or repeated)"
                )
            # An empty array has no bytes to be a view of.
            flat = np.frombuffer(view, dtype, elements, offset) if elements else _empty(dtype)
            arrays[name] = flat.reshape(shape) if dimensions != 1 else flat
            offset = _aligned(end)
    except (struct.error, KeyError, IndexError, ValueError) as error:
        raise RemoteProtocolError(f"an encoded sample has a broken entry after byte {position}: {error}") from error
    if offset != size or position > header_bytes or header_bytes - position >= ALIGNMENT_BYTES:
        raise RemoteProtocolError(
            f"an encoded sample's arrays end at byte {offset} and its entries at {position}, "
            f"but it claims a header of {header_bytes} bytes and {size} in all"
        )
    return arrays


def _joined_shape(name: str, chunks: Chunks) -> tuple[int, ...]:
    first = chunks[0] if chunks else np.zeros(())
    dtype, row = first.dtype, first.shape[1:]
    if not first.ndim or any(c.dtype != dtype or c.shape[1:] != row or not c.ndim for c in chunks):
        raise LocalProtocolError(
            f"the chunks of array {name!r} cannot be joined: they need one dtype and one shape but for the first axis, "
            f"found {sorted({f'{chunk.dtype} {chunk.shape}' for chunk in chunks})}"
        )
    return (sum(map(len, chunks)), *row)


def _strides(chunks: Chunks) -> Iterator[tuple[Chunks, int, int]]:
    """The same rows in groups of about `STRIDE_BYTES`, each with its first row and the one after its last."""
    limit = max(1, STRIDE_BYTES // (chunks[0].itemsize * math.prod(chunks[0].shape[1:])))
    if max(map(len, chunks)) > limit:
        chunks = [chunk[start : start + limit] for chunk in chunks for start in range(0, len(chunk), limit)]
    ends = list(itertools.accumulate(map(len, chunks)))
    first = row = 0
    while first < len(chunks):
        last = bisect.bisect_left(ends, row + limit, first) + 1
        end = ends[min(last, len(ends)) - 1]
        yield chunks[first:last], row, end
        first, row = last, end


def _aligned(size_bytes: int) -> int:
    return size_bytes + -size_bytes % ALIGNMENT_BYTES


def _empty(dtype: np.dtype) -> np.ndarray:
    array = np.empty(0, dtype)
    array.setflags(write=False)
    return array
