"""Metrics of a step's samples: lengths, truncation, spread of rewards, and each reward function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.batch import columns
from penstock.batch.filters import TOLERANCE
from penstock.records.batch import BatchGroup


def figures_of(groups: Sequence[BatchGroup], samples: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Values by metric name. `samples` are those of the groups, in order. A missing reward counts in no mean."""
    if not samples:
        return {}
    lengths = np.array([length for group in groups for length in group.lengths], np.float64)
    rewards = np.array([reward for group in groups for reward in group.rewards], np.float64)
    unscored = np.array([columns.unscored(sample) for sample in samples], bool)
    scored = rewards[~unscored]
    figures = {
        "completion_length_mean": float(lengths.mean()),
        "completion_length_max": float(lengths.max()),
        "truncated_share": sum(map(columns.truncated, samples)) / len(samples),
        "unscored_share": float(unscored.mean()),
        "groups_without_spread_share": sum(_is_flat(group.rewards) for group in groups) / len(groups),
        "tokens": float(lengths.sum()),
    }
    if len(scored):
        figures |= {"reward_std": float(scored.std()), "reward_min": float(scored.min())}
        figures |= {"reward_max": float(scored.max())}
    parts: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in columns.reward_parts(sample).items():
            parts.setdefault(name, []).append(value)
    for name, values in parts.items():
        figures[f"reward/{name}/mean"] = float(np.mean(values))
        figures[f"reward/{name}/std"] = float(np.std(values))
    return figures


def _is_flat(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal. A group of one is not counted: it has no spread to measure."""
    return len(rewards) > 1 and max(rewards) - min(rewards) <= TOLERANCE
