"""Computes advantages from scalar rewards, for a whole batch at once.

An advantage function takes the rewards of all samples, group after group, and the size of each group; it returns one
advantage per sample. It is named in the configuration, either one of `NAMED` or `package.module:function`:

    def centred(rewards: np.ndarray, group_sizes: np.ndarray) -> np.ndarray:
        return rewards - np.repeat(group_means(rewards, group_sizes), group_sizes)

A function with a parameter `lengths` also receives the generated tokens (or environment steps) of each sample; one with
a parameter `truncated`, whether each was cut off at the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.errors import RunFailed
from penstock.runtime.named import described, load_callable, takes

Advantage = Callable[..., np.ndarray]
"""`(rewards float64[samples], group_sizes int64[groups], lengths=int64[samples], truncated=bool[samples])`; the last
two only if the function has these parameters."""

OPTIONAL_ARGUMENTS = ("lengths", "truncated")
"""Arguments that a function receives if it has a parameter of this name."""

STD_FLOOR = 1e-4
"""Added to a group's standard deviation: rewards that differ by rounding only must not become large advantages."""


def group_means(values: np.ndarray, group_sizes: np.ndarray) -> np.ndarray:
    """The mean of each group's values."""
    starts = np.cumsum(group_sizes) - group_sizes
    return np.add.reduceat(values, starts) / group_sizes if len(group_sizes) else np.zeros(0)


def grpo(rewards: np.ndarray, group_sizes: np.ndarray) -> np.ndarray:
    """Distance from the group's mean, in units of the group's standard deviation over n − 1; zero in a group of one."""
    centred = dr_grpo(rewards, group_sizes)
    std = np.sqrt(group_means(centred**2, group_sizes) * group_sizes / np.maximum(group_sizes - 1, 1))
    return centred / np.repeat(std + STD_FLOOR, group_sizes)


def dr_grpo(rewards: np.ndarray, group_sizes: np.ndarray) -> np.ndarray:
    """Distance from the group's mean. Not scaled, so that easy and hard prompts are not weighted up."""
    return rewards - np.repeat(group_means(rewards, group_sizes), group_sizes)


def rloo(rewards: np.ndarray, group_sizes: np.ndarray) -> np.ndarray:
    """Distance from the mean of the *other* members of the group; zero in a group of one."""
    scale = group_sizes / np.maximum(group_sizes - 1, 1)
    return dr_grpo(rewards, group_sizes) * np.repeat(scale, group_sizes)


def max_rl(rewards: np.ndarray, group_sizes: np.ndarray) -> np.ndarray:
    """Distance from the group's mean, in units of that mean: rare successes count most. For rewards of 0 and above."""
    means = group_means(rewards, group_sizes)
    scale = np.divide(1.0, means, out=np.zeros_like(means), where=means > 0)
    return dr_grpo(rewards, group_sizes) * np.repeat(scale, group_sizes)


NAMED: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "max_rl": max_rl}


def resolve(name: str) -> Advantage:
    """The function called `name` in `NAMED`, or at the import path `package.module:function`."""
    return NAMED[name] if name in NAMED else load_callable("advantage", name, NAMED)


def compute(
    advantage: Advantage,
    rewards: Sequence[float] | np.ndarray,
    group_sizes: Sequence[int],
    lengths: Sequence[int] = (),
    truncated: np.ndarray | None = None,
) -> np.ndarray:
    """float32[samples]. RunFailed if the function raised, or returned values that cannot be trained on. Without
    samples, the function is not called."""
    rewards_array = np.asarray(rewards, np.float64)
    if not len(rewards_array):
        return np.zeros(0, np.float32)
    cut = np.zeros(len(rewards_array), bool) if truncated is None else truncated
    available = dict(zip(OPTIONAL_ARGUMENTS, (np.asarray(lengths, np.int64), cut), strict=True))
    sizes_array = np.asarray(group_sizes, np.int64)
    function = f"the advantage function {getattr(advantage, '__name__', advantage)!r}"
    try:
        arguments = {name: values for name, values in available.items() if takes(advantage, name)}
        result = np.asarray(advantage(rewards_array, sizes_array, **arguments), np.float64)
    except Exception as error:
        raise RunFailed(f"{function} raised {described(error)}") from error
    if result.shape != rewards_array.shape or not np.isfinite(result).all():
        raise RunFailed(
            f"{function} must return one finite number per sample, {rewards_array.shape[0]} of them; it returned shape "
            f"{result.shape} with {int(np.count_nonzero(~np.isfinite(result)))} not finite"
        )
    return result.astype(np.float32)
