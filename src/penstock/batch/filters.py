"""Filters that drop finished groups before training.

A group filter receives the rewards and lengths of one whole group and returns the reason to drop it, or None to keep
it. It needs only scalars, so the controller can call it without reading a payload. It is named in the configuration,
either one of `NAMED` or `package.module:function`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.errors import RunFailed
from penstock.runtime.named import described, load_callable

GroupFilter = Callable[[Sequence[float], Sequence[int]], str | None]
"""`(rewards, lengths) -> reason | None`."""

TOLERANCE = 1e-9
"""Rewards that differ by no more than this are equal up to rounding."""


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
    """One filter that calls all of these, in order, and returns the first reason. None if there are none.

    RunFailed if one of them raises, or returns anything but a reason or None: it would fail for every group.
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
                    f"filter {name!r} must return the reason to drop a group, as a string, or None to keep it; "
                    f"it returned {reason!r}"
                )
        return None

    return first_reason if filters else None
