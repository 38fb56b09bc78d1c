"""Metrics of a step's samples: lengths, truncation, spread of rewards, and each reward function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from penstock.batch import columns
from penstock.batch.filters import TOLERANCE
from penstock.batch.truncation import longest_turn
from penstock.records.batch import BatchGroup


class SampleFacts(msgspec.Struct, frozen=True, array_like=True):
    """What the payload of one sample contributes to figures and advantages of its whole batch, over all ranks."""

    truncated: bool
    unscored: bool
    longest_turn: int
    reward_parts: dict[str, float]


def facts_of(sample: Mapping[str, np.ndarray]) -> SampleFacts:
    parts = columns.reward_parts(sample)
    return SampleFacts(columns.truncated(sample), columns.unscored(sample), longest_turn(sample), parts)


def figures_of(groups: Sequence[BatchGroup], facts: Sequence[SampleFacts]) -> dict[str, float]:
    """Values by metric name. `facts` are those of the groups' samples, in order. A missing reward counts in no mean."""
    if not facts:
        return {}
    lengths = np.array([length for group in groups for length in group.lengths], np.float64)
    rewards = np.array([reward for group in groups for reward in group.rewards], np.float64)
    unscored = np.array([one.unscored for one in facts], bool)
    scored = rewards[~unscored]
    figures = {
        "completion_length_mean": float(lengths.mean()),
        "completion_length_max": float(lengths.max()),
        "truncated_share": sum(one.truncated for one in facts) / len(facts),
        "unscored_share": float(unscored.mean()),
        "groups_without_spread_share": sum(_is_flat(group.rewards) for group in groups) / len(groups),
        "tokens": float(lengths.sum()),
    }
    if len(scored):
        figures |= {"reward_std": float(scored.std()), "reward_min": float(scored.min())}
        figures |= {"reward_max": float(scored.max())}
    parts: dict[str, list[float]] = {}
    for one in facts:
        for name, value in one.reward_parts.items():
            parts.setdefault(name, []).append(value)
    for name, values in parts.items():
        figures[f"reward/{name}/mean"] = float(np.mean(values))
        figures[f"reward/{name}/std"] = float(np.std(values))
    return figures


def _is_flat(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal. A group of one is not counted: it has no spread to measure."""
    return len(rewards) > 1 and max(rewards) - min(rewards) <= TOLERANCE
