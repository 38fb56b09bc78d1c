"""The available runs: one directory, or all in a folder. Clients select runs by name, never by path."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from penstock.dashboard.io.run_reader import RunReader, ending_of, tail_of
from penstock.dashboard.metrics_fold import MetricsFold
from penstock.errors import ConfigError, PenstockError
from penstock.runtime.rundir import RunDir

MOST_OPEN = 8
MOST_LISTED = 200
TAIL_BYTES = 32 << 10


class Shelf:
    """Creates readers and caches the most recently used: memory does not grow with the number of runs."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ConfigError(f"{path} is not a directory: give a run directory, or the folder that holds several")
        self._single = (path / "run.json").is_file()
        self._path = path.resolve()
        self._open: OrderedDict[str, RunReader] = OrderedDict()
        self._lock = threading.Lock()
        if not self._single and not self.names():
            raise ConfigError(f"there is no run in {path}: none of its directories has a run.json")

    def names(self) -> list[str]:
        """The newest first."""
        if self._single:
            return [self._path.name]
        made = [(marker.stat().st_mtime, marker.parent.name) for marker in self._path.glob("*/run.json")]
        return [name for _, name in sorted(made, reverse=True)[:MOST_LISTED]]

    def reader(self, name: str) -> RunReader:
        """Raises `ConfigError` for a name that is not listed, or a directory that cannot be opened."""
        if name not in self.names():
            raise ConfigError(f"there is no run {name!r} here")
        with self._lock:
            reader = self._open.get(name)
            if reader is None or not reader.run.root.exists():
                reader = self._open[name] = RunReader(self._directory(name))
            self._open.move_to_end(name)
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
            return reader

    def listing(self) -> list[dict[str, Any]]:
        """A summary of every run, from its small files and the end of its metrics."""
        return [self._summary(name) for name in self.names()]

    def _directory(self, name: str) -> Path:
        return self._path if self._single else self._path / name

    def _summary(self, name: str) -> dict[str, Any]:
        root = self._directory(name)
        try:
            run = RunDir.open(root)
            made = json.loads(run.read(run.root / "run.json"))
            ending = ending_of(run) or {}
        except (PenstockError, OSError, ValueError) as error:
            return {"id": name, "trouble": str(error)}
        return {
            "id": name,
            "made_at": made.get("made_at"),
            "penstock": made.get("penstock"),
            "alive": run.is_supervised(),
            "ended": ending.get("how"),
            "steps": latest_steps(run),
        }

    def __repr__(self) -> str:
        return f"<Shelf {self._path}: {len(self._open)} runs open>"


def latest_steps(run: RunDir) -> dict[str, dict[str, Any]]:
    """Step and reward of each pipeline, from the last lines."""
    try:
        lines = tail_of(run, run.metrics_path, TAIL_BYTES).splitlines()
    except OSError:
        return {}
    fold = MetricsFold()
    fold.take(lines)
    gauges = {name: {"step": one.get("step"), "reward": one.get("reward_mean")} for name, one in fold.gauges.items()}
    trained = {name: {"step": one["step"] + 1, "reward": one.get("reward")} for name, one in fold.steps.items()}
    return gauges | trained
