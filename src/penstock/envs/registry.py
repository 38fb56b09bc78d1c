"""Environments and reward functions by name: a built-in name, or `package.module:Name` for anything else."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from penstock.envs.rewards import Rubric
from penstock.envs.settings import EnvSection
from penstock.errors import ConfigError
from penstock.runtime.named import load_callable, nearest

ENVIRONMENTS: Mapping[str, str] = {
    "copy": "penstock.envs.tasks:Copy",
    "reverse": "penstock.envs.tasks:Reverse",
    "sort": "penstock.envs.tasks:Sort",
    "arithmetic": "penstock.envs.tasks:Arithmetic",
    "gymnasium": "penstock.envs.io.gymnasium:GymnasiumEnvironment",
    "dataset": "penstock.envs.io.datasets:Dataset",
    "jsonl": "penstock.envs.io.datasets:Dataset",
    "agent": "penstock.envs.io.agents:Agent",
}
"""Built-in environments. Paths, not objects, so that no module is imported before it is used."""

VERIFIERS = "penstock.envs.io.verifiers:Verifiers"
"""The environment of all names that begin with `verifiers:`."""

REWARDS: Mapping[str, str] = {
    "exact_answer": "penstock.envs.rewards:exact_answer",
    "contains_answer": "penstock.envs.rewards:contains_answer",
    "matching_positions": "penstock.envs.rewards:matching_positions",
    "math_verify": "penstock.envs.rewards:math_verify",
}


def find_environment(name: str) -> Callable[..., Any]:
    """The class or factory of that name; ConfigError with the nearest names if there is none."""
    kind, _, ident = name.partition(":")
    if kind == "verifiers" and ident:
        return functools.partial(load_callable("environment", VERIFIERS), id=ident)
    return load_callable("environment", ENVIRONMENTS.get(name, name), ENVIRONMENTS)


def find_reward(name: str) -> Callable[..., Any]:
    """The reward function of that name; ConfigError with the nearest names if there is none."""
    return load_callable("reward function", REWARDS.get(name, name), REWARDS)


def make_environment(name: str, options: Mapping[str, Any] | None = None) -> Any:
    """Builds the environment; an unsupported option is a ConfigError that names the nearest supported one."""
    factory = find_environment(name)
    options = dict(options or {})
    check_options(f"environment {name!r}", factory, options)
    return factory(**options)


def rubric_of(section: EnvSection, environment: Any) -> Rubric:
    """The configured reward functions, else the environment's own rubric or `score`."""
    if section.rewards:
        return Rubric([find_reward(name) for name in section.rewards], section.reward_weights or None)
    own = getattr(environment, "rubric", None)
    return own if isinstance(own, Rubric) else Rubric([environment.score])


def scoring_of(owner: str, section: EnvSection, environment: Any) -> list[tuple[str, Callable[..., Any]]]:
    """The functions that score its completions, each with its name for error messages."""
    if section.rewards:
        return [(f"reward {name!r}", find_reward(name)) for name in section.rewards]
    own = getattr(environment, "rubric", None)
    if not isinstance(own, Rubric):
        return [(f"{owner}: score", environment.score)]
    return [(f"reward {name!r}", function) for name, function in zip(own.names, own.functions, strict=True)]


def check_options(owner: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises ConfigError unless `factory(**options)` is a valid call."""
    signature = inspect.signature(factory)
    parameters = signature.parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        for option in options:
            if option not in parameters:
                raise ConfigError(f"{owner} has no option {option!r}{nearest(option, parameters)}")
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(f"{owner}: {error}; its options are {', '.join(parameters) or 'none'}") from error
