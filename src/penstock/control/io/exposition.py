"""The status of the controller as Prometheus gauges, built at every scrape so that no stale series remain."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


class StatusCollector(Collector):
    """Exports every number in `status()`: `penstock_pipeline_*{pipeline}`, `penstock_member_*{member}`,
    `penstock_held_calls{kind}` and `penstock_controller_lag_*`.
    """

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self._status = status

    def describe(self) -> Iterable[Metric]:
        return ()  # the names depend on the status

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        families: dict[str, GaugeMetricFamily] = {}

        def add(name: str, label: str, labelled: str, value: Any) -> None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                return
            name = _NOT_IN_NAMES.sub("_", name)
            if name not in families:
                families[name] = GaugeMetricFamily(name, "From the controller's status", labels=(label,))
            families[name].add_metric((labelled,), value)

        for pipeline, values in status.get("pipelines", {}).items():
            for key, value in values.items():
                add(f"penstock_pipeline_{key}", "pipeline", pipeline, value)
        for member, values in status.get("members", {}).items():
            for key, value in values.items():
                add(f"penstock_member_{key}", "member", member, value)
        for kind, count in status.get("held", {}).items():
            add("penstock_held_calls", "kind", kind, count)
        for key, value in status.get("lag", {}).items():
            add(f"penstock_controller_lag_{key}", "loop", "controller", value)
        return families.values()
