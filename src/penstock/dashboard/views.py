"""Data of the page's views, computed from the folds: plain values whose size does not depend on the run's length."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.dashboard.lanes_fold import LanesFold
from penstock.dashboard.log_lines import Warned
from penstock.dashboard.metrics_fold import Key, MetricsFold, Trained
from penstock.dashboard.ring_fold import STAGES, RingFold
from penstock.dashboard.series import Points, Series, rates
from penstock.dashboard.verdict import PipelineFacts

MOST_POINTS = 320
MOST_TROUBLES = 200
MOST_WARNINGS = 2000
MOST_STAYS = 1500
RECENT_S = 120.0
SMOOTHING_SHARE = 0.04
TIME_DIGITS = 13
"""Digits of seconds since the epoch, to the millisecond."""

SAMPLE_STATES = ("leased", "delivered", "buffered", "dispatched")
DROP_REASONS = ("outdated", "filtered", "failed", "lost", "returned")
LAG_FIGURES = ("p50_s", "p90_s", "p99_s", "max_s", "wait_p99_s", "worst_s")


@dataclass
class Folds:
    """All folds of one run."""

    metrics: MetricsFold = field(default_factory=MetricsFold)
    tail: MetricsFold | None = None
    """A fold of the last lines only, while earlier lines are still being read: shows the present state at once."""
    rings: dict[str, RingFold] = field(default_factory=dict)
    lanes: LanesFold = field(default_factory=LanesFold)
    warnings: deque[Warned] = field(default_factory=lambda: deque(maxlen=MOST_WARNINGS))

    @property
    def latest(self) -> MetricsFold:
        """The fold with the present state."""
        return self.tail if self.tail is not None else self.metrics


def curve(points: Points, *, spread: bool = False, digits: int = 5) -> dict[str, list[float]]:
    """Columns for a chart."""
    columns = {"x": _plain(points.x, TIME_DIGITS), "y": _plain(points.mean, digits)}
    return columns | {"low": _plain(points.low), "high": _plain(points.high)} if spread else columns


def drawn(series: Series | None, *, spread: bool = False) -> dict[str, list[float]]:
    """The curve of a series; empty if the series is None."""
    return curve(series.points(MOST_POINTS) if series is not None else Series().points(), spread=spread)


def smoothed(points: Points) -> Points:
    """A running mean over a small share of the curve; its window shrinks towards the ends."""
    reach = 1 + int(len(points.x) * SMOOTHING_SHARE)
    sums = np.concatenate([[0.0], np.cumsum(points.mean)])
    index = np.arange(len(points.x))
    reaches = np.minimum(reach, np.minimum(index, index[::-1]))
    mean = (sums[index + reaches + 1] - sums[index - reaches]) / (2 * reaches + 1)
    return points._replace(mean=mean)


def overview(folds: Folds, facts: Iterable[PipelineFacts]) -> dict[str, Any]:
    return {"pipelines": [_pipeline(folds, one) for one in facts]}


def _pipeline(folds: Folds, facts: PipelineFacts) -> dict[str, Any]:
    name, latest = facts.name, folds.latest
    gauges, last = latest.gauges.get(name, {}), latest.steps.get(name)
    step = latest.trained().get(name, 0)
    pace = Pace.of(latest.pace.get(name, ()))
    steps = facts.steps or None
    return {
        "name": name,
        "phase": gauges.get("phase", ""),
        "step": step,
        "steps": steps,
        "eta_s": (steps - step) / pace.steps_per_s if steps and pace.steps_per_s else None,
        "figures": {
            "reward": last.get("reward") if last is not None else None,
            "samples_per_s": pace.samples_per_s,
            "step_s": 1 / pace.steps_per_s if pace.steps_per_s else None,
            "in_flight": gauges.get("in_flight"),
            "staleness": last.get("staleness_mean") if last is not None else None,
            "max_staleness": facts.max_staleness,
            "version": gauges.get("version", step if last is not None else None),
            "workers_alive": gauges.get("workers_alive"),
            "workers": facts.workers,
        },
        "waits": pace.slower_side(_mean_since(folds, name, "throttled")),
        "reward": reward(folds, name),
        "samples_per_s": curve(rates(_points(folds, "gauge", name, "samples_trained"))),
        "in_flight": _drawn(folds, "gauge", name, "in_flight"),
        "workers_alive": _drawn(folds, "gauge", name, "workers_alive"),
        "staleness": _drawn(folds, "step", name, "staleness_mean"),
        "length": drawn(folds.rings[name].lengths if name in folds.rings else None),
        "step_s": curve(rates(_points(folds, "step", name, "at"))),
        "others": others(folds, name),
    }


def others(folds: Folds, name: str) -> list[str]:
    """The step metrics of a pipeline except its reward."""
    return [one for one in folds.metrics.names("step", name) if one not in ("at", "reward")]


def compared(folds: Folds, name: str, metric: str) -> dict[str, Any]:
    """One metric by step, smoothed, and the time of each step."""
    points = _points(folds, "step", name, metric)
    return {"smooth": curve(smoothed(points)), "at": curve(_points(folds, "step", name, "at"), digits=TIME_DIGITS)}


def reward(folds: Folds, name: str) -> dict[str, Any]:
    """The reward by step: each step (or the mean of some), smoothed, the spread within batches, and evaluations."""
    points = _points(folds, "step", name, "reward")
    ring = folds.rings.get(name)
    evaluations = [
        one for one in folds.metrics.names("step", name) if one.startswith("eval/") and one.endswith("reward")
    ]
    return {
        "steps": curve(points),
        "smooth": curve(smoothed(points)),
        "low": drawn(ring.rewards["low"] if ring else None),
        "high": drawn(ring.rewards["high"] if ring else None),
        "evaluations": {
            one: _drawn(folds, "step", name, one) | {"error": _drawn(folds, "step", name, f"{one}_stderr")["y"]}
            for one in evaluations
        },
        "at": curve(_points(folds, "step", name, "at"), digits=TIME_DIGITS),
    }


@dataclass(frozen=True)
class Pace:
    """Rate of the last steps, and the trainer's use of time."""

    steps_per_s: float = 0.0
    samples_per_s: float | None = None
    busy: float | None = None
    """The share of time in which the trainer computed."""
    turn: float = 0.0
    """The share in which it waited for its devices."""

    @classmethod
    def of(cls, steps: Iterable[Trained]) -> Pace:
        steps = list(steps)
        if len(steps) < 2 or steps[-1].at <= steps[0].at:
            return cls()
        seconds = steps[-1].at - steps[0].at
        later = steps[1:]
        timed = [step.step_s for step in later if step.step_s is not None]
        return cls(
            steps_per_s=(steps[-1].step - steps[0].step) / seconds,
            samples_per_s=sum(step.samples for step in later) / seconds,
            busy=min(1.0, sum(timed) / seconds) if timed else None,
            turn=min(1.0, sum(step.turn_s for step in later) / seconds),
        )

    def slower_side(self, throttled: float | None) -> str:
        """A sentence that names the slower side, trainer or workers."""
        if self.busy is None:
            return ""
        idle = max(0.0, 1.0 - self.busy - self.turn)
        if self.turn > 0.25 and self.turn > idle:
            return f"The trainer waits for its devices {self.turn:.0%} of the time."
        if throttled is not None and throttled > 0.4 and idle < 0.4:
            return f"The trainer is the slower side: workers are throttled {throttled:.0%} of the time."
        if idle > 0.3:
            return f"The workers are the slower side: the trainer waits for samples {idle:.0%} of the time."
        return f"Balanced: the trainer computes {self.busy:.0%} of the time."


