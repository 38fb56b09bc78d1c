"""Writes tensors that are sharded over processes: each process writes its part of the same file.

A tensor is sharded by its rows, so a rank's part is one range of bytes. No tensor is gathered: a file of the right size
is created first, every rank writes into it, and the bytes are hashed in the page cache.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from penstock.errors import LocalProtocolError
from penstock.records.weights import TensorSpec
from penstock.weights.buckets import TensorHash, layout
from penstock.weights.io.digest import host_pieces


def is_sharded(tensors: Mapping[str, Tensor]) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in tensors.values())


def own_rows(tensor: Tensor) -> tuple[int, Tensor]:
    """The first row of this process's part, and the part. A tensor that is not sharded is one part."""
    if not isinstance(tensor, DTensor):
        return 0, tensor
    (placement,) = tensor.placements
    if not isinstance(placement, Shard) or placement.dim != 0:
        raise LocalProtocolError(f"a tensor of shape {tuple(tensor.shape)} is sharded by {placement}, expected rows")
    ranks, rank = tensor.device_mesh.size(), tensor.device_mesh.get_local_rank()
    rows = -(-tensor.shape[0] // ranks)
    return min(rank * rows, tensor.shape[0]), tensor.to_local()


def lay_out(path: Path, specs: Sequence[TensorSpec], *, marked: bool = False) -> None:
    """Creates the file for the parts, with its header and at its full size."""
    whole = layout(specs, marked=marked)
    with path.open("xb") as file:
        file.write(whole.header)
        file.truncate(whole.size_bytes)


def write_parts(
    path: Path, specs: Sequence[TensorSpec], tensors: Mapping[str, Tensor], *, rank: int, marked: bool = False
) -> None:
    """Writes this rank's part of every tensor. Rank 0 writes the tensors that are not sharded."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for span in layout(specs, marked=marked).spans:
            tensor = tensors[span.tensor.name]
            if rank and not isinstance(tensor, DTensor):
                continue
            first, part = own_rows(tensor)
            at = span.start
            if first:
                at += first * (span.size_bytes // tensor.shape[0])
            for piece in host_pieces(part):
                _write_at(descriptor, piece, at)
                at += len(piece)
    finally:
        os.close(descriptor)


def hash_file(path: Path, specs: Sequence[TensorSpec]) -> list[bytes]:
    """The digests of the tensors in the file, in order."""
    digests: list[bytes] = []
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
    ):
        for span in layout(specs).spans:
            hashed = TensorHash(span.tensor)
            with view[span.start : span.start + span.size_bytes] as tensor:
                hashed.update(tensor)
            digests.append(hashed.digest())
    return digests


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
