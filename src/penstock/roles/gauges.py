"""The run's present state as lines of `metrics.jsonl`, for whoever looks at it over time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from penstock.runtime.metrics import JsonLines

EVERY_S = 2.0


class Desk(Protocol):
    def status(self) -> dict[str, Any]: ...


async def write_gauges(desk: Desk, lines: JsonLines) -> None:
    """One line every few seconds until cancelled, and a last one then: how things stood at the end."""
    try:
        while True:
            lines.write(gauges_of(desk.status()))
            await asyncio.sleep(EVERY_S)
    finally:
        lines.write(gauges_of(desk.status()))


def gauges_of(status: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of each pipeline and each process; they stand apart from the lines of steps, which are by step."""
    controller = {f"loop_lag_{name}": value for name, value in status["lag"].items()}
    return {
        "kind": "gauges",
        "at": status["at"],
        "pipelines": {name: _rounded(values) for name, values in status["pipelines"].items()},
        "processes": {
            name: _rounded(values) for name, values in ({"controller": controller} | status["members"]).items()
        },
    }


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """To the microsecond: more digits would only be bytes."""
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}
