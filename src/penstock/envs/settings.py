"""`[pipeline.env]`: the environment."""

from __future__ import annotations

from typing import Annotated, Any

from penstock.records.section import LANGUAGE_ONLY, NonNegative, Positive, Seconds, Section

Option = str | int | float | bool


class RewardSection(Section):
    """The keys of `[pipeline.env]` for calls of reward functions."""

    reward_timeout_s: Annotated[Seconds, LANGUAGE_ONLY] = 120.0
    """Deadline of one call of a reward function. The samples of a late call have no reward, and the reason is
    recorded."""
    reward_concurrency: Annotated[Positive, LANGUAGE_ONLY] = 64
    """Calls of reward functions in flight in one worker, each for one group; also the most groups that wait for
    rewards."""
    reward_processes: Annotated[NonNegative | None, LANGUAGE_ONLY] = None
    """Processes of each worker that run reward functions which are not `async def`. Unset: threads, until a call misses
    its deadline; a thread cannot be stopped, so all later calls run in up to 8 processes. A number: this number of
    processes from the start, for rewards that compute in Python for long or may hang while they hold the GIL. 0:
    threads only."""
    reward_on_error: Annotated[float | None, LANGUAGE_ONLY] = None
    """The reward of a sample for which a reward function raised, was late, or returned `None`, or whose environment
    raised in its reply. Unset: it has none, and is left out of its group's advantages; if the whole group has none, or
    the environment raised, it is generated again, so that the policy does not learn from the failure."""


class EnvSection(RewardSection):
    name: str
    """A built-in task (`copy`, `reverse`, `sort`, `arithmetic`), `gymnasium` (with `options.id`), `dataset` (with
    `options.path`), `agent` (with `options.function` or `options.command`), `verifiers:ID` for an environment of the
    package verifiers, or your own as `package.module:Name`."""
    options: dict[str, Option | list[str] | list[int] | list[float] | dict[str, Any]] = {}
    """Passed to the environment as keyword arguments."""
    rewards: Annotated[list[str], LANGUAGE_ONLY] = []
    """Reward functions used instead of the task's own: `exact_answer`, `contains_answer`, `matching_positions`, or your
    own `f(prompts, completions, **columns) -> list[float | None]` as `package.module:function`."""
    reward_weights: Annotated[list[float], LANGUAGE_ONLY] = []
    """One weight per reward function; all equal when empty."""
