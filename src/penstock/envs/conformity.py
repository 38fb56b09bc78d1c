"""Checks the interface of a user's environment before any prompt is leased."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from penstock.envs.protocol import ConversingEnvironment, TextEnvironment
from penstock.envs.rewards import OPTIONAL_COLUMNS, arguments_of
from penstock.errors import ConfigError
from penstock.runtime.named import check_methods, described


def check_class(owner: str, environment: Any, *, scores: bool) -> None:
    """Checks the methods of a text environment without an instance, if it is a class. `scores`: it needs its own
    `score`, since there are no reward functions."""
    if inspect.isclass(environment):
        check_methods(owner, environment, TextEnvironment, without=("score",))
        if scores and not callable(getattr(environment, "score", None)):
            raise ConfigError(f"{owner} has no method score(prompts, completions), and env.rewards is empty")
        if hasattr(environment, "reply"):
            check_methods(owner, environment, ConversingEnvironment)


def check_counted(owner: str, environment: Any) -> None:
    """Raises ConfigError if it has no `count`."""
    if not hasattr(environment, "count"):
        raise ConfigError(f"{owner} has no `count`: the number of its prompts, or None if they never end")


def check_text_environment(
    owner: str, environment: Any, rewards: Sequence[tuple[str, Callable[..., Any]]], *, converses: bool
) -> None:
    """Reads the first prompt, and checks that the reward functions take its columns."""
    try:
        prompt = environment.prompt(0)
    except Exception as error:
        raise ConfigError(f"{owner}: prompt(0) raised {described(error)}") from error
    if not hasattr(prompt, "shown") or not hasattr(prompt, "columns"):
        found = type(prompt).__name__
        raise ConfigError(f"{owner}: prompt(0) returned a {found}, expected penstock.Prompt(text=…, columns={{…}})")
    if _text_of(environment.prompt(0)) != _text_of(prompt):
        raise ConfigError(
            f"{owner}: prompt(0) is another prompt each time. A lost prompt is requested again by its position, by "
            "other processes too: use a random generator seeded with (seed, position)"
        )
    turns = ["turns"] if converses else []
    available = dict.fromkeys(["prompts", "completions", *prompt.columns, *turns, *OPTIONAL_COLUMNS])
    for name, function in rewards:
        arguments_of(name, function, available)


def _text_of(prompt: Any) -> str:
    """The prompt as text for a comparison, without addresses of objects."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(prompt))
