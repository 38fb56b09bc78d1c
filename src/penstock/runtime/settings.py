"""`[lag]`: how every process watches its own event loop."""

from __future__ import annotations

from penstock.records.section import Positive, Seconds, Section


class LagSection(Section):
    """How every process watches its own event loop."""

    period_s: Seconds = 0.1
    """Seconds between two measurements of the lag of the loop."""
    window: Positive = 600
    """Number of measurements that the percentiles cover."""
    stall_s: Seconds = 0.5
    """A loop that is blocked for this long is logged while it is blocked, with the stack that blocks it."""
    warn_p99_s: Seconds = 0.1
    """Log a warning when the 99th percentile of the lag reaches this."""
    warn_every_s: Seconds = 60.0
    """Minimum seconds between two such warnings."""
