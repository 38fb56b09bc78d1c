"""What the controller's side keeps: the settings, one record per replica, and the counts."""

from __future__ import annotations

import msgspec

from penstock.records.ids import Version
from penstock.weights.faults import Policy
from penstock.weights.replica import ReplicaState


class TransactionSettings(msgspec.Struct, frozen=True):
    policy: Policy = "restore"
    """What becomes of a replica that holds a mixture."""
    min_healthy: int = 1
    update_timeout_s: float = 300.0
    """From an offer to the report of its outcome."""
    fenced_timeout_s: float = 300.0
    """How long a replica may hold no complete version before it is replaced."""
    unhealthy_timeout_s: float = 600.0
    """How long fewer than `min_healthy` replicas may serve before the run fails."""
    history: int = 64
    """Published versions whose digests are remembered."""
    max_fleet_restarts: int = 1


class ReplicaRecord(msgspec.Struct):
    """What the controller knows of one replica."""

    state: ReplicaState = ReplicaState.STALE
    version: Version = Version(-1)
    digest: str = ""
    admitted: bool = False
    waiting: bool = False
    """Asks for weights right now and has no answer yet."""
    offered: str = ""
    """Digest of the open offer."""
    since: float = 0.0
    """When the offer was made, or else when the state was entered."""
    failures: int = 0
    overdue: int = 0
    evicting: bool = False
    first_error: str = ""
    later_errors: list[str] = []
    pause_s: float = 0.0


class TransactionStatistics(msgspec.Struct):
    """Counted since the start, for metrics."""

    published: int = 0
    offers: int = 0
    updates: int = 0
    skipped_versions: int = 0
    failures: int = 0
    evictions: int = 0
    mismatches: int = 0
