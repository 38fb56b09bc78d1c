"""Reads the bytes of a version into tensors and verifies them, for every transport.

Every transport (files, a stream from another host) is a `BucketSource`; copying, hashing and the comparison with the
manifest are here, once. Each byte is copied once, and hashed at its destination while it is still in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from penstock.errors import Damaged, RemoteProtocolError
from penstock.records.weights import Manifest, TensorSpec
from penstock.weights.buckets import DTYPES, Span, TensorHash, compose, layout, size_of
from penstock.weights.io.digest import host_view, spec_of, torch_dtype
from penstock.weights.manifest import describe, tensors_of


class BucketSource(Protocol):
    """One version's files, open for reading. Safe to read from several threads at once."""

    def pieces(self, bucket: int, offset: int, target: memoryview) -> Iterator[memoryview]:
        """Fills `target` with the file's bytes from `offset`, and yields each part of it when it is filled.

        `Stale` if the bytes were removed, `Transient` if the transfer was interrupted.
        """
        ...

    def close(self) -> None: ...


def fits(tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> bool:
    """Whether the tensors have exactly the names, dtypes and shapes of the version."""
    expected = tensors_of(manifest)
    return len(tensors) == len(expected) and all(
        spec.name in tensors and spec_of(spec.name, tensors[spec.name]) == spec for spec in expected
    )


def check_fit(tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> None:
    """Raises with the first difference between the tensors held and those of the version."""
    expected = {spec.name: spec for spec in tensors_of(manifest)}
    missing, surplus = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or surplus:
        raise RemoteProtocolError(
            f"{describe(manifest)} does not fit the engine's model: "
            f"missing in the engine {missing[:3]}, missing in the version {surplus[:3]}"
        )
    for name, spec in expected.items():
        held = spec_of(name, tensors[name])
        if held != spec:
            raise RemoteProtocolError(
                f"{describe(manifest)} does not fit the engine's model: tensor {name!r} is "
                f"{spec.dtype}{list(spec.shape)} in the version and {held.dtype}{list(held.shape)} in the engine"
            )


def tensor_at(memory: torch.Tensor, start: int, spec: TensorSpec) -> torch.Tensor:
    """The tensor whose bytes begin at `start` in `memory`; copied only if torch needs alignment."""
    flat = memory[start : start + size_of(spec)]
    if start % DTYPES[spec.dtype][1]:  # it follows a tensor of smaller elements
        flat = flat.clone()
    return flat.view(torch_dtype(spec.dtype)).view(spec.shape)


def fetch(source: BucketSource, manifest: Manifest, into: Mapping[str, torch.Tensor], *, threads: int = 1) -> None:
    """Fills these CPU tensors, which must fit the version, and verifies them; reads `threads` of them at a time."""

    def read(place: tuple[int, Span]) -> bytes:
        bucket, span = place
        hashed = TensorHash(span.tensor)
        for piece in source.pieces(bucket, span.start, host_view(into[span.tensor.name])):
            hashed.update(piece)
        return hashed.digest()

    places = [(index, span) for index, bucket in enumerate(manifest.buckets) for span in layout(bucket.tensors).spans]
    if threads == 1:
        digests = [read(place) for place in places]
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="weights-fetch") as pool:
            digests = list(pool.map(read, places))  # an error cancels the tensors that have not begun
    check_digests(manifest, digests)


def check_digests(manifest: Manifest, digests: Sequence[bytes]) -> None:
    """Raises `Damaged` unless the digests of all tensors, in order, match the manifest, per bucket and in total."""
    first = 0
    for bucket in manifest.buckets:
        found = compose(digests[first : first + len(bucket.tensors)])
        first += len(bucket.tensors)
        if found != bucket.digest:
            raise Damaged(
                f"weights file {bucket.file} is not what was published: digest {found}, expected {bucket.digest}; "
                "the file was damaged or replaced and must be published again"
            )
    found = compose(digests)
    if found != manifest.digest:
        raise Damaged(
            f"{describe(manifest)} is inconsistent: its files have digest {found}, its manifest states "
            f"{manifest.digest}; it must be published again"
        )
