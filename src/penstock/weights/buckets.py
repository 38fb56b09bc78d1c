"""How a model's tensors are divided into files, laid out in them, and hashed.

Rules for writer and readers:

- tensors are sorted by name, in the artifact and in every digest;
- a bucket is a run of consecutive tensors of at most `bucket_bytes`; a larger tensor has a bucket of its own;
- a file is a safetensors file whose header is a pure function of the bucket's tensors, so a reader compares it with the
  expected header instead of trusting it;
- the digest of a tensor covers its name, dtype, shape and bytes (xxh3-128); the digest of any list of tensors (a
  bucket, a whole version) covers the digests of its tensors. The digest of a version therefore does not depend on
  its buckets, and tensors can be hashed in any order and in parallel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec
import xxhash

from penstock.errors import LocalProtocolError
from penstock.records.weights import TensorSpec

DEFAULT_BUCKET_BYTES = 256 * 1024 * 1024

DTYPES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""Each dtype that may be published: its safetensors name and the bytes of one element."""

_ALIGN_BYTES = 64
"""The data of every file starts at a multiple of this, so that mapped tensors are aligned."""


class Span(msgspec.Struct, frozen=True):
    """The position of one tensor in its file."""

    tensor: TensorSpec
    start: int
    size_bytes: int


class Layout(msgspec.Struct, frozen=True):
    """The exact header of a file, and the position of each tensor after it."""

    header: bytes
    spans: tuple[Span, ...]
    size_bytes: int


def size_of(tensor: TensorSpec) -> int:
    """Bytes of the tensor's elements."""
    if tensor.dtype not in DTYPES:
        raise LocalProtocolError(
            f"tensor {tensor.name!r} has dtype {tensor.dtype!r}, which cannot be published; "
            f"supported are {', '.join(DTYPES)}"
        )
    return math.prod(tensor.shape) * DTYPES[tensor.dtype][1]


def plan(tensors: Iterable[TensorSpec], bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> list[tuple[TensorSpec, ...]]:
    """Divides the tensors, sorted by name, into buckets."""
    if bucket_bytes <= 0:
        raise LocalProtocolError(f"bucket_bytes must be positive, found {bucket_bytes}")
    buckets: list[tuple[TensorSpec, ...]] = []
    current: list[TensorSpec] = []
    filled = 0
    for tensor in sorted(tensors, key=lambda t: t.name):
        size = size_of(tensor)
        if current and filled + size > bucket_bytes:
            buckets.append(tuple(current))
            current, filled = [], 0
        current.append(tensor)
        filled += size
    if current:
        buckets.append(tuple(current))
    return buckets


def layout(tensors: Sequence[TensorSpec], *, marked: bool = False) -> Layout:
    """The file layout of one bucket. It is the same for every version, so it is cached.

    `marked`: the header states torch's format (`pt`), which transformers requires in a model's file.
    """
    return _layout(tuple(tensors), marked)


@lru_cache(maxsize=256)
def _layout(tensors: tuple[TensorSpec, ...], marked: bool) -> Layout:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}} if marked else {}
    offset = 0
    for tensor in tensors:
        size = size_of(tensor)
        entries[tensor.name] = {
            "dtype": DTYPES[tensor.dtype][0],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = msgspec.json.encode(entries)
    text += b" " * (-(8 + len(text)) % _ALIGN_BYTES)
    header = len(text).to_bytes(8, "little") + text
    spans: list[Span] = []
    start = len(header)
    for tensor in tensors:
        size = size_of(tensor)
        spans.append(Span(tensor, start, size))
        start += size
    return Layout(header, tuple(spans), start)


class TensorHash:
    """The digest of one tensor, computed from its bytes in any number of pieces."""

    def __init__(self, tensor: TensorSpec) -> None:
        head = msgspec.msgpack.encode((tensor.name, tensor.dtype, tensor.shape))
        self._hash = xxhash.xxh3_128(len(head).to_bytes(4, "little") + head)

    def update(self, data: memoryview | bytes | bytearray) -> None:
        self._hash.update(data)

    def digest(self) -> bytes:
        return self._hash.digest()


def compose(tensor_digests: Iterable[bytes]) -> str:
    """The digest of a list of tensors, from their digests, sorted by tensor name."""
    whole = xxhash.xxh3_128()
    for digest in tensor_digests:
        whole.update(digest)
    return whole.hexdigest()
