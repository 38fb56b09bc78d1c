"""The figures of a step's samples."""

import numpy as np
import pytest

from penstock.batch.columns import reward_part_arrays
from penstock.records.batch import BatchGroup
from penstock.records.ids import PromptIndex, SampleId, Version
from penstock.train.batch_metrics import facts_of, figures_of


def group(rewards: tuple[float, ...], lengths: tuple[int, ...]) -> BatchGroup:
    samples = tuple(SampleId(number) for number in range(len(rewards)))
    return BatchGroup(PromptIndex(0), 0, samples, rewards, (Version(0),) * len(rewards), lengths, ())


def test_lengths_truncation_spread_and_each_reward_function():
    samples = [
        reward_part_arrays({"exact": 1.0, "short": 0.5}),
        reward_part_arrays({"exact": 0.0, "short": None}) | {"truncated": np.ones(1, np.uint8)},
        reward_part_arrays({"exact": 0.0}),
        reward_part_arrays({"exact": 0.0}),
    ]
    found = figures_of([group((1.5, 0.0), (10, 30)), group((0.0, 0.0), (20, 20))], [facts_of(one) for one in samples])
    assert found["completion_length_mean"] == 20
    assert found["completion_length_max"] == 30
    assert found["truncated_share"] == 0.25
    assert found["groups_without_spread_share"] == 0.5
    assert found["tokens"] == 80
    assert found["reward/exact/mean"] == 0.25
    assert found["reward/exact/std"] == pytest.approx(np.std([1, 0, 0, 0]))
    assert found["reward/short/mean"] == 0.5
    assert found["reward_max"] == 1.5


def test_an_episode_that_a_time_limit_ended_is_cut_off():
    samples = [{"terminated": np.array([ended], np.uint8)} for ended in (1, 0, 0, 1)]
    assert figures_of([group((1.0,) * 4, (5,) * 4)], [facts_of(one) for one in samples])["truncated_share"] == 0.5


def test_samples_without_a_reward_count_in_no_mean():
    samples = [{}, {"unscored": np.ones(1, np.uint8)}]
    found = figures_of([group((1.0, 9.0), (1, 1))], [facts_of(one) for one in samples])
    assert found["reward_max"] == 1.0
    assert found["unscored_share"] == 0.5
    assert figures_of([], []) == {}
