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


def overlong(lengths: Sequence[int], truncated: np.ndarray, *, limit: int, tokens: int, penalty: float) -> np.ndarray:
    """The penalty of each sample: 0 up to `limit - tokens`, then linear up to `penalty` at the limit and if truncated.

    penalty · clip((length − (limit − tokens)) / tokens, 0, 1)
    """
    if not tokens:
        return np.zeros(len(truncated))
    share = np.clip((np.asarray(lengths, np.float64) - (limit - tokens)) / tokens, 0.0, 1.0)
    return penalty * np.where(truncated, 1.0, share)
