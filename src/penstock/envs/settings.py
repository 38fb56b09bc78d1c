"""`[pipeline.env]`: what is learned."""

from __future__ import annotations

from penstock.records.section import Section


class EnvSection(Section):
    name: str
    """A built-in task (`copy`, `reverse`, `sort`, `arithmetic`), `gymnasium` (with `options.id`), `jsonl` (with
    `options.path`), or your own as `package.module:Name`."""
    options: dict[str, str | int | float | bool | list[str] | list[int] | list[float]] = {}
    """Passed to the environment as keyword arguments."""
    rewards: list[str] = []
    """Reward functions used instead of the task's own: `exact_answer`, `contains_answer`, `matching_positions`, or your
    own `f(prompts, completions, **columns) -> list[float | None]` as `package.module:function`."""
    reward_weights: list[float] = []
    """One weight per reward function; all equal when empty."""
