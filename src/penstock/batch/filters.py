"""Which finished groups are not worth training on.

A group filter looks at the rewards and lengths of one whole group and returns why the group should be dropped, or
None to keep it. It decides from scalars alone, so the controller can ask it without touching a payload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from penstock.batch.advantage import load_function
from penstock.errors import ConfigError

GroupFilter = Callable[[Sequence[float], Sequence[int]], str | None]
"""`(rewards, lengths) -> reason | None`."""


class FilterSettings(msgspec.Struct, frozen=True):
    """What to drop. The default keeps everything."""

    zero_signal: bool = False
    """Drop groups whose rewards are all equal: their advantages are zero."""
    signal_tolerance: float = 1e-9
    min_length: int | None = None
    """Drop groups in which every sample is shorter than this."""
    max_length: int | None = None
    """Drop groups in which every sample is longer than this."""
    custom: tuple[str, ...] = ()
    """Import paths `package.module:function` of further group filters, asked in this order."""


def build(settings: FilterSettings) -> GroupFilter:
    """One filter that asks all the configured ones; the first reason wins."""
    filters: list[GroupFilter] = []
    if settings.zero_signal:
        filters.append(zero_signal(settings.signal_tolerance))
    if settings.min_length is not None or settings.max_length is not None:
        filters.append(length(settings.min_length, settings.max_length))
    filters.extend(load_function(path, "filter", {"zero_signal": None, "length": None}) for path in settings.custom)

    def first_reason(rewards: Sequence[float], lengths: Sequence[int]) -> str | None:
        for group_filter in filters:
            reason = group_filter(rewards, lengths)
            if reason is not None:
                return reason
        return None

    return first_reason


def zero_signal(tolerance: float = 1e-9) -> GroupFilter:
    """Drops groups whose rewards differ by no more than `tolerance`. A group of one has no group signal to lose."""

    def decide(rewards: Sequence[float], lengths: Sequence[int]) -> str | None:
        if len(rewards) < 2 or max(rewards) - min(rewards) > tolerance:
            return None
        return f"zero signal: all {len(rewards)} rewards are {rewards[0]:g}"

    return decide


def length(shortest: int | None = None, longest: int | None = None) -> GroupFilter:
    """Drops groups in which no sample has a length in [shortest, longest]."""
    low = 0 if shortest is None else shortest
    high = float("inf") if longest is None else longest
    if low > high:
        raise ConfigError(f"the length filter keeps lengths from {low} to {high}: that is none at all")

    def decide(rewards: Sequence[float], lengths: Sequence[int]) -> str | None:
        if not lengths or any(low <= sample_length <= high for sample_length in lengths):
            return None
        return (
            f"length: all {len(lengths)} samples are outside {low} to {high} (found {min(lengths)} to {max(lengths)})"
        )

    return decide
