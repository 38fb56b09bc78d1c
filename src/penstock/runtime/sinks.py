"""Sends metrics from `metrics.jsonl` to TensorBoard, Weights & Biases or Trackio.

The run directory records the offset of the last line that was sent, so a resumed run, or a restarted sink, sends each
line once (except for lines in transit at the time of a kill).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import orjson

from penstock.errors import ConfigError
from penstock.runtime.following import Following
from penstock.runtime.rundir import RunDir


class Figures(NamedTuple):
    """The numbers of one line, by name; `step` is the x axis of this pipeline."""

    pipeline: str
    step: int
    at: float
    values: dict[str, float]


class Sink(Protocol):
    def write(self, figures: Figures) -> None: ...

    def close(self) -> None:
        """Sends what is left. Blocks as long as the library does."""
        ...


def figures_of(line: bytes) -> Figures | None:
    """None for a line that is torn or belongs to no step. The step of an evaluation is its version."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if isinstance(record, dict) and record.get("kind") == "evaluation" and "skipped" not in record:
        figures = {key: value for key, value in record.items() if key.startswith("eval/")}
        record = figures | {"pipeline": record["pipeline"], "step": record["version"], "at": record["at"]}
    if not isinstance(record, dict) or not {"pipeline", "step", "at"} <= record.keys():
        return None
    pipeline, step, at = record.pop("pipeline"), record.pop("step"), record.pop("at")
    values = {key: float(value) for key, value in record.items() if _is_number(value)}
    return Figures(pipeline, step, at, {f"{pipeline}/{key}": value for key, value in values.items()})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class TensorBoard:
    """Event files in the run directory: `tensorboard --logdir RUN_DIR`."""

    def __init__(self, run: RunDir, project: str, config: Mapping[str, Any]) -> None:
        from tensorboard.summary import Writer  # pyright: ignore[reportMissingImports] - an extra

        self._writer = Writer(str(run.root / "tensorboard"))

    def write(self, figures: Figures) -> None:
        for name, value in figures.values.items():
            self._writer.add_scalar(name, value, figures.step, wall_time=figures.at)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One run in W&B per run; a resumed run continues it. The variables `WANDB_…` apply."""

    def __init__(self, run: RunDir, project: str, config: Mapping[str, Any]) -> None:
        import wandb  # pyright: ignore[reportMissingImports] - an extra

        self._run = wandb.init(
            project=project,
            name=run.root.name,
            id=run.run_id,
            resume="allow",
            dir=str(run.root),
            config=dict(config),
        )
        for section in config["pipeline"]:
            self._run.define_metric(f"{section['name']}/*", step_metric=f"{section['name']}/step")

    def write(self, figures: Figures) -> None:
        self._run.log({**figures.values, f"{figures.pipeline}/step": figures.step})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """One run in Trackio per pipeline, so that each has its own steps."""

    def __init__(self, run: RunDir, project: str, config: Mapping[str, Any]) -> None:
        import trackio  # pyright: ignore[reportMissingImports] - an extra

        self._open: Callable[[str], Any] = lambda pipeline: trackio.init(
            project=project,
            name=f"{run.root.name}.{pipeline}",
            config=dict(config),
            resume="allow",
            embed=False,
        )
        self._runs: dict[str, Any] = {}

    def write(self, figures: Figures) -> None:
        if figures.pipeline not in self._runs:
            self._runs[figures.pipeline] = self._open(figures.pipeline)
        self._runs[figures.pipeline].log(figures.values, step=figures.step)

    def close(self) -> None:
        for run in self._runs.values():
            run.finish()


SINKS: dict[str, Callable[[RunDir, str, Mapping[str, Any]], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}


def check_sink(name: str) -> None:
    """Raises `ConfigError` for a sink that is unknown or not installed."""
    if name not in SINKS:
        raise ConfigError(f"there is no metrics sink {name!r}; there are {', '.join(SINKS)}")
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"the metrics sink {name!r} is not installed: pip install 'penstock-rl[{name}]'")


class Publication:
    """Sends the metrics of one run to one sink."""

    def __init__(self, run: RunDir, name: str, project: str, config: Mapping[str, Any]) -> None:
        check_sink(name)
        self._run = run
        self._bookmark = run.root / "sinks" / f"{name}.offset"
        run.check(run.root / name)  # where the library writes
        self._following = Following(run.metrics_path, _read(run, self._bookmark))
        self._sink = SINKS[name](run, project, config)
        self.sent = 0

    def send(self) -> bool:
        """Sends the next lines; returns False if there were none. Blocks as long as the library does."""
        lines = self._following.read()
        for line in lines:
            if (figures := figures_of(line)) is not None:
                self._sink.write(figures)
                self.sent += 1
        self._run.write(self._bookmark, str(self._following.offset).encode())
        return bool(lines)

    def close(self) -> None:
        self._sink.close()


def _read(run: RunDir, bookmark: Path) -> int:
    try:
        return int(run.read(bookmark) or 0)
    except FileNotFoundError:
        return 0