def flow(folds: Folds, name: str) -> dict[str, Any]:
    """States of samples, their final states, and the duration of each stage."""
    ring = folds.rings.get(name)
    latest = folds.latest.gauges.get(name, {})
    since = (folds.metrics.latest_at or 0.0) - RECENT_S
    stages = [
        {
            "key": key,
            "label": label,
            "recent_s": _figure(series.mean_since(since)),
            "run_s": _figure(series.mean_since()),
        }
        for key, label in STAGES.items()
        if ring is not None and (series := ring.stages[key]).mean_since() is not None
    ]
    drops = [reason for reason in DROP_REASONS if latest.get(f"dropped_{reason}")]
    return {
        "stages": stages,
        "stage_curves": {key: drawn(ring.stages[key]) for key in ("generate", "group", "buffer", "train")}
        if ring
        else {},
        "states": {state: _drawn(folds, "gauge", name, f"samples_{state}") for state in SAMPLE_STATES},
        "throttled": _drawn(folds, "gauge", name, "throttled"),
        "trained_per_s": curve(rates(_points(folds, "gauge", name, "samples_trained"))),
        "dropped_per_s": {one: curve(rates(_points(folds, "gauge", name, f"dropped_{one}"))) for one in drops},
        "ended": {"trained": latest.get("samples_trained", 0)} | {one: latest[f"dropped_{one}"] for one in drops},
        "trainer": {one: _drawn(folds, "step", name, one) for one in ("step_s", "wait_s", "fetch_s", "turn_s")},
        "throttle_engagements": latest.get("throttle_engagements"),
    }


