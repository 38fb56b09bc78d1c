"""A run's configuration as rows of keys and values, and the differences between runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

MOST_CHARACTERS = 400


def rows(config: Mapping[str, Any]) -> dict[str, str]:
    """Every key with its value as text. Keys of several pipelines contain the pipeline's name. Those of a single one
    do not, so that runs with different pipeline names can be compared."""
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
    """The keys with two values or more, and the value of each run; None if the run lacks the key. A key that is missing
    in some runs is no difference: runs may have different numbers of pipelines."""
    keys = dict.fromkeys(key for found in runs.values() for key in found)
    compared = [{"key": key, "values": {run: found.get(key) for run, found in runs.items()}} for key in keys]
    return [one for one in compared if len(set(one["values"].values()) - {None}) > 1]
