"""The display of a live run: a rich view in a terminal, plain lines in a pipe."""

from __future__ import annotations

import logging
import math
import time
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from penstock.launch import pool_view
from penstock.runtime.terminal import escape_controls

log = logging.getLogger(__name__)

PLAIN_EVERY_S = 5.0
NOTES_SHOWN = 4
NAME_COLUMNS = 24
CURVE_COLUMNS = 60
STAGES = ("lease", "prepare", "queue", "generate", "score", "deliver", "wait", "fetch", "turn", "step", "publish")
SPARKS = "▁▂▃▄▅▆▇█"


class Pace:
    """Steps and samples per second over the last half minute, or two steps, and the estimated time to the end."""

    def __init__(self, window_s: float = 30.0) -> None:
        self._window_s = window_s
        self._now = 0.0
        self._seen: list[tuple[float, int, int]] = []
        """When each step was first seen."""

    def observe(self, now: float, step: int, samples: int) -> None:
        self._now = now
        if len(self._seen) == 1 and step == self._seen[0][1]:
            self._seen.clear()  # the time before the first step is the start-up and does not count
        if not self._seen or step != self._seen[-1][1]:
            self._seen.append((now, step, samples))
        while len(self._seen) > 3 and self._seen[0][0] < now - self._window_s:
            self._seen.pop(0)

    def _rate(self, column: int) -> float:
        if len(self._seen) < 2:
            return 0.0
        return (self._seen[-1][column] - self._seen[0][column]) / max(1e-9, self._now - self._seen[0][0])

    @property
    def samples_per_s(self) -> float:
        return self._rate(2)

    def eta_s(self, steps: int) -> float | None:
        rate = self._rate(1)
        return (steps - self._seen[-1][1]) / rate if rate > 0 else None


class View(Protocol):
    """Displays a run."""

    def update(self, status: dict[str, Any]) -> None: ...
    def note(self, line: str) -> None: ...
    def close(self) -> None: ...


