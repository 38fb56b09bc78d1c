from __future__ import annotations

import numpy as np
import pytest

from penstock.batch import advantage
from penstock.batch.columns import truncated
from penstock.batch.truncation import longest_turn, masked, overlong


def sample(cut: int | None) -> dict[str, np.ndarray]:
    arrays = {"token_ids": np.arange(4, dtype=np.int32), "loss_mask": np.array([0, 1, 1, 1], np.uint8)}
    return arrays if cut is None else arrays | {"truncated": np.array([cut], np.uint8)}


def test_truncated_samples_are_known_and_can_be_left_out() -> None:
    samples = [sample(None), sample(0), sample(1)]
    cut = np.array([truncated(one) for one in samples])
    assert cut.tolist() == [False, False, True]
    assert [int(s["loss_mask"].sum()) for s in masked(samples, cut)] == [3, 3, 0]
    assert samples[2]["loss_mask"].sum() == 3


def test_rewards_fall_over_the_last_tokens() -> None:
    cut = np.array([False, False, False, True])
    found = overlong([60, 80, 95, 100], cut, limit=100, tokens=20, penalty=0.5)
    assert found.tolist() == pytest.approx([0, 0, 0.375, 0.5])
    assert not overlong([60, 80, 95, 100], cut, limit=100, tokens=0, penalty=1.0).any()


def conversation(*turns: int, branches: list[list[int]] | None = None) -> dict[str, np.ndarray]:
    """A prompt of 3 tokens, and replies of 2 between turns of these lengths; without replies if there are branches."""
    between = [] if branches else [0, 0]
    mask = [0, 0, 0] + [one for turn in turns for one in [*[1] * turn, *between]]
    arrays = {"token_ids": np.zeros(len(mask), np.int32), "loss_mask": np.array(mask, np.uint8)}
    return arrays | ({"branches": np.array(branches, np.int32)} if branches else {})


@pytest.mark.parametrize(
    ("sample", "longest"),
    [
        (conversation(7), 7),
        (conversation(4, 9, 2), 9),
        (conversation(4, 9, branches=[[0, 0, 7], [1, 0, 3], [1, 7, 16]]), 9),
        (conversation(), 0),
        ({"observations": np.zeros((5, 2))}, 0),
        ({"token_ids": np.zeros(0, np.int32), "loss_mask": np.zeros(0, np.uint8)}, 0),
        (conversation(4, branches=[[0, -5, 900]]), 4),
    ],
)
def test_the_longest_turn_is_that_of_one_completion(sample: dict[str, np.ndarray], longest: int) -> None:
    assert longest_turn(sample) == longest


def test_an_advantage_is_told_what_it_asks_for() -> None:
    def shaped(rewards: np.ndarray, group_sizes: np.ndarray, lengths: np.ndarray, truncated: np.ndarray) -> np.ndarray:
        assert group_sizes.tolist() == [2]
        return rewards - lengths - truncated

    cut = np.array([True, False])
    assert advantage.compute(shaped, [5.0, 5.0], [2], [1, 2], cut).tolist() == [3.0, 3.0]
    assert advantage.compute(advantage.grpo, [1.0, 0.0], [2], [1, 2], cut).tolist() == pytest.approx(
        [0.7071, -0.7071], rel=1e-3
    )
