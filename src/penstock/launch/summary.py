"""The summary at the end of a run: its main figures, and a plot of the reward curves."""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.control.io.metric_lines import Lengths
from penstock.launch.view import figure as shown
from penstock.launch.view import shortened
from penstock.runtime.beneath import open_beneath
from penstock.runtime.metrics import PAUSE_S
from penstock.runtime.rundir import RunDir
from penstock.runtime.terminal import escape_controls

SMOOTHING_STEPS = 10
PLOT_COLUMNS = 3
LOOPS_SHOWN = 3
PARTS = ("step_s", "turn_s")
"""Parts of a step that the trainer runs in sequence; it fetches batches and publishes weights concurrently."""
REWARD_WINDOW = 10
"""Steps over which first and final rewards are averaged: single steps are noisy."""
TYPES: dict[str, type | UnionType] = {
    **dict.fromkeys(("kind", "pipeline"), str),
    **dict.fromkeys(("step", "version", "staleness_max", "samples", "dropped"), int),
    **dict.fromkeys(("completion_length_mean", "dropped_length_mean"), float | int),
    **dict.fromkeys(("at", "reward", "staleness_mean", "eval/reward", "eval/reward_stderr", *PARTS), float | int),
}
"""Types of the fields of `metrics.jsonl` that are read by name; each may be missing or null."""


