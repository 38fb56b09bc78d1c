"""Environments and reward functions by name: a built-in name, or `package.module:Name` for anything else."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import ConfigError

ENVIRONMENTS: Mapping[str, str] = {
    "copy": "penstock.envs.tasks:Copy",
    "reverse": "penstock.envs.tasks:Reverse",
    "sort": "penstock.envs.tasks:Sort",
    "arithmetic": "penstock.envs.tasks:Arithmetic",
    "jsonl": "penstock.envs.io.datasets:JsonLinesDataset",
    "gymnasium": "penstock.envs.io.gymnasium:GymnasiumEnvironment",
}
"""Built-in environments. Paths, not objects, so that naming one loads nothing."""

REWARDS: Mapping[str, str] = {
    "exact_answer": "penstock.envs.rewards:exact_answer",
    "contains_answer": "penstock.envs.rewards:contains_answer",
    "matching_positions": "penstock.envs.rewards:matching_positions",
}


def find_environment(name: str) -> Callable[..., Any]:
    """The class or factory of that name; ConfigError with the nearest names if there is none."""
    return _find("environment", name, ENVIRONMENTS)


def find_reward(name: str) -> Callable[..., Any]:
    """The reward function of that name; ConfigError with the nearest names if there is none."""
    return _find("reward function", name, REWARDS)


def make_environment(name: str, options: Mapping[str, Any] | None = None) -> Any:
    """Builds the environment; an option it does not take is a ConfigError that names the nearest one it does."""
    factory = find_environment(name)
    options = dict(options or {})
    check_options(f"environment {name!r}", factory, options)
    return factory(**options)


def check_options(owner: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises ConfigError unless `factory(**options)` is a possible call."""
    signature = inspect.signature(factory)
    parameters = signature.parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        for option in options:
            if option not in parameters:
                raise ConfigError(f"{owner} has no option {option!r}{_nearest(option, list(parameters))}")
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(f"{owner}: {error}; its options are {', '.join(parameters) or 'none'}") from error


def load(path: str) -> Any:
    """The object at `package.module:Name`; ConfigError says which part of the path does not exist."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        raise ConfigError(f"{path!r}: there is no module {missing!r} on the Python path") from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in dir(found) if not name.startswith("_")]
            raise ConfigError(f"{path!r}: {module_name!r} has no {part!r}{_nearest(part, public)}")
        found = getattr(found, part)
    return found


def _find(kind: str, name: str, known: Mapping[str, str]) -> Callable[..., Any]:
    path = known.get(name, name)
    if ":" not in path:
        raise ConfigError(f"unknown {kind} {name!r}{_nearest(name, list(known))}; or give 'package.module:Name'")
    found = load(path)
    if not callable(found):
        raise ConfigError(f"{kind} {name!r}: {path!r} is a {type(found).__name__}, expected something to call")
    return found


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(repr(match) for match in close)}?"
    return f"; known: {', '.join(sorted(known))}" if len(known) <= 20 else ""
