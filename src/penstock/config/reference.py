"""The keys of a configuration with defaults and help texts, read from the models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from penstock.config.load import models_in
from penstock.config.recommended import RECOMMENDED
from penstock.config.run import Config
from penstock.errors import ConfigError
from penstock.records.section import used_by
from penstock.runtime.named import nearest


@dataclass(frozen=True, slots=True)
class Key:
    table: str
    """The header in a file: `[pipeline.rollout]`, with the `kind` that selects it if there are several."""
    path: str
    """As `--set` takes it, with NAME for a pipeline's name."""
    default: str
    meaning: str


def keys(query: str = "") -> list[Key]:
    """The keys whose path contains `query`, with or without a pipeline's name. Raises `ConfigError` if none does."""
    everything = list(_walk(Config, "", ""))
    parts = tuple(part for part in query.split(".") if part)
    unnamed = parts[:1] + parts[2:] if parts[:1] == ("pipeline",) else parts
    for candidate in (parts, unnamed):
        if found := [key for key in everything if _contains(key.path, candidate)]:
            return found
    tables = {key.path.rpartition(".")[0].replace("pipeline.NAME", "pipeline") for key in everything}
    raise ConfigError(f"there is no key or table {query!r}{nearest(query, tables - {''})}")


def _contains(path: str, query: tuple[str, ...]) -> bool:
    """Whether `path` contains these parts in sequence: `rollout` is a table, `train.device` a key."""
    parts = [part for part in path.split(".") if part != "NAME"]
    return any(tuple(parts[start : start + len(query)]) == query for start in range(len(parts)))


def _walk(model: type[BaseModel], path: str, table: str) -> Iterator[Key]:
    inner: list[tuple[str, FieldInfo, list[type[BaseModel]]]] = []
    for name, field in model.model_fields.items():
        if models := models_in(field.annotation):
            inner.append((name, field, models))
            continue
        yield Key(table, f"{path}{name}", _default(field, path, name), _meaning(field))
    for name, field, models in inner:
        for one in models:
            chosen = str(one.model_fields["kind"].default) if len(models) > 1 else None
            if get_origin(field.annotation) is list:
                yield from _walk(one, f"{path}{name}.NAME.", f"[[{name}]]")
                continue
            prefix = path.replace("NAME.", "")
            header = f"[{prefix}{name}]" + (f"  kind = {json.dumps(chosen)}" if chosen else "")
            yield from _walk(one, f"{path}{name}.", header)


def _meaning(field: FieldInfo) -> str:
    text = " ".join((field.description or "").split())
    if (trained := used_by(field)) is not None:
        text = f"{'Language models' if trained == 'language' else 'Gymnasium policies'} only. {text}"
    if get_origin(field.annotation) is Literal and len(get_args(field.annotation)) > 1:
        return f"{' | '.join(map(str, get_args(field.annotation)))}. {text}"
    return text


def _default(field: FieldInfo, path: str, name: str) -> str:
    if field.is_required():
        return "required"
    table = path.removesuffix(".").rpartition(".")[2]
    by_kind = {kind: tables[table][name] for kind, tables in RECOMMENDED.items() if name in tables.get(table, {})}
    shown = _shown(field.get_default(call_default_factory=True))
    return ", ".join([shown, *(f"{kind}: {_shown(value)}" for kind, value in by_kind.items())])


def _shown(value: Any) -> str:
    return "unset" if value is None else json.dumps(str(value) if isinstance(value, Path) else value)
