"""Splits a sample into the sequences that are trained.

Most samples are one sequence. A sample whose conversation was reset to an earlier point has several branches with a
common beginning: `branches` lists the ranges of tokens of each. A branch is one sequence and reads all of its tokens,
but a token is trained only in the first branch that contains it. All branches have the advantage of the sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import RemoteProtocolError

Sample = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens of a sample that form one sequence."""

    sample: int
    stretches: tuple[tuple[int, int], ...]
    """Ranges of the sample's tokens: first token and the one after the last."""
    tokens: int
    loss_mask: np.ndarray
    """uint8[tokens]."""


def sequences_of(samples: Sequence[Sample]) -> list[TokenSequence]:
    """The sequences of all samples, in their order. RemoteProtocolError if a sample's branches are invalid."""
    sequences: list[TokenSequence] = []
    for number, sample in enumerate(samples):
        tokens = len(sample["token_ids"])
        if "branches" in sample:
            sequences += _branches(number, sample, tokens)
        else:
            sequences.append(TokenSequence(number, ((0, tokens),), tokens, sample["loss_mask"]))
    return sequences


def _branches(number: int, sample: Sample, tokens: int) -> list[TokenSequence]:
    branches, mask = sample["branches"], sample["loss_mask"]
    if branches.ndim != 2 or branches.shape[1] != 3 or not len(branches) or branches.dtype.kind not in "iu":
        raise _invalid(number, sample)
    label, start, end = branches.T.astype(np.int64)
    steps = np.diff(label, prepend=-1)
    if steps[0] != 1 or ((steps != 0) & (steps != 1)).any() or (start < 0).any() or (start >= end).any():
        raise _invalid(number, sample)
    back = (steps[1:] == 0) & (start[1:] < end[:-1])  # the ranges of a branch ascend, so it has no token twice
    if back.any() or end.max() > min(tokens, len(mask)):
        raise _invalid(number, sample)
    found: list[TokenSequence] = []
    untrained = mask.copy()
    for first, last in zip(*_runs(label), strict=True):
        stretches = tuple(zip(start[first:last].tolist(), end[first:last].tolist(), strict=True))
        trained = np.concatenate([untrained[low:high] for low, high in stretches])
        for low, high in stretches:
            untrained[low:high] = 0
        if trained.any() or not found:
            found.append(TokenSequence(number, stretches, len(trained), trained))
    return found


def _runs(label: np.ndarray) -> tuple[list[int], list[int]]:
    """Where each run of equal labels begins and ends."""
    edges = [0, *(np.flatnonzero(np.diff(label)) + 1).tolist(), len(label)]
    return edges[:-1], edges[1:]


def _invalid(number: int, sample: Sample) -> RemoteProtocolError:
    branches = sample["branches"]
    return RemoteProtocolError(
        f"sample {number} of the batch has invalid branches: expected rows of branch (0, 1, …), first token "
        f"and the one after the last, within {len(sample['token_ids'])} tokens; found {branches.dtype} "
        f"{branches.shape} {branches.ravel()[:12].tolist()}"
    )
