from __future__ import annotations

import sys
from types import ModuleType

import pytest

from penstock.batch.filters import FilterSettings, build, length, zero_signal
from penstock.errors import ConfigError


def test_the_default_keeps_everything() -> None:
    keep = build(FilterSettings())
    assert keep([1.0, 1.0], [3, 4]) is None
    assert keep([], []) is None


def test_zero_signal_drops_equal_rewards_only() -> None:
    decide = zero_signal()
    assert decide([0.25, 0.25, 0.25], [1, 2, 3]) == "zero signal: all 3 rewards are 0.25"
    assert decide([0.25, 0.5], [1, 1]) is None
    assert decide([1.0], [1]) is None


def test_length_drops_only_groups_without_a_single_fit() -> None:
    decide = length(2, 4)
    assert decide([0, 0], [1, 9]) is not None
    assert decide([0, 0], [1, 4]) is None
    assert length(None, 4)([0], [5]) is not None
    assert length(2, None)([0], [10**9]) is None
    with pytest.raises(ConfigError):
        length(5, 4)


def test_filters_are_asked_in_order_and_the_first_reason_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    module = ModuleType("plugged_filter")

    def low_reward(rewards: list[float], lengths: list[int]) -> str | None:
        asked.append("low_reward")
        return "too low" if max(rewards) < 0.1 else None

    module.low_reward = low_reward  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "plugged_filter", module)
    decide = build(FilterSettings(zero_signal=True, max_length=10, custom=("plugged_filter:low_reward",)))
    assert decide([0.0, 0.0], [20, 20]) == "zero signal: all 2 rewards are 0"
    assert str(decide([0.0, 0.05], [20, 20])).startswith("length")
    assert asked == []
    assert decide([0.0, 0.05], [5, 20]) == "too low"
    assert decide([0.0, 0.5], [5, 20]) is None
    assert len(asked) == 2


def test_an_unknown_custom_filter_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        build(FilterSettings(custom=("nowhere:f",)))
