"""Bytes of a version into tensors, verified, from wherever a carrier finds them.

Every carrier (files, a stream from another host) is a `BucketSource`; copying, hashing and the comparison with the
manifest are here, once. Each byte is copied once, and hashed where it arrived while it is still in the cache: what is
verified is the memory that will serve.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from penstock.errors import LocalProtocolError, RemoteProtocolError
from penstock.records.weights import BucketSpec, Manifest, TensorSpec
from penstock.weights.buckets import Span, TensorHash, compose, layout
from penstock.weights.io.digest import host_view, spec_of, torch_dtype
from penstock.weights.manifest import describe, tensors_of


class BucketSource(Protocol):
    """One version's files, open for reading. Safe to read from several threads at once."""

    def pieces(self, bucket: int, offset: int, target: memoryview) -> Iterator[memoryview]:
        """Fills `target` with the file's bytes from `offset`, and yields each part of it when it is filled.

        `Stale` when the bytes are gone for good, `Transient` when they were cut off.
        """
        ...

    def close(self) -> None: ...


def fits(tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> bool:
    """Whether the tensors have exactly the names, dtypes and shapes of the version."""
    wanted = tensors_of(manifest)
    return len(tensors) == len(wanted) and all(
        spec.name in tensors and spec_of(spec.name, tensors[spec.name]) == spec for spec in wanted
    )


def check_fit(tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> None:
    """Raises with the first difference between the tensors held and those the version brings."""
    wanted = {spec.name: spec for spec in tensors_of(manifest)}
    missing, surplus = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or surplus:
        raise RemoteProtocolError(
            f"{describe(manifest)} does not fit the engine's model: "
            f"missing in the engine {missing[:3]}, missing in the version {surplus[:3]}"
        )
    for name, spec in wanted.items():
        held = spec_of(name, tensors[name])
        if held != spec:
            raise RemoteProtocolError(
                f"{describe(manifest)} does not fit the engine's model: tensor {name!r} is "
                f"{spec.dtype}{list(spec.shape)} in the version and {held.dtype}{list(held.shape)} in the engine"
            )


def _fetch_tensor(source: BucketSource, bucket: int, span: Span, target: torch.Tensor) -> bytes:
    hashed = TensorHash(span.tensor)
    for piece in source.pieces(bucket, span.start, host_view(target)):
        hashed.update(piece)
    return hashed.digest()


def _target(into: Mapping[str, torch.Tensor] | None, spec: TensorSpec) -> torch.Tensor:
    if into is None:
        return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
    target = into[spec.name]
    if target.device.type != "cpu" or spec_of(spec.name, target) != spec:
        raise LocalProtocolError(
            f"cannot fetch {spec.name!r} ({spec.dtype}{list(spec.shape)}) into a {target.device.type} tensor "
            f"{target.dtype}{list(target.shape)}: a CPU tensor of the same kind is needed"
        )
    return target


def check_bucket(bucket: BucketSpec, digests: list[bytes]) -> None:
    """Raises unless the tensors' digests are those the manifest states for their bucket."""
    found = compose(digests)
    if found != bucket.digest:
        raise RemoteProtocolError(
            f"weights file {bucket.file} is not what was published: digest {found}, expected {bucket.digest}; "
            "the file was damaged or exchanged and must be published again"
        )


def fetch_buckets(
    source: BucketSource, manifest: Manifest, into: Mapping[str, torch.Tensor] | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """Verified buckets one after the other, for loading in place with the memory of one bucket."""
    digests: list[bytes] = []
    for index, bucket in enumerate(manifest.buckets):
        fetched: dict[str, torch.Tensor] = {}
        first = len(digests)
        for span in layout(bucket.tensors).spans:
            target = _target(into, span.tensor)
            digests.append(_fetch_tensor(source, index, span, target))
            fetched[span.tensor.name] = target
        check_bucket(bucket, digests[first:])
        yield fetched
    check_whole(manifest, digests)


def fetch(
    source: BucketSource, manifest: Manifest, into: Mapping[str, torch.Tensor] | None = None, *, threads: int = 1
) -> dict[str, torch.Tensor]:
    """The whole version, verified, in fresh tensors or in those of `into`; `threads` tensors arrive at a time."""
    if threads == 1:
        fetched: dict[str, torch.Tensor] = {}
        for bucket in fetch_buckets(source, manifest, into):
            fetched.update(bucket)
        return fetched
    targets = {spec.name: _target(into, spec) for spec in tensors_of(manifest)}
    with ThreadPoolExecutor(threads, thread_name_prefix="weights-fetch") as pool:
        pending = [
            [pool.submit(_fetch_tensor, source, index, span, targets[span.tensor.name]) for span in spans]
            for index, spans in enumerate(layout(bucket.tensors).spans for bucket in manifest.buckets)
        ]
        try:
            digests = [[future.result() for future in futures] for futures in pending]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    for bucket, found in zip(manifest.buckets, digests, strict=True):
        check_bucket(bucket, found)
    check_whole(manifest, [digest for found in digests for digest in found])
    return targets


def check_whole(manifest: Manifest, digests: list[bytes]) -> None:
    """Raises unless the digests of all tensors, in order, give the manifest's digest."""
    found = compose(digests)
    if found != manifest.digest:
        raise RemoteProtocolError(
            f"{describe(manifest)} is inconsistent: its files have digest {found}, its manifest states "
            f"{manifest.digest}; it must be published again"
        )
