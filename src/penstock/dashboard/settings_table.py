"""A run's configuration as rows of keys and values, and what differs between runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

MOST_CHARACTERS = 400


def rows(config: Mapping[str, Any]) -> dict[str, str]:
    """Every key with its value as text. Pipelines go by their names; the only one needs none, so that runs whose
    pipelines are called differently can be compared."""
    return dict(_rows(config, ""))


def _rows(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if key == "pipeline" and isinstance(value, list) and all(isinstance(one, dict) for one in value):
            for one in value:
                name = f".{one.get('name', '')}" if len(value) > 1 else ""
                yield from _rows(one, f"pipeline{name}.")
        elif isinstance(value, Mapping) and value:
            yield from _rows(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _written(value)


def _written(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} …"


def differences(runs: Mapping[str, Mapping[str, str]]) -> list[dict[str, Any]]:
    """The keys that have two values or more, with that of each run; None where it has no such key. A key that only
    some of the runs have is no difference: there may be more pipelines in one than in another."""
    keys = dict.fromkeys(key for found in runs.values() for key in found)
    told = [{"key": key, "values": {run: found.get(key) for run, found in runs.items()}} for key in keys]
    return [one for one in told if len(set(one["values"].values()) - {None}) > 1]
