from __future__ import annotations

import math
import sys
from types import ModuleType

import numpy as np
import pytest

from penstock.batch import advantage
from penstock.errors import ConfigError, RunFailed

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 3.0]
SIZES = [4, 2, 1]


def by_group(name: str) -> list[list[float]]:
    flat = advantage.compute(advantage.resolve(name), REWARDS, SIZES).tolist()
    return [flat[:4], flat[4:6], flat[6:]]


def test_grpo_is_in_units_of_the_group_deviation() -> None:
    first, equal, alone = by_group("grpo")
    high = 0.5 / (math.sqrt(1 / 3) + 1e-4)  # the sum of squares is 1, over n − 1 = 3
    assert first == pytest.approx([high, -high, -high, high])
    assert equal == [0, 0]
    assert alone == [0]


def test_grpo_takes_the_standard_deviation_of_a_sample() -> None:
    rng = np.random.default_rng(0)
    for size in (2, 3, 8, 64):
        rewards = rng.normal(size=size)
        wanted = (rewards - rewards.mean()) / (rewards.std(ddof=1) + advantage.STD_FLOOR)
        assert advantage.compute(advantage.grpo, rewards, [size]) == pytest.approx(wanted, rel=1e-6)


def test_dr_grpo_is_only_centred() -> None:
    assert by_group("dr_grpo") == [[0.5, -0.5, -0.5, 0.5], [0, 0], [0]]


def test_rloo_leaves_the_sample_itself_out() -> None:
    first, _, alone = by_group("rloo")
    assert first == pytest.approx([1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3])
    assert alone == [0]


def test_max_rl_weighs_rare_success_most_and_survives_total_failure() -> None:
    values = advantage.compute(advantage.max_rl, [1, 0, 0, 0, 0, 0, 0, 0], [4, 4])
    assert values.tolist() == [3, -1, -1, -1, 0, 0, 0, 0]


@pytest.mark.parametrize("name", list(advantage.NAMED))
def test_groups_do_not_touch_each_other(name: str) -> None:
    rng = np.random.default_rng(0)
    sizes = [1, 5, 2, 8, 3]
    rewards = rng.random(sum(sizes))
    whole = advantage.compute(advantage.resolve(name), rewards.tolist(), sizes)
    start = 0
    for size in sizes:
        part = advantage.compute(advantage.resolve(name), rewards[start : start + size].tolist(), [size])
        assert whole[start : start + size] == pytest.approx(part)
        start += size


@pytest.mark.parametrize("name", list(advantage.NAMED))
def test_an_empty_batch_has_no_advantages(name: str) -> None:
    assert advantage.compute(advantage.resolve(name), [], []).shape == (0,)


def test_a_function_by_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("plugged_in")
    module.twice = lambda rewards, group_sizes: rewards * 2  # type: ignore[attr-defined]
    module.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "plugged_in", module)
    assert advantage.compute(advantage.resolve("plugged_in:twice"), [1.5], [1]).tolist() == [3.0]
    with pytest.raises(ConfigError, match="expected a callable"):
        advantage.resolve("plugged_in:number")
    with pytest.raises(ConfigError, match="absent"):
        advantage.resolve("plugged_in:absent")


@pytest.mark.parametrize("path", ["gpro", "nowhere:f", ":f", "module:", "no.such.module:f"])
def test_an_unknown_name_says_what_is_possible(path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        advantage.resolve(path)


@pytest.mark.parametrize("bad", [[1.0], [1.0, math.nan], [math.inf, 0.0], [[1.0, 2.0]]])
def test_a_function_that_returns_rubbish_stops_the_run(bad: list[float]) -> None:
    with pytest.raises(RunFailed, match="one finite number per sample"):
        advantage.compute(lambda rewards, group_sizes: np.array(bad), [0.0, 1.0], [2])


def test_a_function_is_not_called_without_samples() -> None:
    """All payloads of a step can be missing."""

    def scaled(rewards: np.ndarray, group_sizes: np.ndarray) -> np.ndarray:
        return rewards / np.abs(rewards).max()

    assert advantage.compute(scaled, [], []).tolist() == []
    assert advantage.compute(scaled, [], []).dtype == np.float32
    assert advantage.compute(scaled, [2.0], [1]).tolist() == [1.0]


def test_a_function_that_raises_fails_the_run_by_name() -> None:
    def of_rewards_only(rewards: np.ndarray) -> np.ndarray:
        return rewards

    with pytest.raises(RunFailed, match="'of_rewards_only' raised TypeError"):
        advantage.compute(of_rewards_only, [0.0, 1.0], [2])  # type: ignore[arg-type]
