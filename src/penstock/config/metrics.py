"""Sinks of the metrics."""

from __future__ import annotations

from typing import Literal

from penstock.records.section import Section


class MetricsSection(Section):
    sinks: list[Literal["tensorboard", "wandb", "trackio"]] = []
    """Where metrics are sent besides `metrics.jsonl`. Each sink has its own process, which can never stop the run."""
    project: str = "penstock"
    """Project of the run in `wandb` and `trackio`."""
