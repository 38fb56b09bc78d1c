"""Reward functions: `f(prompts, completions, **columns) -> list[float | None]`, combined by weight and checked.

Arguments are bound by the names of the parameters, in any order: a function takes what it names of `prompts`,
`completions`, the columns of the prompts and `OPTIONAL_COLUMNS`, or with `**columns` all of them.

A function may be `async def`. It is called once per group of samples, or with `f.batched = True` once for all waiting
groups. A function that *raises* for several completions is called for each alone, so that only the samples that it
cannot score are lost; so are those for which it returns a number that is not finite. One that returns something else
than one number (or None: not applicable) per completion is broken for all prompts: the run fails, and the error names
the function.
"""

from __future__ import annotations

import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar

import msgspec

from penstock.errors import ConfigError, PeerLost, RunFailed
from penstock.runtime.named import described

RewardFunction = Callable[..., Any]
"""Returns one float or None per completion, or something to await for that."""
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
Columns = Mapping[str, Sequence[Any]]

OPTIONAL_COLUMNS = ("ended", "token_counts", "completion_ids", "conversations")
"""Passed to a reward function that takes a parameter of this name, each with one entry per completion: how it ended
("stop", "length" or "context"), the number of tokens that the policy drew, the tokens of the completion, and all
messages of its conversation, the completion included. A column of the same name has priority."""
PROMPT_CHARACTERS = 80
"""Of a prompt in a sentence."""


class NoReward(msgspec.Struct, frozen=True):
    """A completion has no reward, because the function raised or was too slow."""

    reason: str


Values = list[float | NoReward | None]
"""The values of one reward function, one per completion; None where it does not apply."""


class Scored(msgspec.Struct):
    """The reward of one completion."""

    reward: float | None
    """None where no function applies, or one of them failed."""
    parts: dict[str, float | None]
    """The value of each function, before its weight."""
    error: str = ""
    """Why there is no reward, if a function failed."""


