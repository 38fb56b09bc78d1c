"""`[lag]`: how every process watches its own event loop."""

from __future__ import annotations

from penstock.records.section import Positive, Seconds, Section


class LagSection(Section):
    """How every process watches its own event loop."""

    period_s: Seconds = 0.1
    """Between two looks at how late the loop is."""
    window: Positive = 600
    """How many measurements the percentiles cover."""
    stall_s: Seconds = 0.5
    """A loop blocked for this long is reported while it blocks, with the stack that blocks it."""
    warn_p99_s: Seconds = 0.1
    """One line of warning when one look in a hundred finds the loop this late."""
    warn_every_s: Seconds = 60.0
    """Between two such lines."""
