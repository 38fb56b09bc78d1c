"""Which groups of a batch each rank of a trainer trains on. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.records.batch import Batch, BatchGroup


def shares_of(batch: Batch, ranks: int) -> list[Batch]:
    """One batch for each rank: whole groups, balanced by tokens, in the order of the batch. A share may be empty."""
    chosen = split([_tokens(group) for group in batch.groups], ranks)
    return [Batch(batch.step, tuple(batch.groups[i] for i in mine), batch.final) for mine in chosen]


def split(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Indices for each part: the heaviest first, each to the lightest part so far. At most 4/3 of the optimum."""
    chosen: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        lightest = min(range(parts), key=lambda part: (loads[part], len(chosen[part]), part))
        chosen[lightest].append(index)
        loads[lightest] += weights[index]
    return [sorted(mine) for mine in chosen]


def _tokens(group: BatchGroup) -> int:
    """The size of the payloads includes prompt and completion; `lengths` count generated tokens only."""
    return sum(ref.size_bytes for ref in group.payloads)