class Tolerated:
    """A view whose errors do not end the run: each kind of error is logged once."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._logged: set[str] = set()

    def update(self, status: dict[str, Any]) -> None:
        try:
            self._view.update(status)
        except Exception as error:  # noqa: BLE001 - an error of the view must not end the run
            self._tolerate(error)

    def note(self, line: str) -> None:
        try:
            self._view.note(line)
        except Exception as error:  # noqa: BLE001
            self._tolerate(error)

    def close(self) -> None:
        try:
            self._view.close()
        except Exception as error:  # noqa: BLE001
            self._tolerate(error)

    def _tolerate(self, error: Exception) -> None:
        kind = f"{type(error).__name__}: {error}"
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning("the run continues but cannot be displayed: %s", kind, exc_info=error)


class RunView:
    """Keeps the pace and the curve of every pipeline; subclasses display them."""

    def __init__(self, *, shares_devices: bool = False) -> None:
        """`shares_devices`: pipelines share devices, so their use is shown. Problems with devices are always shown."""
        self._shares_devices = shares_devices
        self._paces: dict[str, Pace] = {}
        self._curves: dict[str, dict[int, float]] = {}

    def update(self, status: dict[str, Any]) -> None:
        now = time.monotonic()
        for name, one in status.get("pipelines", {}).items():
            self._paces.setdefault(name, Pace()).observe(now, one["step"], one["samples_trained"])
            curve = self._curves.setdefault(name, {})
            if one["step"] and is_finite(one["reward_mean"]):
                curve[one["step"]] = one["reward_mean"]
        self.show(status)

    def show(self, status: dict[str, Any]) -> None:
        raise NotImplementedError

    def figures(self, name: str, one: dict[str, Any]) -> dict[str, str]:
        """The figures of one pipeline, ready to print."""
        pace = self._paces[name]
        evaluated = f"{figure(one['eval_reward'])} (v{one['eval_version']})" if "eval_reward" in one else "-"
        return {
            "reward": figure(one["reward_mean"]) if one["step"] else "-",
            **({"eval": evaluated} if "eval_points" in one else {}),
            "samples/s": figure(pace.samples_per_s),
            "in flight": f"{one['in_flight']}",
            "staleness": f"{one['staleness_mean']:.1f} / {one['staleness_max']}",
            "weights": f"v{one['version']}",
            "workers": f"{one['workers_alive']}",
            "left": clock(pace.eta_s(one["steps"])),
        }

    def stages(self, name: str, status: dict[str, Any]) -> str:
        """How long a sample, and a step, spends in each stage, and what holds training back at the moment."""
        known = status.get("stages", {}).get(name, {})
        named = [(stage, known[f"{stage}_s"]) for stage in STAGES if known.get(f"{stage}_s")]
        shown = [f"{'train' if stage == 'step' else stage} {duration(spent)}" for stage, spent in named]
        slow = status.get("slow", {}).get(name)
        return " · ".join([*shown, escape_controls(slow)] if slow else shown)

    def curve(self, name: str, width: int) -> str:
        """The rewards so far between their lowest and their highest."""
        rewards = list(self._curves.get(name, {}).values())
        drawn = sparkline(rewards, width)
        return f"{figure(min(rewards))} {drawn} {figure(max(rewards))}" if drawn else ""

    def troubles(self, status: dict[str, Any]) -> list[str]:
        """Problems with devices. Pipelines without a worker are left out: their own line shows that they wait."""
        pool = status.get("pool")
        return pool_view.troubles_of(pool, started_of(status)) if pool else []


class PlainView(RunView):
    """One line per pipeline every few seconds: for pipes and logs."""

    def __init__(self, console: Console, *, shares_devices: bool = False) -> None:
        super().__init__(shares_devices=shares_devices)
        self._console = console
        self._last_at = 0.0
        self._over: set[str] = set()
        """Pipelines whose last line was printed."""

    def show(self, status: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - self._last_at < PLAIN_EVERY_S:
            return
        self._last_at = now
        for name, one in status.get("pipelines", {}).items():
            if name in self._over:
                continue
            if one["phase"] in ("complete", "stopped"):
                self._over.add(name)
            awaited = awaited_by(one)
            figures = "  ".join(f"{key} {value}" for key, value in self.figures(name, one).items())
            self._print(f"{name}: step {one['step']}/{one['steps']} ({one['phase']})  {awaited or figures}")
            if stages := self.stages(name, status):
                self._print(f"{name}: {stages}")
            if biased := status.get("biased", {}).get(name):
                self._print(f"{name}: {biased}")
            if one.get("diagnosis"):
                self._print(f"{name}: {one['diagnosis']}")
        if self._shares_devices and status.get("pool"):
            self._print(pool_view.line_of(status["pool"]))
        for trouble in self.troubles(status):
            self._print(f"pool: {trouble}")

    def note(self, line: str) -> None:
        self._print(line)

    def close(self) -> None:
        pass

    def _print(self, line: str) -> None:
        self._console.print(escape_controls(line), highlight=False, markup=False, soft_wrap=True)


class TerminalView(RunView):
    """A panel per pipeline, redrawn in place; a line per pipeline where the terminal is too low for panels."""

    def __init__(self, console: Console, title: str, *, shares_devices: bool = False) -> None:
        super().__init__(shares_devices=shares_devices)
        self._console = console
        self._title = escape_controls(title)
        self._notes: list[str] = []
        self._status: dict[str, Any] = {}
        self._live = Live(Text("starting processes …"), console=console, refresh_per_second=4, transient=False)
        self._live.start()

    def show(self, status: dict[str, Any]) -> None:
        self._status = status
        troubles = [escape_controls(line) for line in self.troubles(status)]
        notes = [Text(line, style="bold") for line in [*troubles, *self._notes]]
        footer = [Text(line, style="dim") for line in (self._title, lag_of(status)) if line]
        pool = status.get("pool") if self._shares_devices else None
        pools: list[RenderableType] = [pool_view.panel_of(pool)] if pool else []
        panels = [self._panel(name, one, status) for name, one in status.get("pipelines", {}).items()]
        drawn = Group(*panels, *pools, *notes, *footer)
        if len(self._console.render_lines(drawn, pad=False)) >= self._console.height:
            lines = [Text(pool_view.counts_of(pool))] if pool else []
            drawn = Group(*self._compact(status), *lines, *notes, *footer)
        self._live.update(drawn)

    def note(self, line: str) -> None:
        self._notes = [*self._notes, escape_controls(line)][-NOTES_SHOWN:]
        self.show(self._status)  # there may be no further status, for example at the end

    def close(self) -> None:
        self._live.stop()

    def _panel(self, name: str, one: dict[str, Any], status: dict[str, Any]) -> Panel:
        bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None, style="dim", complete_style="green", finished_style="green"),
            TextColumn("{task.percentage:>3.0f} %"),
            expand=True,
        )
        bar.add_task("", completed=one["step"], total=one["steps"])
        grid = Table.grid(expand=True, padding=(0, 1))
        figures = self.figures(name, one)
        for _ in figures:
            grid.add_column(justify="left")
        grid.add_row(*(Text(key, style="dim") for key in figures))
        grid.add_row(*(Text(value, style="bold") for value in figures.values()))
        curve = self.curve(name, min(CURVE_COLUMNS, self._console.width - 24))
        rows: list[RenderableType] = [bar, grid, Text(awaited_by(one) or curve, style="green", no_wrap=True)]
        if stages := self.stages(name, status):
            rows.append(Text(stages, style="dim"))
        if biased := status.get("biased", {}).get(name):
            rows.append(Text(escape_controls(biased), style="bold"))
        if one.get("diagnosis"):
            rows.append(Text(escape_controls(one["diagnosis"]), style="bold red"))
        return Panel(Group(*rows), title=Text(f"{shortened(name)} · {one['phase']}"), title_align="left")

    def _compact(self, status: dict[str, Any]) -> list[RenderableType]:
        table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim")
        columns = ("pipeline", "step", "reward", "eval", "samples/s", "left")
        for column in columns:
            table.add_column(column, no_wrap=True)
        table.add_column("", no_wrap=True, ratio=1)
        diagnoses: list[RenderableType] = []
        for name, one in status.get("pipelines", {}).items():
            figures = self.figures(name, one) | {"pipeline": shortened(name), "step": f"{one['step']}/{one['steps']}"}
            cells = [*(figures.get(column, "-") for column in columns), awaited_by(one) or self.curve(name, 12)]
            table.add_row(*(Text(cell) for cell in cells))
            if biased := status.get("biased", {}).get(name):
                diagnoses.append(Text(escape_controls(f"{name}: {biased}"), style="bold"))
            if one.get("diagnosis"):
                diagnoses.append(Text(escape_controls(f"{name}: {one['diagnosis']}"), style="bold red"))
        return [table, *diagnoses]


def awaited_by(one: dict[str, Any]) -> str:
    """What a pipeline waits for at its start and at its end; empty while the run is ending."""
    if one.get("ending"):
        return ""
    if one["phase"] == "draining" and one["step"] == one["steps"]:
        return "waiting for the last evaluation" if one.get("eval_running") else "saving the last checkpoint"
    if one["phase"] != "running":
        return ""
    counts = {"a rollout worker": one["workers_alive"], "the trainer": one.get("trainer_alive", 1)}
    missing = [process for process, alive in counts.items() if not alive]
    if missing:
        return f"waiting for {' and '.join(missing)} to start"
    if one.get("workers_loading") == one["workers_alive"]:
        return "waiting for the engine of a rollout worker to load"
    return ""


def started_of(status: dict[str, Any]) -> set[str]:
    """The pipelines that have a live worker."""
    return {name for name, one in status.get("pipelines", {}).items() if one["workers_alive"]}


def lag_of(status: dict[str, Any]) -> str:
    """The lag of the controller's loop (its wait-p99), and the largest lag of all other loops, by name."""
    lag = status.get("lag")
    if not lag:
        return ""
    line = f"loop lag: controller {lag['wait_p99_s'] * 1e3:.1f} ms"
    others = loops_of(status)
    if others:
        name = max(others, key=lambda one: others[one]["loop_lag_wait_p99_s"])
        late_ms = others[name]["loop_lag_wait_p99_s"] * 1e3
        line += f", {name.rpartition('/')[2]} {late_ms:.1f} ms"
    return line


def loops_of(status: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The loop figures of every process that measures them, except the controller."""
    processes = status.get("members", {}) | {"supervisor": status.get("supervisor", {})}
    return {name: values for name, values in processes.items() if "loop_lag_wait_p99_s" in values}


def is_finite(value: float | None) -> bool:
    """A figure that is not finite is null in JSON."""
    return value is not None and math.isfinite(value)


def figure(value: float | None) -> str:
    """Three significant digits, or all those before the point."""
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """The duration in seconds, milliseconds or microseconds."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def shortened(name: str) -> str:
    return name if len(name) <= NAME_COLUMNS else f"{name[: NAME_COLUMNS - 1]}…"


def clock(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: list[float], width: int) -> str:
    """The whole curve in one line of block characters."""
    if len(values) < 2:
        return ""
    if len(values) > width:
        size = len(values) / width
        values = [
            sum(chunk) / len(chunk)
            for chunk in (values[int(i * size) : max(int(i * size) + 1, int((i + 1) * size))] for i in range(width))
        ]
    low, high = min(values), max(values)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in values)
