"""The digest of tensors in memory: it verifies that the served weights are the published ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from penstock.errors import LocalProtocolError
from penstock.records.weights import TensorSpec
from penstock.weights.buckets import DTYPES, TensorHash, compose, size_of

PIECE_BYTES = 1024 * 1024
"""Bytes are copied and hashed in pieces that stay in the processor's cache between the two."""

_DEVICE_PIECE_BYTES = 32 * 1024 * 1024


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise LocalProtocolError(f"dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
    return getattr(torch, name)


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape))


def specs_of(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """The specifications of all tensors, in the order of their names."""
    return [spec_of(name, tensors[name]) for name in sorted(tensors)]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as a flat uint8 tensor on its device; copies only what is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def host_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy; writing to the view writes to the tensor."""
    if not tensor.is_contiguous():
        raise LocalProtocolError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous and cannot be viewed")
    return flat_bytes(tensor).numpy().data


def host_pieces(tensor: torch.Tensor, piece_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
    """The tensor's bytes in order. A piece is valid until the next one is requested."""
    flat = flat_bytes(tensor)
    if flat.device.type == "cpu":
        view = flat.numpy().data
        for start in range(0, len(view), piece_bytes):
            yield view[start : start + piece_bytes]
        return
    yield from _device_pieces(flat)


def _device_pieces(flat: torch.Tensor) -> Iterator[memoryview]:
    """Alternates two pinned buffers: the device fills one while the caller reads the other."""
    size = flat.numel()
    if size == 0:
        return
    piece = min(size, _DEVICE_PIECE_BYTES)
    buffers = [torch.empty(piece, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    stream = torch.cuda.Stream(flat.device)
    stream.wait_stream(torch.cuda.current_stream(flat.device))
    events = [torch.cuda.Event() for _ in range(2)]
    starts = range(0, size, piece)

    def begin(turn: int) -> None:
        part = flat[starts[turn] : starts[turn] + piece]
        with torch.cuda.stream(stream):
            buffers[turn % 2][: part.numel()].copy_(part, non_blocking=True)
            events[turn % 2].record(stream)

    begin(0)
    for turn, start in enumerate(starts):
        if turn + 1 < len(starts):
            begin(turn + 1)
        events[turn % 2].synchronize()
        yield buffers[turn % 2].numpy().data[: min(piece, size - start)]


def tensor_digest(name: str, tensor: torch.Tensor) -> bytes:
    """The digest of one tensor under its name."""
    spec = spec_of(name, tensor)
    size_of(spec)  # refuses dtypes that cannot be published
    hashed = TensorHash(spec)
    for piece in host_pieces(tensor):
        hashed.update(piece)
    return hashed.digest()


def digest_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """The digest of a set of tensors, equal to the manifest's digest if and only if they are that version."""
    return compose(tensor_digest(name, tensors[name]) for name in sorted(tensors))
