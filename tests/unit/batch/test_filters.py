from __future__ import annotations

import sys
from types import ModuleType

import pytest

from penstock.batch.filters import build, zero_signal
from penstock.errors import ConfigError, RunFailed


def test_without_a_name_there_is_no_filter() -> None:
    assert build([]) is None


def test_zero_signal_drops_equal_rewards_only() -> None:
    assert zero_signal([0.25, 0.25, 0.25], [1, 2, 3]) == "zero signal: all 3 rewards are 0.25"
    assert zero_signal([0.25, 0.5], [1, 1]) is None
    assert zero_signal([1.0], [1]) is None


def test_filters_are_asked_in_order_and_the_first_reason_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    module = ModuleType("plugged_filter")

    def low_reward(rewards: list[float], lengths: list[int]) -> str | None:
        asked.append("low_reward")
        return "too low" if max(rewards) < 0.1 else None

    module.low_reward = low_reward  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "plugged_filter", module)
    decide = build(["zero_signal", "plugged_filter:low_reward"])
    assert decide is not None
    assert decide([0.0, 0.0], [20, 20]) == "zero signal: all 2 rewards are 0"
    assert asked == []
    assert decide([0.0, 0.05], [5, 20]) == "too low"
    assert decide([0.0, 0.5], [5, 20]) is None
    assert len(asked) == 2


@pytest.mark.parametrize(("name", "message"), [("zero", "did you mean 'zero_signal'"), ("nowhere:f", "nowhere")])
def test_an_unknown_filter_is_a_config_error(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build([name])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda rewards: None, "filter 'broken_filter:f' raised TypeError"),
        (lambda rewards, lengths: True, "filter 'broken_filter:f' must return .* True"),
    ],
)
def test_a_broken_filter_fails_the_run_by_name(monkeypatch: pytest.MonkeyPatch, broken: object, message: str) -> None:
    module = ModuleType("broken_filter")
    module.f = broken  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "broken_filter", module)
    decide = build(["broken_filter:f"])
    assert decide is not None
    with pytest.raises(RunFailed, match=message):
        decide([0.0], [1])
