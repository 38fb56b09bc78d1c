"""A digest that is computed on the device of the weights, at memory speed: for versions that never leave a GPU.

The memory is divided into rows of 64-bit words. The sum of a row adds its words times odd constants, modulo 2**64.
Changing one word always changes the sum of its row; any other damage is missed with a probability of about 2**-64.
The digest is the hash of the names, dtypes and shapes, followed by the sums of all rows. It covers the same content as
the digest of a manifest but has another value: the two are never compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

import msgspec
import numpy as np
import torch
import xxhash

from penstock.errors import LocalProtocolError
from penstock.records.weights import TensorSpec

ROW_WORDS = 1 << 16
WORD_BYTES = 8
BLOCK_ROWS = 128
"""Rows that are summed at once: this takes 64 MB of extra memory."""


@cache
def _constants(device: torch.device) -> torch.Tensor:
    """Pseudo-random odd numbers, the same on every device."""
    with np.errstate(over="ignore"):
        mixed = np.arange(1, ROW_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(mixed.view(np.int64)).to(device)


def _sums(words: torch.Tensor) -> Iterator[torch.Tensor]:
    constants = _constants(words.device)
    whole = words.numel() // ROW_WORDS
    rows = words[: whole * ROW_WORDS].view(whole, ROW_WORDS)
    for first in range(0, whole, BLOCK_ROWS):
        yield (rows[first : first + BLOCK_ROWS] * constants).sum(1)
    rest = words[whole * ROW_WORDS :]
    if rest.numel():
        yield (rest * constants[: rest.numel()]).sum().view(1)


def device_digest(flat: torch.Tensor, tensors: tuple[TensorSpec, ...]) -> str:
    """The digest of the weights in `flat` (bytes, a whole number of words) on any device.

    Waits for all work that was queued on the device before.
    """
    if flat.dtype != torch.uint8 or flat.dim() != 1 or flat.numel() % 8 or flat.storage_offset() % 8:
        raise LocalProtocolError(f"expected whole words as a flat uint8 tensor, found {flat.dtype}{list(flat.shape)}")
    return _hashed(tensors, list(_sums(flat.view(torch.int64))))


def scattered_digest(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The digest of separate tensors, on any device. A last incomplete word is padded with zeros."""
    specs: list[tuple[str, str, list[int]]] = []
    sums: list[torch.Tensor] = []
    for name, tensor in named:
        specs.append((name, str(tensor.dtype), list(tensor.shape)))
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if (rest := flat.numel() % WORD_BYTES) or flat.data_ptr() % WORD_BYTES:
            flat = torch.nn.functional.pad(flat, (0, -rest % WORD_BYTES))
            flat = flat.clone() if flat.data_ptr() % WORD_BYTES else flat
        sums += [one.cpu() for one in _sums(flat.view(torch.int64))]
    return _hashed(specs, sums)


def _hashed(about: object, sums: list[torch.Tensor]) -> str:
    hashed = xxhash.xxh3_128(msgspec.msgpack.encode(about))
    if sums:
        hashed.update(torch.cat(sums).cpu().numpy().tobytes())
    return hashed.hexdigest()