class Rubric:
    """Reward functions with weights. A completion to which no function applies has no reward (None)."""

    def __init__(self, functions: Sequence[RewardFunction], weights: Sequence[float] | None = None) -> None:
        if not functions:
            raise ConfigError("a rubric needs at least one reward function, found none")
        if weights is not None and len(weights) != len(functions):
            raise ConfigError(f"reward weights: expected one per function ({len(functions)}), found {len(weights)}")
        self.functions = tuple(functions)
        self.weights = tuple(weights) if weights is not None else (1.0,) * len(functions)
        self.names = _distinct([reward_name(function) for function in functions])

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | None]:
        """The weighted sums. Calls every function in this thread; its exceptions propagate."""
        columns_values: list[Values] = []
        for name, function in zip(self.names, self.functions, strict=True):
            columns_values.append(checked(name, call_by_name(function, prompts, completions, columns), prompts))
        scored = self.combine(columns_values)
        for one in scored:
            if one.error:
                raise ValueError(one.error)
        return [one.reward for one in scored]

    def combine(self, values: Sequence[Values]) -> list[Scored]:
        """One `Scored` per completion from the values of every function, in the order of the functions."""
        return [self._scored(row) for row in zip(*values, strict=True)]

    def _scored(self, row: tuple[float | NoReward | None, ...]) -> Scored:
        parts: dict[str, float | None] = {}
        total: float | None = None
        error = ""
        for name, weight, value in zip(self.names, self.weights, row, strict=True):
            if isinstance(value, NoReward):
                error = error or value.reason
                continue
            parts[name] = value
            if value is not None:
                total = (total or 0.0) + weight * value
        return Scored(None if error else total, parts, error)

    def __repr__(self) -> str:
        return f"Rubric({dict(zip(self.names, self.weights, strict=True))})"


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call returns an awaitable."""
    function = _unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def inline(function: FunctionT) -> FunctionT:
    """Marks a reward function that needs only microseconds: it is called directly, without a thread or process."""
    function.inline = True  # type: ignore[attr-defined]
    return function


def values_of(
    name: str, function: Callable[..., Any], prompts: Sequence[Any], completions: Sequence[str], columns: Columns
) -> Values:
    """Calls a function that is not async; if it raises for several completions, calls it for each alone."""
    try:
        return checked(name, call_by_name(function, prompts, completions, columns), prompts)
    except (RunFailed, PeerLost):
        raise
    except Exception as error:  # noqa: BLE001 - costs the samples that it cannot score
        if len(completions) == 1:
            return [_raised(name, error)]
    rows = [_row(row, prompts, completions, columns) for row in range(len(completions))]
    return [value for row in rows for value in values_of(name, function, *row)]


async def awaited_values_of(
    name: str, function: Callable[..., Any], prompts: Sequence[Any], completions: Sequence[str], columns: Columns
) -> Values:
    """The same for an `async def` function."""
    try:
        return checked(name, await call_by_name(function, prompts, completions, columns), prompts)
    except (RunFailed, PeerLost):
        raise
    except Exception as error:  # noqa: BLE001 - costs the samples that it cannot score
        if len(completions) == 1:
            return [_raised(name, error)]
    rows = [_row(row, prompts, completions, columns) for row in range(len(completions))]
    return [value for row in rows for value in await awaited_values_of(name, function, *row)]


def _row(
    row: int, prompts: Sequence[Any], completions: Sequence[str], columns: Columns
) -> tuple[Sequence[Any], Sequence[str], Columns]:
    return [prompts[row]], [completions[row]], {name: [values[row]] for name, values in columns.items()}


def _raised(name: str, error: Exception) -> NoReward:
    return NoReward(f"reward function {name!r} raised {described(error)}")


def call_by_name(
    function: Callable[..., Any], prompts: Sequence[Any], completions: Sequence[str], columns: Columns
) -> Any:
    """Calls the function with what its parameters name."""
    available = {**columns, "prompts": prompts, "completions": completions}
    positional, keywords = arguments_of(reward_name(function), function, available)
    return function(*positional, **keywords)


def arguments_of(
    owner: str, function: Callable[..., Any], available: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call: what the parameters name, and with `**columns` everything. Raises ConfigError for a
    parameter that is not available."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{owner}: its parameters cannot be read ({error}); name a Python function") from error
    kinds = {parameter.kind for parameter in parameters}
    named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    if not named and inspect.Parameter.VAR_POSITIONAL in kinds and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ConfigError(f"{owner} takes only *{next(iter(parameters)).name}, but is called by name: use **columns")
    for one in named:
        if one.name not in available and one.default is one.empty:
            raise ConfigError(
                f"{owner} has a parameter {one.name!r}, which nothing provides. Parameters are bound by name, to "
                f"{', '.join(available)}: rename it, or give it a default"
            )
    given = {one.name: available[one.name] for one in named if one.name in available}
    positional = [given.pop(one.name) for one in named if one.kind is one.POSITIONAL_ONLY and one.name in given]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        names = {one.name for one in named}
        given |= {name: values for name, values in available.items() if name not in names}
    return positional, given


def checked(name: str, values: Any, prompts: Sequence[Any]) -> Values:
    """The returned rewards as floats, one per prompt; raises RunFailed that names the function."""
    if hasattr(values, "tolist"):  # an array
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise RunFailed(
            f"reward function {name!r} must return a list of numbers, one per completion; "
            f"it returned {type(values).__name__}"
        )
    if len(values) != len(prompts):
        raise RunFailed(
            f"reward function {name!r} must return one reward per completion: expected {len(prompts)}, found "
            f"{len(values)}"
        )
    return [_number(name, row, value, prompts[row]) for row, value in enumerate(values)]


def _number(name: str, row: int, value: Any, prompt: Any) -> float | NoReward | None:
    if getattr(value, "ndim", None) == 0:  # a scalar of numpy, or a tensor
        value = value.item()
    if value is None:
        return None
    if not isinstance(value, Real):
        raise RunFailed(
            f"reward function {name!r} must return numbers (or None where it does not apply); "
            f"for completion {row} it returned {type(value).__name__} {value!r}"
        )
    number = float(value)
    if not math.isfinite(number):
        return NoReward(
            f"reward function {name!r} returned {number} for a completion of the prompt "
            f"{textwrap.shorten(str(prompt), PROMPT_CHARACTERS)!r}; rewards must be finite"
        )
    return number


def reward_name(function: Callable[..., Any]) -> str:
    """The name of a reward function in metrics and errors."""
    function = _unwrapped(function)
    return getattr(function, "__name__", type(function).__name__)


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    distinct: list[str] = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        distinct.append(name if counts[name] == 1 else f"{name}_{counts[name]}")
    return tuple(distinct)


@inline
def exact_answer(
    prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """1 when the completion, stripped, equals the `answer` column."""
    return [
        None if expected_answer is None else float(completion.strip() == str(expected_answer).strip())
        for completion, expected_answer in zip(completions, answer, strict=True)
    ]


@inline
def contains_answer(
    prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """1 when the `answer` column occurs anywhere in the completion."""
    return [
        None if expected_answer is None else float(str(expected_answer).strip() in completion)
        for completion, expected_answer in zip(completions, answer, strict=True)
    ]


@inline
def matching_positions(
    prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """The share of positions that agree with the `answer` column; missing and surplus characters count as wrong."""
    return [
        None if expected_answer is None else position_match(completion, str(expected_answer))
        for completion, expected_answer in zip(completions, answer, strict=True)
    ]


def position_match(completion: str, expected_answer: str) -> float:
    """The share of positions at which two strings agree, of the longer one."""
    longest = max(len(completion), len(expected_answer))
    if longest == 0:
        return 1.0
    return sum(given == due for given, due in zip(completion, expected_answer, strict=False)) / longest


def math_verify(
    prompts: Sequence[Any], completions: Sequence[str], answer: Sequence[Any], **_: Any
) -> list[float | None]:
    """1 when the completion's last formula is equal to the `answer` column as mathematics. Needs the extra `data`."""
    try:
        from math_verify import parse, verify  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise RunFailed("reward 'math_verify' needs the extra `data`: pip install 'penstock-rl[data]'") from error

    options: Any = {"parsing_timeout": None}

    # Its deadlines use signals, which only work in a main thread; `env.reward_timeout_s` is the deadline here.
    def equal(completion: str, expected_answer: Any) -> bool:
        gold, given = parse(f"${expected_answer}$", **options), parse(completion, **options)
        return verify(gold, given, timeout_seconds=None)

    return [
        None if expected_answer is None else float(equal(completion, expected_answer))
        for completion, expected_answer in zip(completions, answer, strict=True)
    ]
