"""Lines of metrics, as a live, crashed or older run writes them."""

from __future__ import annotations

from typing import Any

import orjson

from penstock.dashboard import metrics_fold
from penstock.dashboard.metrics_fold import Key, MetricsFold


def step(number: int, **more: Any) -> bytes:
    return orjson.dumps({"kind": "step", "at": 100.0 + number, "pipeline": "p", "step": number, "samples": 8} | more)


def evaluation(version: int, reward: float) -> bytes:
    line = {"kind": "evaluation", "at": 100.0 + version, "pipeline": "p", "due": version, "version": version}
    return orjson.dumps(line | {"eval/reward": reward})


def gauges(at: float, pipelines: dict[str, Any], processes: dict[str, Any] | None = None) -> bytes:
    return orjson.dumps({"kind": "gauges", "at": at, "pipelines": pipelines, "processes": processes or {}})


def values_of(fold: MetricsFold, of: str, name: str, owner: str = "p") -> list[float]:
    return fold.series[Key(of, owner, name)].points().mean.tolist()


def test_steps_and_gauges_become_series():
    fold = MetricsFold()
    fold.take([step(0, reward=0.5), gauges(100.5, {"p": {"phase": "running", "in_flight": 16}}), step(1, reward=0.75)])
    assert values_of(fold, "step", "reward") == [0.5, 0.75]
    assert values_of(fold, "step", "at") == [100.0, 101.0]
    assert values_of(fold, "gauge", "in_flight") == [16]
    assert fold.gauges["p"]["phase"] == "running"
    assert (fold.began_at, fold.latest_at) == (100.0, 101.0)


def test_unknown_metrics_appear_by_themselves():
    fold = MetricsFold()
    fold.take([orjson.dumps({"kind": "audit", "at": 5.0, "pipeline": "p", "step": 20, "doubt": 0.9})])
    assert values_of(fold, "step", "doubt") == [0.9]
    assert fold.steps == {}


def test_torn_and_foreign_lines_cost_themselves_only():
    fold = MetricsFold()
    torn = step(1)[:25]
    odd = [
        b"",
        b"null",
        b"[]",
        b'{"kind":"gauges"}',
        b'{"at":"x"}',
        b"\xff\xfe",
        b'{"kind":"gauges","at":1,"pipelines":3}',
    ]
    fold.take([step(0, reward=1.0), torn, *odd, step(2, reward=2.0)])
    assert values_of(fold, "step", "reward") == [1.0, 2.0]
    assert fold.unreadable == 1 + len(odd)


def test_a_step_without_a_reward_leaves_a_gap():
    fold = MetricsFold()
    fold.take([step(0, reward=None), step(1, reward=1.0)])
    assert fold.series[Key("step", "p", "reward")].points().x.tolist() == [1.0]


def test_a_rollback_replaces_what_is_trained_again():
    fold = MetricsFold()
    fold.take([step(number, reward=1.0) for number in range(10)])
    fold.take([step(number, reward=3.0) for number in (6, 7)])
    assert values_of(fold, "step", "reward") == [1.0] * 6 + [3.0] * 2
    assert fold.steps["p"]["step"] == 7
    assert [one.step for one in fold.pace["p"]] == [6, 7]


def test_an_evaluation_of_the_version_that_is_resumed_from_stays():
    """Version 10 is what step 10 starts from; steps from 10 on are trained again, in buckets of any width."""
    for stride in (1, 400):
        fold = MetricsFold()
        fold.take([step(number, reward=1.0) for number in range(15 * stride)])
        fold.take([evaluation(version * stride, version / 10) for version in (0, 5, 10, 14)])
        fold.take([step(10 * stride, reward=3.0)])
        points = fold.series[Key("step", "p", "eval/reward")].points()
        assert points.x.tolist() == [0.0, 5.0 * stride, 10.0 * stride]
        assert points.mean.tolist() == [0.0, 0.5, 1.0]
        reward = fold.series[Key("step", "p", "reward")].points()
        assert (reward.x.max(), reward.mean[-1]) == (10.0 * stride, 3.0)


def test_the_pace_is_that_since_the_last_start():
    fold = MetricsFold()
    fold.take([step(0), step(1), gauges(102.0, {}), gauges(900.0, {}), step(2, at=930.0), gauges(931.0, {})])
    assert [one.step for one in fold.pace["p"]] == [2]
    fold.take([gauges(931.0 + number, {}) for number in range(0, 60, 2)])  # a long step
    fold.take([step(3, at=990.0)])
    assert [one.step for one in fold.pace["p"]] == [2, 3]


def test_the_number_of_series_is_bounded(monkeypatch):
    monkeypatch.setattr(metrics_fold, "MOST_SERIES", 10)
    fold = MetricsFold()
    for number in range(8):  # restarted processes: each has series of its own
        fold.take([gauges(float(number), {}, {f"worker-{number}": {"a": 1, "b": 2, "c": 3}})])
    assert len(fold.series) <= 10
    assert Key("process", "worker-7", "c") in fold.series
    fold.take([step(0, **{f"metric_{number}": 1 for number in range(50)})])
    assert len(fold.series) <= 10
    assert fold.left_out > 0


def test_a_process_that_is_gone_is_remembered_as_gone():
    fold = MetricsFold()
    fold.take([gauges(1.0, {}, {"a": {"x": 1}, "b": {"x": 1}}), gauges(2.0, {}, {"b": {"x": 2}})])
    assert fold.processes == {"a": {"x": 1}, "b": {"x": 2}}
    assert fold.present == {"b"}
