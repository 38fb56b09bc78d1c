"""`[pipeline.weights]`: how new versions reach the engines."""

from __future__ import annotations

from typing import Literal

from penstock.records.section import NonNegative, Positive, Seconds, Section


class WeightsSection(Section):
    way: Literal["staged", "in_place"] = "staged"
    """`staged` loads into a second buffer and swaps; `in_place` overwrites the served weights, which saves memory and
    pauses generation."""
    transport: Literal["auto", "files", "pull", "broadcast"] = "auto"
    """How workers get a version. `files`: from a directory shared with the trainer. `pull`: over the network, by UCX if
    `payload.transport` is `ucxx`, else by TCP. `broadcast`: to all waiting workers at once; late workers use files or
    `pull`. `auto`: the nearest source: device memory on the trainer's GPU, files on its host, `pull` elsewhere."""
    streams: Positive = 4
    """TCP connections that one worker uses at once for `pull`."""
    keep: Positive = 3
    """Versions kept on disk."""
    deadline_s: Seconds = 60.0
    """How long one update of one worker may take."""
    on_fault: Literal["restore", "evict", "fail"] = "restore"
    """Action for an engine that holds a mixture of versions: `restore` loads a complete one, `evict` replaces the
    worker, `fail` fails the run."""
    min_healthy: NonNegative = 0
    """Workers that must serve. A serving worker is not replaced while fewer others than this serve."""
    unhealthy_timeout_s: Seconds = 600.0
    """How long fewer than `min_healthy` workers may serve before the run fails."""
    unloaded_timeout_s: Seconds = 300.0
    """How long a worker may hold no complete version before it is replaced."""
    behind_s: Seconds = 5.0
    """How long a worker may serve older weights, with no update under way, before a warning is logged."""
    max_fleet_restarts: NonNegative = 1
    """How often all workers may be restarted together because none of them can load the newest version."""
