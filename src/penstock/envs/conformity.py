"""Whether what a user wrote can be used as an environment: said before any prompt is leased, not after many failed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from penstock.envs.protocol import ConversingEnvironment, TextEnvironment
from penstock.envs.rewards import TOLD, acceptable
from penstock.errors import ConfigError
from penstock.runtime.named import check_call, check_methods, described


def check_class(owner: str, environment: Any, *, scores: bool) -> None:
    """What shows without making one: the methods of a text environment, if it is a class. It `scores` its completions
    itself unless there are reward functions."""
    if inspect.isclass(environment):
        check_methods(owner, environment, TextEnvironment, without=() if scores else ("score",))
        if hasattr(environment, "reply"):
            check_methods(owner, environment, ConversingEnvironment)


def check_counted(owner: str, environment: Any) -> None:
    """What every environment has."""
    if not hasattr(environment, "count"):
        raise ConfigError(f"{owner} has no `count`: how many prompts it has, or None if they never end")


def check_text_environment(
    owner: str, environment: Any, rewards: Sequence[tuple[str, Callable[..., Any]]], *, converses: bool
) -> None:
    """Reads the first prompt: what scores its completions must take its columns."""
    try:
        prompt = environment.prompt(0)
    except Exception as error:
        raise ConfigError(f"{owner}: prompt(0) raised {described(error)}") from error
    if not hasattr(prompt, "shown") or not hasattr(prompt, "columns"):
        found = type(prompt).__name__
        raise ConfigError(f"{owner}: prompt(0) returned a {found}, expected penstock.Prompt(text=…, columns={{…}})")
    if _written(environment.prompt(0)) != _written(prompt):
        raise ConfigError(
            f"{owner}: prompt(0) is another prompt each time. One that was lost is asked for again by its position, by "
            "other processes too: draw what is random from a generator seeded with (seed, position)"
        )
    columns: dict[str, None] = dict.fromkeys([*TOLD, *prompt.columns, *(["turns"] if converses else [])])
    for name, function in rewards:
        check_call(name, function, "prompts", "completions", **acceptable(function, columns))


def _written(prompt: Any) -> str:
    """For a comparison: addresses of objects differ though the objects are alike."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(prompt))
