"""`[pipeline.weights]`: how new versions reach the engines."""

from __future__ import annotations

from typing import Literal

from penstock.records.section import NonNegative, Positive, Seconds, Section


class WeightsSection(Section):
    way: Literal["staged", "in_place"] = "staged"
    """`staged` loads beside the serving weights and swaps; `in_place` saves memory and pauses generation."""
    transport: Literal["auto", "files", "pull", "broadcast"] = "auto"
    """How versions reach the workers: `files` of a directory they share with the trainer; `pull` over the network, by
    the payloads' transport; `broadcast` to all who wait, and to stragglers as `auto` does; `auto` takes the nearest:
    device memory on the trainer's GPU, files on its host, pull elsewhere."""
    streams: Positive = 4
    """Connections that one worker pulls with at once."""
    keep: Positive = 3
    """Versions kept on disk."""
    deadline_s: Seconds = 60.0
    """How long one update of one worker may take."""
    on_fault: Literal["restore", "evict", "fail"] = "restore"
    """What becomes of an engine that holds a mixture of versions: it is given a whole one, its worker is replaced,
    or the run fails."""
    min_healthy: NonNegative = 0
    """Workers that must serve: none of them is replaced while fewer others do."""
    unhealthy_timeout_s: Seconds = 600.0
    """How long fewer than `min_healthy` workers may serve before the run fails."""
    unloaded_timeout_s: Seconds = 300.0
    """How long a worker may hold no complete version before it is replaced."""
    behind_s: Seconds = 5.0
    """How long a worker may serve older weights, with no update under way, before a warning names it."""
    max_fleet_restarts: NonNegative = 1
    """How often all workers may be restarted together because none of them can load the newest version."""
