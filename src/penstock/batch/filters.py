"""Which finished groups are not worth training on.

A group filter looks at the rewards and lengths of one whole group and returns why the group should be dropped, or
None to keep it. It decides from scalars alone, so the controller can ask it without touching a payload. It is named in
the configuration, either one of `NAMED` or `package.module:function`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.errors import RunFailed
from penstock.runtime.named import described, load_callable

GroupFilter = Callable[[Sequence[float], Sequence[int]], str | None]
"""`(rewards, lengths) -> reason | None`."""

TOLERANCE = 1e-9
"""Rewards that differ by no more than this are the same but for rounding."""


def zero_signal(rewards: Sequence[float], lengths: Sequence[int]) -> str | None:
    """Drops groups whose rewards are all equal: their advantages are zero. A group of one has no signal to lose."""
    if len(rewards) < 2 or max(rewards) - min(rewards) > TOLERANCE:
        return None
    return f"zero signal: all {len(rewards)} rewards are {rewards[0]:g}"


NAMED: dict[str, GroupFilter] = {"zero_signal": zero_signal}


def resolve(name: str) -> GroupFilter:
    """The filter called `name` in `NAMED`, or at the import path `package.module:function`."""
    return NAMED[name] if name in NAMED else load_callable("filter", name, NAMED)


def build(names: Sequence[str]) -> GroupFilter | None:
    """One filter that asks all of these, in order; the first reason wins. None if there are none to ask.

    RunFailed if one of them raises, or gives something else than a reason: it is broken for every group.
    """
    filters = [(name, resolve(name)) for name in names]

    def first_reason(rewards: Sequence[float], lengths: Sequence[int]) -> str | None:
        for name, group_filter in filters:
            try:
                reason = group_filter(rewards, lengths)
            except Exception as error:
                raise RunFailed(f"filter {name!r} raised {described(error)}") from error
            if isinstance(reason, str):
                return reason
            if reason is not None:
                raise RunFailed(
                    f"filter {name!r} must return why a group is dropped, as a text, or None to keep it; "
                    f"it returned {reason!r}"
                )
        return None

    return first_reason if filters else None
