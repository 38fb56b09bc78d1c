"""Completions that were cut off at the token limit: which they are, and what may be done about them.

A sample says so itself, in its array `truncated` (uint8, one entry). One without that array ended by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.batch.assemble import Sample


def truncated_samples(samples: Sequence[Sample]) -> np.ndarray:
    """bool[samples]."""
    return np.array([bool(sample["truncated"].any()) if "truncated" in sample else False for sample in samples], bool)


def masked(samples: Sequence[Sample], truncated: np.ndarray) -> list[Sample]:
    """The same samples; no token of a truncated one is trained."""
    return [
        {**sample, "loss_mask": np.zeros_like(sample["loss_mask"])} if cut and "loss_mask" in sample else sample
        for sample, cut in zip(samples, truncated, strict=True)
    ]


def overlong(lengths: Sequence[int], truncated: np.ndarray, *, limit: int, tokens: int, penalty: float) -> np.ndarray:
    """What each reward loses: nothing up to `limit - tokens`, from there in a line up to `penalty` at the limit.

    penalty · clip((length − (limit − tokens)) / tokens, 0, 1)
    """
    if not tokens:
        return np.zeros(len(truncated))
    share = np.clip((np.asarray(lengths, np.float64) - (limit - tokens)) / tokens, 0.0, 1.0)
    return penalty * np.where(truncated, 1.0, share)
