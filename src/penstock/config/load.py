"""Loads a file and overrides into a checked `Config`. Errors name the key, the line and the nearest valid key."""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from penstock.config.run import Config
from penstock.engines.registry import SECTIONS
from penstock.errors import ConfigError
from penstock.records.section import Section, Trained, used_by
from penstock.runtime.beneath import read_beneath
from penstock.runtime.named import nearest

Location = tuple[str | int, ...]

TAGS = ("tiny", "path", "hub", "mlp", *SECTIONS)
"""Values of `kind` that choose a table; pydantic puts them into the location of an error."""


RENAMED = {
    "control.reap_after_s": "control.evict_after_s",
    "payload.carrier": "payload.transport",
    "pipeline.weights.mover": "pipeline.weights.transport",
    "pipeline.control_loss": "pipeline.ppo_loss",
}
"""Keys of earlier versions and their present names."""
GONE = {
    "pipeline.engine.torch.batching": "completions always join and leave at any decode step",
}
"""Removed keys without a replacement, and the reason."""


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a TOML file, applies `a.b=c` overrides, and validates; all errors become one `ConfigError`."""
    try:
        text = _read(path)
    except FileNotFoundError:
        raise ConfigError(f"no configuration at {path}: give the path of a .toml file") from None
    except IsADirectoryError:
        run = " A run directory is continued with --resume" if (path / "run.json").exists() else ""
        raise ConfigError(f"{path} is a directory: give the path of a .toml file.{run}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    resolve_paths(tree, path.parent)
    applied = {_apply(tree, override): override for override in overrides}
    resolve_paths(tree, Path.cwd())
    return validate(tree, source=str(path), text=text, applied=applied)


def _read(path: Path) -> str:
    """The text of a file, of which that of a run directory must not be a link."""
    if (path.parent / "run.json").exists():
        return read_beneath(path.parent, path).decode("utf-8")
    return path.read_text(encoding="utf-8")


def validate(
    tree: dict[str, Any],
    *,
    source: str = "configuration",
    text: str = "",
    applied: Mapping[Location, str] | None = None,
) -> Config:
    """`applied`: the `--set` that wrote each location."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        problems = [dict(problem) for problem in error.errors(include_url=False)]
        raise ConfigError("\n".join(_explain(tree, text, source, one, applied or {}) for one in problems)) from None


def resolve_paths(tree: dict[str, Any], folder: Path) -> None:
    """Makes each path that exists in the folder absolute: first in that of the file, then in the working directory.
    The copy in the run directory is read again, from any working directory."""
    run = tree.get("run")
    if isinstance(run, dict) and isinstance(run.get("extra_path"), list):
        run["extra_path"] = [_beside(folder, one) for one in run["extra_path"]]
    pipelines = tree.get("pipeline")
    for pipeline in pipelines if isinstance(pipelines, list) else ():
        evaluation = _table(pipeline, "evaluation")
        for table in (_table(pipeline, "model"), _table(pipeline, "env"), _table(evaluation, "env")):
            for one in (table, _table(table, "options")):
                if "path" in one:
                    one["path"] = _beside(folder, one["path"])
        train = _table(pipeline, "train")
        if "teacher" in train:
            train["teacher"] = _beside(folder, train["teacher"])


def _table(table: Any, name: str) -> dict[str, Any]:
    """An empty one if there is none; validation reports a value that is no table."""
    inner = table.get(name) if isinstance(table, dict) else None
    return inner if isinstance(inner, dict) else {}


def _beside(folder: Path, path: Any) -> Any:
    found = isinstance(path, str | os.PathLike) and not Path(path).is_absolute() and (folder / path).exists()
    return str((folder / path).resolve()) if found else path


def dump(config: Config) -> str:
    """The resolved configuration as TOML; loading it again gives an equal `Config`."""
    tree = config.model_dump(mode="json", exclude_none=True)
    for pipeline, table in zip(config.pipeline, tree["pipeline"], strict=True):
        _drop_unused(table, pipeline, pipeline.trained)
    return tomli_w.dumps(tree)


