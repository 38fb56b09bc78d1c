"""Treatment of completions that were cut off at the token limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.batch.assemble import Sample


def masked(samples: Sequence[Sample], left_out: np.ndarray) -> list[Sample]:
    """The same samples, with no trained token in those that are left out."""
    return [
        {**sample, "loss_mask": np.zeros_like(sample["loss_mask"])} if out and "loss_mask" in sample else sample
        for sample, out in zip(samples, left_out, strict=True)
    ]


def longest_turn(sample: Sample) -> int:
    """Generated tokens of the longest completion: the longest run of trained tokens in a branch; 0 without tokens."""
    if "loss_mask" not in sample:
        return 0
    mask = sample["loss_mask"]
    cuts = np.flatnonzero(np.diff(mask)) + 1
    branches = np.clip(sample["branches"][:, 1:].ravel(), 0, len(mask)) if "branches" in sample else cuts
    edges = np.unique(np.concatenate([[0], cuts, branches, [len(mask)]])).astype(np.int64)
    runs = np.diff(edges)[mask[edges[:-1]] != 0]
    return int(runs.max(initial=0))


def overlong(turns: Sequence[int], truncated: np.ndarray, *, limit: int, tokens: int, penalty: float) -> np.ndarray:
    """The penalty of each sample for its longest turn: 0 up to `limit - tokens`, then linear up to `penalty` at the
    limit, which is that of one turn, and if truncated.

    penalty · clip((turn − (limit − tokens)) / tokens, 0, 1)
    """
    if not tokens:
        return np.zeros(len(truncated))
    share = np.clip((np.asarray(turns, np.float64) - (limit - tokens)) / tokens, 0.0, 1.0)
    return penalty * np.where(truncated, 1.0, share)
