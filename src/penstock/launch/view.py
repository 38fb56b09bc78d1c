"""What a person sees while a run goes on: a rich view in a terminal, plain lines in a pipe."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from penstock.launch import pool_view

PLAIN_EVERY_S = 5.0
NOTES_SHOWN = 4
SPARKS = "▁▂▃▄▅▆▇█"


class Pace:
    """Steps and samples per second over the last half minute, and what that means for the end."""

    def __init__(self, window_s: float = 30.0) -> None:
        self._window_s = window_s
        self._seen: list[tuple[float, int, int]] = []

    def saw(self, now: float, step: int, samples: int) -> None:
        self._seen.append((now, step, samples))
        while len(self._seen) > 2 and self._seen[0][0] < now - self._window_s:
            self._seen.pop(0)

    def _rate(self, column: int) -> float:
        if len(self._seen) < 2:
            return 0.0
        first, last = self._seen[0], self._seen[-1]
        return (last[column] - first[column]) / max(1e-9, last[0] - first[0])

    @property
    def samples_per_s(self) -> float:
        return self._rate(2)

    def eta_s(self, steps: int) -> float | None:
        rate = self._rate(1)
        return (steps - self._seen[-1][1]) / rate if rate > 0 else None


class RunView:
    """Keeps the last status per pipeline; subclasses show it."""

    def __init__(self) -> None:
        self._paces: dict[str, Pace] = {}
        self._curves: dict[str, list[float]] = {}

    def update(self, status: dict[str, Any]) -> None:
        now = time.monotonic()
        for name, one in status.get("pipelines", {}).items():
            self._paces.setdefault(name, Pace()).saw(now, one["step"], one["samples_trained"])
            curve = self._curves.setdefault(name, [])
            if one["step"] and (not curve or curve[-1] != one["reward_mean"]):
                curve.append(one["reward_mean"])
        self.show(status)

    def show(self, status: dict[str, Any]) -> None:
        raise NotImplementedError

    def figures(self, name: str, one: dict[str, Any]) -> dict[str, str]:
        """The figures of one pipeline, ready to print."""
        pace = self._paces[name]
        evaluated = f"{one['eval_reward']:.3g} (v{one['eval_version']})" if "eval_reward" in one else "-"
        return {
            "reward": f"{one['reward_mean']:.3g}" if one["step"] else "-",
            **({"eval": evaluated} if "eval_points" in one else {}),
            "samples/s": f"{pace.samples_per_s:,.0f}",
            "in flight": f"{one['in_flight']}",
            "staleness": f"{one['staleness_mean']:.1f} (max {one['staleness_max']})",
            "weights": f"v{one['version']}",
            "workers": f"{one['workers_alive']}",
            "left": clock(pace.eta_s(one["steps"])),
        }


class PlainView(RunView):
    """One line per pipeline every few seconds: for pipes and logs."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._last_at = 0.0

    def show(self, status: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - self._last_at < PLAIN_EVERY_S:
            return
        self._last_at = now
        for name, one in status.get("pipelines", {}).items():
            figures = "  ".join(f"{key} {value}" for key, value in self.figures(name, one).items())
            self._print(f"{name}: step {one['step']}/{one['steps']} ({one['phase']})  {figures}{lag_of(status)}")
            if one.get("diagnosis"):
                self._print(f"{name}: {one['diagnosis']}")
        pool = status.get("pool")
        if pool and pool_view.is_worth_showing(pool):
            self._print(pool_view.line_of(pool))
            for trouble in pool_view.troubles_of(pool):
                self._print(f"pool: {trouble}")

    def note(self, line: str) -> None:
        self._print(line)

    def close(self) -> None:
        pass

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class TerminalView(RunView):
    """A panel per pipeline, redrawn in place."""

    def __init__(self, console: Console, title: str) -> None:
        super().__init__()
        self._title = title
        self._notes: list[str] = []
        self._live = Live(Text("starting processes …"), console=console, refresh_per_second=4, transient=False)
        self._live.start()

    def show(self, status: dict[str, Any]) -> None:
        panels: list[RenderableType] = [
            self._panel(name, one) for name, one in status.get("pipelines", {}).items() if name in self._paces
        ]
        pool = status.get("pool")
        if pool and pool_view.is_worth_showing(pool):
            panels.append(pool_view.panel_of(pool))
        footer = Text(f"{self._title}{lag_of(status)}", style="dim")
        notes = [Text(line, style="yellow") for line in self._notes]
        self._live.update(Group(*panels, *notes, footer))

    def note(self, line: str) -> None:
        self._notes = [*self._notes, line][-NOTES_SHOWN:]

    def close(self) -> None:
        self._live.stop()

    def _panel(self, name: str, one: dict[str, Any]) -> Panel:
        bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} %"),
            expand=True,
        )
        bar.add_task("", completed=one["step"], total=one["steps"])
        grid = Table.grid(expand=True, padding=(0, 2))
        figures = self.figures(name, one)
        for _ in figures:
            grid.add_column(justify="left")
        grid.add_row(*(Text(key, style="dim") for key in figures))
        grid.add_row(*(Text(value, style="bold") for value in figures.values()))
        rows: list[RenderableType] = [bar, grid, Text(sparkline(self._curves.get(name, [])), style="green")]
        if one.get("diagnosis"):
            rows.append(Text(one["diagnosis"], style="bold red"))
        return Panel(Group(*rows), title=f"{name} · {one['phase']}", title_align="left")


def lag_of(status: dict[str, Any]) -> str:
    """The controller's loop in full, and the latest of all the others by its name."""
    lag = status.get("lag")
    if not lag:
        return ""
    p99_ms, wait_ms, max_ms = (lag[name] * 1e3 for name in ("p99_s", "wait_p99_s", "max_s"))
    line = f"  loop lag p99 {p99_ms:.1f} ms wait-p99 {wait_ms:.1f} ms max {max_ms:.0f} ms"
    others = loops_of(status)
    if others:
        name = max(others, key=lambda one: others[one]["loop_lag_wait_p99_s"])
        line += f" ({name} wait-p99 {others[name]['loop_lag_wait_p99_s'] * 1e3:.1f} ms)"
    return line


def loops_of(status: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The figures of every process that watches a loop, but for the controller's."""
    processes = status.get("members", {}) | {"supervisor": status.get("supervisor", {})}
    return {name: values for name, values in processes.items() if "loop_lag_wait_p99_s" in values}


def clock(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: list[float], width: int = 72) -> str:
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