@dataclass(slots=True)
class Curve:
    """The figures of each trained step. A step that was retrained after a rollback replaces its first attempt."""

    rewards: dict[int, float] = field(default_factory=dict)
    staleness_mean: dict[int, float] = field(default_factory=dict)
    staleness_max: dict[int, int] = field(default_factory=dict)
    evaluations: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By version: the mean reward and its standard error."""
    first_at: float | None = None
    latest: tuple[int, float] | None = None
    """The latest step since the run was started or resumed, and when it was completed."""
    whole_s: float = 0.0
    """Time between consecutive steps, without the time in which the run was interrupted."""
    lengths: dict[int, Lengths] = field(default_factory=dict)
    parts_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """How much of it the parts of the steps took."""

    def took(self, step: int, entry: dict[str, Any]) -> None:
        """Adds the time since the previous step; none if the steps between them are trained again."""
        at = entry["at"]
        self.first_at = at if self.first_at is None else self.first_at
        if self.latest is not None and step == self.latest[0] + 1:
            self.whole_s += at - self.latest[1]
            for part in PARTS:
                self.parts_s[part] += entry.get(part) or 0.0
        self.latest = step, at

    def shares(self, throttled_s: float) -> str:
        """How the time from the first step to the last was spent, as shares; empty for a run of one step."""
        if self.whole_s <= 0:
            return ""
        trained, devices = (self.parts_s[part] / self.whole_s for part in PARTS)
        waited = f"waited for samples {max(0.0, 1 - trained - devices):.0%}"
        waited += f" and for devices {devices:.0%}" if devices >= 0.005 else ""
        leases = f"the staleness bound held leases back {min(1.0, throttled_s / self.whole_s):.0%}"
        return f"the trainer trained {min(1.0, trained):.0%} of the time and {waited}; {leases}"

    def points(self) -> list[tuple[int, float]]:
        return sorted(self.rewards.items())

    def first(self) -> float | None:
        return _mean([reward for _, reward in self.points()[:REWARD_WINDOW]])

    def final(self) -> float | None:
        return _mean([reward for _, reward in self.points()[-REWARD_WINDOW:]])

    def evaluated(self) -> str:
        """The rewards of the first and the last evaluated version."""
        versions = sorted(self.evaluations)
        if not versions:
            return "-"
        (first, _), (last, error) = self.evaluations[versions[0]], self.evaluations[versions[-1]]
        return f"{_figure(first)} → {_figure(last)} ± {error:.2g}"


def read_entries(metrics: Path) -> Iterator[dict[str, Any]]:
    """The lines of `metrics.jsonl`, without torn ones and those with a field that is not of its type."""
    if not metrics.exists():
        return
    with open_beneath(metrics.parent, metrics) as lines:
        for line in lines:
            try:
                entry = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(entry, dict) and all(isinstance(entry.get(key), kind | None) for key, kind in TYPES.items()):
                yield entry


def read_curves(metrics: Path) -> dict[str, Curve]:
    """Reward curves by pipeline from `metrics.jsonl`; a torn last line is skipped."""
    curves: dict[str, Curve] = defaultdict(Curve)
    latest_at = math.inf
    for entry in read_entries(metrics):
        at = entry.get("at", latest_at)
        if at - latest_at > PAUSE_S:
            for curve in curves.values():
                curve.latest = None
        latest_at = at
        if entry.get("kind") == "step" and entry.get("reward") is not None:  # null: it was not finite
            curve = curves[entry["pipeline"]]
            curve.rewards[entry["step"]] = entry["reward"]
            curve.staleness_mean[entry["step"]] = entry["staleness_mean"]
            curve.staleness_max[entry["step"]] = entry["staleness_max"]
            if "at" in entry:
                curve.took(entry["step"], entry)
            if (length := entry.get("completion_length_mean")) is not None:
                trained, dropped = entry.get("samples") or 0, entry.get("dropped") or 0
                late = dropped * (entry.get("dropped_length_mean") or 0.0)
                curve.lengths[entry["step"]] = Lengths(trained, trained * length, dropped, late)
        elif entry.get("kind") == "evaluation" and entry.get("eval/reward") is not None:
            point = (entry["eval/reward"], entry.get("eval/reward_stderr") or 0.0)
            curves[entry["pipeline"]].evaluations[entry["version"]] = point
    return curves


def plot(run: RunDir) -> Path | None:
    """Writes the reward curves as PNG and SVG; None when nothing was trained."""
    curves = {name: curve for name, curve in read_curves(run.metrics_path).items() if curve.rewards}
    if not curves:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(len(curves), PLOT_COLUMNS)
    rows = -(-len(curves) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5.2 * columns, 3.6 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(curves) :]:
        axis.remove()
    legend: dict[str, Any] = {}
    for axis, (name, curve) in zip(axes.flat, sorted(curves.items()), strict=False):
        steps, rewards = zip(*curve.points(), strict=True)
        alone = "o" if len(steps) == 1 else None  # one point makes no line
        axis.plot(steps, rewards, color="#9ecae1", linewidth=1, marker=alone, label="per step")
        axis.plot(steps, list(_smooth(rewards)), color="#08519c", linewidth=2, label=f"mean of last {SMOOTHING_STEPS}")
        if curve.evaluations:
            versions, points = zip(*sorted(curve.evaluations.items()), strict=True)
            means, errors = zip(*points, strict=True)
            axis.errorbar(versions, means, errors, color="#d94801", fmt="o", markersize=4, label="evaluation")
        axis.set_title(shortened(name))
        axis.set_xlabel("optimiser step")
        axis.set_ylabel("mean reward")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        handles, labels = axis.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=len(legend), frameon=False)
    path = run.plots / "rewards.png"
    for kind in ("png", "svg"):
        drawn = io.BytesIO()
        figure.savefig(drawn, format=kind, dpi=130)
        run.write(path.with_suffix(f".{kind}"), drawn.getvalue())
    plt.close(figure)
    return path


def print_summary(
    console: Console,
    run: RunDir,
    status: dict[str, Any],
    *,
    wall_s: float,
    ended: str,
    busy: Callable[[float], dict[int, float]] = lambda since: {},
) -> None:
    """Prints the summary. `busy(since)` returns the mean utilization of each GPU since that time."""
    curves = read_curves(run.metrics_path)
    picture = plot(run)
    columns = ["pipeline", "steps", "reward\nfirst → final", "samples\ntrained", "dropped", "staleness\nmean / max"]
    evaluates = any(curve.evaluations for curve in curves.values())
    if evaluates:
        columns.insert(3, "eval\nfirst → last")
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name, one in status.get("pipelines", {}).items():
        curve = curves.get(name, Curve())
        drops = {key.removeprefix("dropped_"): count for key, count in one.items() if key.startswith("dropped_")}
        dropped = ", ".join(f"{reason} {count}" for reason, count in drops.items() if count) or "none"
        table.add_row(
            Text(escape_controls(name)),
            f"{one['step']}/{one['steps']}",
            f"{_figure(curve.first())} → {_figure(curve.final())}",
            *([curve.evaluated()] if evaluates else []),
            f"{one['samples_trained']:,}",
            dropped,
            f"{_figure(_mean(list(curve.staleness_mean.values())))} / {max(curve.staleness_max.values(), default=0)}",
        )
    title = escape_controls(f"{run.root.name}: {ended} after {wall_s:.0f} s")
    console.print(title, highlight=False, markup=False, style="bold")
    if table.row_count:  # empty if the run was interrupted during its start
        console.print(table)
    several = len(status.get("pipelines", {})) > 1
    for name, one in status.get("pipelines", {}).items():
        if shares := curves.get(name, Curve()).shares(one.get("throttled_s", 0.0)):
            console.print(f"{name}: {shares}" if several else shares, highlight=False, markup=False, soft_wrap=True)
        if bias := sum(curves.get(name, Curve()).lengths.values(), Lengths()).bias():
            console.print(f"{name}: {bias}" if several else bias, highlight=False, markup=False, soft_wrap=True)
    first = min((curve.first_at for curve in curves.values() if curve.first_at is not None), default=0.0)
    if gpus := ", ".join(f"GPU {gpu} {share:.0%}" for gpu, share in busy(first).items()):
        console.print(f"busy since the first step: {gpus}", highlight=False)
    lag = status.get("lag")
    if lag:
        console.print(
            f"controller loop lag: p99 {lag['p99_s'] * 1e3:.1f} ms, worst of the run {lag['worst_s'] * 1e3:.0f} ms",
            highlight=False,
        )
        worst = {name: values["loop_lag_worst_s"] for name, values in status.get("loops", {}).items()}
        latest = sorted(worst.items(), key=lambda entry: -entry[1])[:LOOPS_SHOWN]
        others = ", ".join(f"{name.rpartition('/')[2]} {late_s * 1e3:.0f} ms" for name, late_s in latest)
        if others:
            console.print(f"worst of the other loops: {others}", highlight=False, soft_wrap=True)
    if picture is not None:
        console.print(escape_controls(f"reward curves: {picture}"), highlight=False, markup=False, soft_wrap=True)
    console.print(escape_controls(f"run directory: {run.root}"), highlight=False, markup=False, soft_wrap=True)


def _smooth(values: Iterable[float]) -> Iterable[float]:
    window: list[float] = []
    for value in values:
        window = [*window, value][-SMOOTHING_STEPS:]
        yield sum(window) / len(window)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _figure(value: float | None) -> str:
    return "-" if value is None else shown(value)