def weights(folds: Folds, facts: PipelineFacts) -> dict[str, Any]:
    name, ring = facts.name, folds.rings.get(facts.name)
    counted = sorted(ring.staleness.items()) if ring else []
    latest = folds.latest.gauges.get(name, {})
    workers = [owner for owner in folds.metrics.processes if owner.startswith(f"{name}/")]
    return {
        "staleness": {"x": [age for age, _ in counted], "y": [count for _, count in counted]},
        "max_staleness": facts.max_staleness,
        "staleness_mean": _drawn(folds, "step", name, "staleness_mean", spread=True),
        "staleness_max": _drawn(folds, "step", name, "staleness_max", spread=True),
        "versions": [
            {"version": version, "at": at, "size_bytes": size}
            for version, at, size in list(ring.versions)[-MOST_POINTS:]
        ]
        if ring
        else [],
        "pauses": {one: _drawn(folds, "process", one, "weights_last_pause_s", spread=True) for one in workers},
        "updates": {one: _drawn(folds, "process", one, "weights_last_update_s", spread=True) for one in workers},
        "totals": {key: value for key, value in latest.items() if key.startswith("weights_")},
        "reach_s": _figure(ring.stages["reach"].mean_since()) if ring else None,
        "publish_s": _figure(ring.stages["publish"].mean_since()) if ring else None,
    }


def loops(folds: Folds) -> dict[str, Any]:
    processes = []
    for name, values in folds.metrics.processes.items():
        figures = {one: values.get(f"loop_lag_{one}") for one in LAG_FIGURES}
        if figures["p99_s"] is not None:
            lag = _drawn(folds, "process", name, "loop_lag_p99_s", spread=True)
            processes.append({"name": name, **figures, "p99": lag})
    blocked = [warning for warning in folds.warnings if warning.kind == "blocked"]
    return {"processes": processes, "blocked": [one._asdict() for one in newest(blocked)]}


def pool(folds: Folds, now: float) -> dict[str, Any]:
    """The lanes, the latest stays last. A present stay ends `now`."""
    lanes = folds.lanes
    busy: dict[int, dict[str, float]] = {device: dict(uses) for device, uses in lanes.busy_s.items()}
    for stay in lanes.present.values():
        uses = busy.setdefault(stay.device, {})
        uses[stay.doing] = uses.get(stay.doing, 0.0) + max(0.0, now - stay.since)
    stays = [*lanes.past, *lanes.present.values()][-MOST_STAYS:]
    return {
        "began_at": lanes.began_at,
        "now": now,
        "devices": sorted(busy),
        "stays": [tuple(stay._replace(until=stay.until or now)) for stay in stays],
        "busy_s": {
            str(device): {doing: _figure(spent) for doing, spent in uses.items()} for device, uses in busy.items()
        },
        "moves": [move._asdict() for move in reversed(lanes.moves)],
        "undecided": bool(lanes.events) and not stays,
    }


def troubles(folds: Folds, failure_reports: Mapping[str, str]) -> dict[str, Any]:
    remarks = [remark for ring in folds.rings.values() for remark in ring.remarks]
    return {
        "failure_reports": dict(failure_reports),
        "remarks": [one._asdict() for one in newest(remarks)],
        "warnings": [one._asdict() for one in newest(one for one in folds.warnings if one.kind != "blocked")],
    }


def newest(ones: Iterable[Any]) -> list[Any]:
    """The latest first, at most `MOST_TROUBLES`."""
    return sorted(ones, key=lambda one: one.at, reverse=True)[:MOST_TROUBLES]


def step_metric(folds: Folds, name: str, metric: str) -> dict[str, Any]:
    """One metric by step."""
    return _drawn(folds, "step", name, metric, spread=True)


def _points(folds: Folds, of: str, owner: str, name: str) -> Points:
    return (folds.metrics.series.get(Key(of, owner, name)) or Series()).points(MOST_POINTS)


def _drawn(folds: Folds, of: str, owner: str, name: str, *, spread: bool = False) -> dict[str, list[float]]:
    return drawn(folds.metrics.series.get(Key(of, owner, name)), spread=spread)


def _mean_since(folds: Folds, name: str, gauge: str) -> float | None:
    series = folds.latest.series.get(Key("gauge", name, gauge))
    return None if series is None else series.mean_since((folds.latest.latest_at or 0.0) - RECENT_S)


def _plain(values: np.ndarray, digits: int = 5) -> list[float]:
    """Rounded to what a chart can show: a fifth of the bytes of full precision."""
    return [float(f"{value:.{digits}g}") for value in values.tolist()]


def _figure(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