def _drop_unused(table: dict[str, Any], section: Section, trained: Trained) -> None:
    """Drops the keys that this pipeline does not use, unless the user wrote them."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if used_by(field) not in (None, trained) and name not in section.model_fields_set:
            table.pop(name, None)
        elif isinstance(value, Section):
            _drop_unused(table[name], value, trained)


def _apply(tree: dict[str, Any], override: str) -> Location:
    """Writes the value of a `--set` and returns its location."""
    key, sign, value = override.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set {override!r}: expected key=value, for example --set pipeline.letters.steps=10")
    *parents, last = key.strip().split(".")
    node: Any = tree
    place: list[str | int] = []
    for depth, part in enumerate(parents):
        place.append(_index(node, part, override) if isinstance(node, list) else part)
        node = _child(node, part, ".".join(parents[:depth]), override)
    written: Any = _index(node, last, override) if isinstance(node, list) else last
    node[written] = parse_value(value)
    return (*place, written)


def _child(node: Any, part: str, where: str, override: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, part, override)]
    if isinstance(node, dict):
        return node.setdefault(part, {})
    raise ConfigError(f"--set {override!r}: {where!r} is a value, not a table")


def _index(tables: list[Any], part: str, override: str) -> int:
    """A pipeline can be named by its position or by its name."""
    for position, table in enumerate(tables):
        if part == str(position) or (isinstance(table, dict) and table.get("name") == part):
            return position
    names = [str(table.get("name", position)) for position, table in enumerate(tables) if isinstance(table, dict)]
    raise ConfigError(f"--set {override!r}: no entry {part!r} here; expected {', '.join(names) or 'none'}")


def parse_value(value: str) -> Any:
    """Parses a TOML value; any other text is a string."""
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value


def _explain(
    tree: dict[str, Any], text: str, source: str, problem: dict[str, Any], applied: Mapping[Location, str]
) -> str:
    location: Location = tuple(problem["loc"])
    written = tuple(part for part in location if part not in TAGS or _is_key(tree, location, part))
    key = ".".join(_names_along(tree, written)) or "the configuration"
    line = _line_of(text, written)
    where = f"{source}:{line}" if line else source
    for place, override in applied.items():
        if written[: len(place)] == place:
            where = f"--set {override}"
    if problem["type"] == "extra_forbidden":
        valid = sorted(_fields_at(location[:-1]))
        near = difflib.get_close_matches(str(location[-1]), valid, n=1)
        named = ".".join(part for part in location if isinstance(part, str))
        if named in GONE:
            return f"{where}: {key!r} was removed, delete it: {GONE[named]}"
        renamed = RENAMED.get(named)
        if renamed is not None:
            return f"{where}: {key!r} is now called {renamed!r}"
        hint = f"did you mean {near[0]!r}?" if near else f"valid keys are {', '.join(valid)}"
        return f"{where}: unknown key {key!r}; {hint}"
    if problem["type"] == "missing":
        return f"{where}: {key!r} is missing and has no default"
    found = problem.get("input")
    if problem["type"] in ("union_tag_invalid", "union_tag_not_found"):
        kinds = sorted(_tag(model) or "" for model in _models_at(location))
        tag = problem["ctx"].get("tag")
        if tag is None:
            return f"{where}: {key}.kind is missing; expected one of: {', '.join(kinds)}"
        return f"{where}: {key}.kind: there is no kind {tag!r}{nearest(tag, kinds)}"
    if problem["type"] == "list_type" and isinstance(found, dict):
        return f"{where}: {key} is a list of tables: write [[{key}]] with two brackets, found [{key}]"
    shown = "" if isinstance(found, (dict, list, BaseModel)) else f", found {json.dumps(found, default=str)}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{where}: {key}: {message}{shown}"


def _names_along(tree: dict[str, Any], location: Location) -> Iterable[str]:
    """The parts of a key as users write them: a pipeline by its name."""
    node: Any = tree
    for part in location:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            node = None
        name = node.get("name") if isinstance(part, int) and isinstance(node, dict) else None
        yield str(part if name is None else name)


def _is_key(tree: dict[str, Any], location: Location, part: str | int) -> bool:
    """Whether a part that may be a union's tag is a key in the file."""
    node: Any = tree
    for step in location:
        try:
            node = node[step]
        except (KeyError, IndexError, TypeError):
            if step == part:
                return False
    return True


def _fields_at(location: Location) -> Iterable[str]:
    """The keys that are valid in the table at `location`."""
    return {name for model in _models_at(location) for name in model.model_fields}


def _models_at(location: Location) -> list[type[BaseModel]]:
    """The models that the table at `location` may have."""
    models: list[type[BaseModel]] = [Config]
    for part in location:
        if isinstance(part, int):
            continue
        tagged = [model for model in models if _tag(model) == part]
        if tagged:
            models = tagged
            continue
        models = [
            inner
            for model in models
            if part in model.model_fields
            for inner in models_in(model.model_fields[str(part)].annotation)
        ]
    return models


def _tag(model: type[BaseModel]) -> str | None:
    field = model.model_fields.get("kind")
    return str(field.default) if field is not None else None


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models of the tables in a field of this type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in models_in(inner)]


def _line_of(text: str, location: Location) -> int | None:
    """Line of the deepest part of `location` that is in the file. Best effort: TOML has several notations."""
    if not text:
        return None
    path: list[str] = []
    found: int | None = None
    count: dict[str, int] = {}
    target_names = [part for part in location if isinstance(part, str)]
    target_index = next((part for part in location if isinstance(part, int)), 0)
    inside = True
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[(\[)?\s*([\w.\-]+)\s*\]", line):
            path = header[2].split(".")
            if header[1]:
                count[header[2]] = count.get(header[2], -1) + 1
            inside = not count or path[0] not in count or count[path[0]] == target_index
            if inside and path == target_names[: len(path)]:
                found = number
        elif inside and (pair := re.match(r"\s*([\w\-]+(?:\.[\w\-]+)*)\s*=", line)):
            names = path + pair[1].split(".")
            if names == target_names[: len(names)] and len(names) >= len(target_names):
                return number
    return found
