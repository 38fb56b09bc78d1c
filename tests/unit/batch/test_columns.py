"""The arrays of reward functions: one each, however they are called."""

from __future__ import annotations

import pytest

from penstock.batch.codec import decode, encode
from penstock.batch.columns import reward_part_arrays, reward_parts

LONG = "my_team.rewards.formatting:answer_is_in_the_right_"


@pytest.mark.parametrize("names", [("exact", "short"), (f"{LONG}place", f"{LONG}unit"), ("正确", "格式")])
def test_every_reward_function_has_its_own_array(names: tuple[str, str]) -> None:
    sample = decode(bytes(encode(reward_part_arrays(dict(zip(names, (1.0, 0.5), strict=True))))))
    assert list(reward_parts(sample).values()) == [1.0, 0.5]
