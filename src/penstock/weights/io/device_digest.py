"""A digest that is computed where the tensors lie, in a few passes over memory: for weights that never leave a GPU.

The bytes of all tensors, in the order of their names and each filled up to whole 64-bit words, are cut into rows; a
row's sum is that of its words times odd constants, modulo 2**64. Changing one word always changes the sum of its row;
any other damage goes unnoticed with a probability of about 2**-64. The digest is the hash of all rows' sums behind the
names, dtypes and shapes. It says the same as the digest of a manifest but is another number: both are never compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

import msgspec
import numpy as np
import torch
import xxhash

from penstock.weights.io.digest import flat_bytes, specs_of

ROW_WORDS = 1 << 16
BLOCK_WORDS = 1 << 23
"""Words hashed at once: bounds the memory this takes to a few times 64 MB."""


@cache
def _constants(device: torch.device) -> torch.Tensor:
    """Odd numbers without a pattern, the same everywhere."""
    with np.errstate(over="ignore"):
        mixed = np.arange(1, ROW_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(mixed.view(np.int64)).to(device)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    flat = flat_bytes(tensor)
    if flat.numel() % 8:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8))
    elif flat.storage_offset() % 8:
        flat = flat.clone()  # words must lie on their boundaries
    return flat.view(torch.int64)


def _blocks(tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """All words in order, in blocks of `BLOCK_WORDS`: small tensors are joined, large ones cut."""
    joined: list[torch.Tensor] = []
    filled = 0
    for name in sorted(tensors):
        words = _words(tensors[name])
        while words.numel():
            part = words[: BLOCK_WORDS - filled]
            words = words[part.numel() :]
            joined.append(part)
            filled += part.numel()
            if filled == BLOCK_WORDS:
                yield joined[0] if len(joined) == 1 else torch.cat(joined)
                joined, filled = [], 0
    if joined:
        yield torch.cat(joined)


def _sums(words: torch.Tensor) -> Iterator[torch.Tensor]:
    constants = _constants(words.device)
    whole = words.numel() // ROW_WORDS * ROW_WORDS
    if whole:
        yield (words[:whole].view(-1, ROW_WORDS) * constants).sum(1)
    rest = words[whole:]
    if rest.numel():
        yield (rest * constants[: rest.numel()]).sum().view(1)


def device_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """The digest of tensors that all lie on one device. Waits for what was queued for them there."""
    hashed = xxhash.xxh3_128(msgspec.msgpack.encode(specs_of(tensors)))
    sums = [part for block in _blocks(tensors) for part in _sums(block)]
    if sums:
        hashed.update(torch.cat(sums).cpu().numpy().tobytes())
    return hashed.hexdigest()
