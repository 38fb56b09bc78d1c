"""Completions that were cut off at the token limit, and what may be done about them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.batch.assemble import Sample


def masked(samples: Sequence[Sample], left_out: np.ndarray) -> list[Sample]:
    """The same samples; no token of those that are left out is trained."""
    return [
        {**sample, "loss_mask": np.zeros_like(sample["loss_mask"])} if out and "loss_mask" in sample else sample
        for sample, out in zip(samples, left_out, strict=True)
    ]


def overlong(lengths: Sequence[int], truncated: np.ndarray, *, limit: int, tokens: int, penalty: float) -> np.ndarray:
    """What each reward loses: nothing up to `limit - tokens`, from there in a line up to `penalty` at the limit.

    penalty · clip((length − (limit − tokens)) / tokens, 0, 1)
    """
    if not tokens:
        return np.zeros(len(truncated))
    share = np.clip((np.asarray(lengths, np.float64) - (limit - tokens)) / tokens, 0.0, 1.0)
    return penalty * np.where(truncated, 1.0, share)
