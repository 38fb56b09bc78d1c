"""Folds `metrics.jsonl` line by line into bounded series and the latest values.

Two kinds of lines are recognised by their shape, so that new metrics need no change here: those with a `pipeline` and a
`step` or a `version` (training steps, evaluations) become series over steps, and `gauges` become series over time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import orjson

from penstock.dashboard.series import Series
from penstock.runtime.metrics import PAUSE_S

MOST_SERIES = 1000
MOST_PROCESSES = 100
PACE_STEPS = 64
AXES = frozenset({"step", "version", "due"})
"""Positions of a step, not metrics."""


class Key(NamedTuple):
    """Key of a series: `of` is `step` or `gauge` for a pipeline, `process` for gauges of a process."""

    of: str
    owner: str
    name: str


class Trained(NamedTuple):
    """One line of a training step, to compute the pace."""

    at: float
    step: int
    samples: int
    step_s: float | None = None
    turn_s: float = 0.0


class MetricsFold:
    """All metrics of a run that the dashboard keeps; the size does not grow with the run."""

    def __init__(self) -> None:
        self.series: dict[Key, Series] = {}
        self.gauges: dict[str, dict[str, Any]] = {}
        """The latest gauges of each pipeline."""
        self.processes: dict[str, dict[str, Any]] = {}
        """The latest gauges of each process, the most recently updated last."""
        self.present: frozenset[str] = frozenset()
        """The processes in the last line: the others have ended."""
        self.steps: dict[str, dict[str, Any]] = {}
        """The latest training step of each pipeline."""
        self.pace: dict[str, deque[Trained]] = defaultdict(lambda: deque(maxlen=PACE_STEPS))
        """The latest steps of each pipeline, without an interruption between them."""
        self.began_at: float | None = None
        self.latest_at: float | None = None
        self.lines = 0
        self.unreadable = 0
        """Lines torn by a killed writer, or of another program."""
        self.left_out = 0
        """Points of series beyond the bound on their number."""
        self._gathered: dict[tuple[str, str], tuple[list[float], list[dict[str, Any]]]] = defaultdict(lambda: ([], []))
        """Rows that are not in their series yet, with their x, by kind and owner: columns are added at once."""

    def __repr__(self) -> str:
        return f"<MetricsFold {self.lines} lines in {len(self.series)} series, {self.unreadable} unreadable>"

    def take(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self.lines += 1
            try:
                record = orjson.loads(line)
                self._take(record)
            except (orjson.JSONDecodeError, TypeError, AttributeError, KeyError, ValueError):
                self.unreadable += 1
        self._settle()

    def trained(self) -> dict[str, int]:
        """Steps of each pipeline; from its latest gauges if no step line was read, as for a finished pipeline."""
        from_gauges = {name: int(gauges["step"]) for name, gauges in self.gauges.items() if gauges.get("step")}
        return from_gauges | {name: int(line["step"]) + 1 for name, line in self.steps.items()}

    def names(self, of: str, owner: str) -> list[str]:
        return sorted(key.name for key in self.series if key.of == of and key.owner == owner)

    def _take(self, record: dict[str, Any]) -> None:
        at = float(record["at"])
        if self.latest_at is not None and at - self.latest_at > PAUSE_S:
            self.pace.clear()
        if record.get("kind") == "gauges":
            for owner, values in record["pipelines"].items():
                self.gauges[owner] = values
                self._gather("gauge", owner, at, values)
            self.present = frozenset(record["processes"])
            for owner, values in record["processes"].items():
                self.processes.pop(owner, None)
                self.processes[owner] = values
                self._gather("process", owner, at, values)
            while len(self.processes) > MOST_PROCESSES:
                del self.processes[next(iter(self.processes))]
        else:
            pipeline, step = str(record["pipeline"]), int(record["step"] if "step" in record else record["version"])
            if record.get("kind") == "step":
                self._trained(pipeline, step, at, record)
            self._gather("step", pipeline, step, record)
        self.began_at = at if self.began_at is None else self.began_at
        self.latest_at = at if self.latest_at is None else max(at, self.latest_at)

    def _trained(self, pipeline: str, step: int, at: float, record: dict[str, Any]) -> None:
        if pipeline in self.steps and step <= self.steps[pipeline]["step"]:
            self._settle()  # the trainer resumed from an earlier step: repeated steps replace the old ones
            for key, series in self.series.items():
                if key.of == "step" and key.owner == pipeline:  # it resumed with the version of the step's number
                    series.forget_from(step + 1 if key.name.startswith("eval/") else step)
            self.pace[pipeline].clear()
        self.steps[pipeline] = record
        samples, turn_s = int(record.get("samples") or 0), float(record.get("turn_s") or 0.0)
        self.pace[pipeline].append(Trained(at, step, samples, record.get("step_s"), turn_s))

    def _gather(self, of: str, owner: str, x: float, values: dict[str, Any]) -> None:
        xs, rows = self._gathered[of, owner]
        xs.append(x)
        rows.append(values)

    def _settle(self) -> None:
        for (of, owner), (xs, rows) in self._gathered.items():
            names: set[str] = set()
            for row in rows:
                names |= row.keys()
            if of == "step":
                names -= AXES
            x = np.array(xs, np.float64)
            for name in sorted(names):
                try:
                    y = np.array([row.get(name) for row in rows], np.float64)  # a missing value becomes NaN
                except (ValueError, TypeError, OverflowError):
                    continue  # text
                self._add(Key(of, owner, name), x, y)
        self._gathered.clear()

    def _add(self, key: Key, x: np.ndarray, y: np.ndarray) -> None:
        if key not in self.series and len(self.series) >= MOST_SERIES:
            self._drop_ended_processes()
            if len(self.series) >= MOST_SERIES:
                self.left_out += len(x)
                return
        if key not in self.series:
            self.series[key] = Series()
        self.series[key].add(x, y)

    def _drop_ended_processes(self) -> None:
        """A restarted process has new series, so the series of ended processes are dropped first."""
        ended = [key for key in self.series if key.of == "process" and key.owner not in self.present]
        for key in ended:
            del self.series[key]
