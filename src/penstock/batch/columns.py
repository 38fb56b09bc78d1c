"""Small arrays in the payload of a sample beside the tokens.

| array            | type       | meaning                                                                        |
|------------------|------------|--------------------------------------------------------------------------------|
| `truncated`      | uint8[1]   | 1: the last completion was cut off (token limit, context)                      |
| `unscored`       | uint8[1]   | 1: it has no reward of its own; no advantage, not trained                      |
| `reward_parts.F` | float32[1] | value of the reward function F before its weight; absent where it was `None`   |
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xxhash

from penstock.batch.codec import MAX_NAME_BYTES

TRUNCATED = "truncated"
UNSCORED = "unscored"
REWARD_PART = "reward_parts."


def truncated(sample: Mapping[str, np.ndarray]) -> bool:
    """Whether the sample's last completion was cut off; of an episode, whether a time limit ended it."""
    if "terminated" in sample:
        return not sample["terminated"][0]
    return bool(TRUNCATED in sample and sample[TRUNCATED][0])


def unscored(sample: Mapping[str, np.ndarray]) -> bool:
    """Whether the sample has no reward of its own: the reward in its record is the mean of its group."""
    return bool(UNSCORED in sample and sample[UNSCORED][0])


def reward_parts(sample: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The value of each reward function for the sample, by the function's name; `None` values are left out."""
    return {
        name.removeprefix(REWARD_PART): float(values[0])
        for name, values in sample.items()
        if name.startswith(REWARD_PART)
    }


def reward_part_arrays(parts: Mapping[str, float | None]) -> dict[str, np.ndarray]:
    """The arrays that `reward_parts` reads."""
    return {
        array_name(function): np.array([value], np.float32) for function, value in parts.items() if value is not None
    }


def array_name(function: str) -> str:
    """The name of one reward function's array: ASCII, at most `MAX_NAME_BYTES`. A changed one ends in a digest."""
    name = REWARD_PART + function
    if name.isascii() and len(name) <= MAX_NAME_BYTES:
        return name
    digest = xxhash.xxh32(function.encode()).hexdigest()
    return f"{name.encode('ascii', 'replace').decode()[: MAX_NAME_BYTES - len(digest) - 1]}-{digest}"
