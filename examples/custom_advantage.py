"""Your own advantage function and group filter.

Name them in the configuration, with this file's directory on the path:

    [run]
    extra_path = ["examples"]

    [[pipeline]]
    ...
    [pipeline.train]
    advantage = "custom_advantage:best_of_group"
    filters = ["custom_advantage:hopeless"]

Run this file to print their results for two groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock import advantages


def best_of_group(rewards: np.ndarray, group_sizes: np.ndarray) -> np.ndarray:
    """Only the best samples of each group are trained; all others have advantage 0.

    `rewards` are those of all samples, group after group. Returns one advantage per sample.
    """
    starts = np.cumsum(group_sizes) - group_sizes
    best = np.repeat(np.maximum.reduceat(rewards, starts), group_sizes)
    return np.where(rewards == best, advantages.dr_grpo(rewards, group_sizes), 0.0)


def hopeless(rewards: Sequence[float], lengths: Sequence[int]) -> str | None:
    """A group filter: returns the reason to drop a group, or None to keep it."""
    return "hopeless: no sample earned anything" if max(rewards) <= 0 else None


if __name__ == "__main__":
    groups = [[0.0, 0.5, 1.0, 0.5], [0.0, 0.0, 0.0, 0.0]]
    rewards = [reward for group in groups for reward in group]
    computed = advantages.compute(best_of_group, rewards, [len(group) for group in groups])
    for group, row in zip(groups, computed.reshape(2, 4).tolist(), strict=True):
        print(f"rewards {group}  advantages {row}  filter: {hopeless(group, [4] * 4) or 'keep'}")
