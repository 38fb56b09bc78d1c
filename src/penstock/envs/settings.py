"""`[pipeline.env]`: what is learned."""

from __future__ import annotations

from typing import Any

from penstock.records.section import NonNegative, Positive, Seconds, Section

Option = str | int | float | bool


class RewardSection(Section):
    """Of `[pipeline.env]`: how reward functions are called."""

    reward_timeout_s: Seconds = 120.0
    """How long one call of a reward function may take. The samples of a call that takes longer have no reward, with
    that reason on record."""
    reward_concurrency: Positive = 64
    """Calls of reward functions in flight in one worker, each for one group. As many groups wait for rewards at
    most."""
    reward_processes: NonNegative | None = None
    """Processes of each worker that run reward functions which are not `async def`. Unset: threads, until a call misses
    its deadline there; a thread cannot be stopped, so all later calls go to up to 8 processes. A number: that many
    processes from the start, for rewards that compute in Python for long or may hang without releasing the interpreter.
    0: threads only."""
    reward_on_error: float | None = None
    """The reward of a sample for which a reward function raised, was too late, or gave `None`, or whose environment
    raised in its reply. Unset: it has none, and is left out of its group's advantages; if the whole group has none, or
    the environment raised, it is generated again, so that what made it fail is not learned from."""


class EnvSection(RewardSection):
    name: str
    """A built-in task (`copy`, `reverse`, `sort`, `arithmetic`), `gymnasium` (with `options.id`), `dataset` (with
    `options.path`), `agent` (with `options.function` or `options.command`), `verifiers:ID` for an environment of the
    package verifiers, or your own as `package.module:Name`."""
    options: dict[str, Option | list[str] | list[int] | list[float] | dict[str, Any]] = {}
    """Passed to the environment as keyword arguments."""
    rewards: list[str] = []
    """Reward functions used instead of the task's own: `exact_answer`, `contains_answer`, `matching_positions`, or your
    own `f(prompts, completions, **columns) -> list[float | None]` as `package.module:function`."""
    reward_weights: list[float] = []
    """One weight per reward function; all equal when empty."""
