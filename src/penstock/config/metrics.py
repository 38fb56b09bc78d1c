"""Where metrics go."""

from __future__ import annotations

from typing import Literal

from penstock.records.section import Section


class MetricsSection(Section):
    sinks: list[Literal["tensorboard", "wandb", "trackio"]] = []
    """Where metrics are sent besides `metrics.jsonl`, each by a process of its own that can never stop the run."""
    project: str = "penstock"
    """The name under which `wandb` and `trackio` file the run."""
