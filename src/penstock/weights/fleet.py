"""The controller's record of each replica, and the counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from penstock.errors import LocalProtocolError
from penstock.records.ids import MemberId, Version
from penstock.records.weights import NOTHING_HELD, Held
from penstock.weights.replica import ReplicaState


class ReplicaRecord(msgspec.Struct):
    """The controller's record of one replica."""

    state: ReplicaState = ReplicaState.STALE
    version: Version = Version(-1)
    digest: str = ""
    admitted: bool = False
    requested: bool = False
    """Has requested weights. One that never did may be asleep by order of the pool: no deadline applies to it."""
    waiting: bool = False
    """Its request for weights has no answer yet."""
    offered: str = ""
    """Digest of the open offer."""
    since: float = 0.0
    """When the offer was made, or else when the state was entered."""
    behind_since: float | None = None
    """Since when it lacks the newest version with no update under way."""
    warned: bool = False
    """Whether a warning was logged about that."""
    failures: int = 0
    overdue: int = 0
    damaged: Held | None = None
    """The version it found damaged: not offered to it until it is republished, or a newer one is published."""
    damages: int = 0
    """Publications it found damaged, since it last loaded one."""
    evicting: bool = False
    first_error: str = ""
    later_errors: list[str] = []
    pause_s: float = 0.0

    @property
    def held(self) -> Held:
        return Held(self.version, self.digest) if self.digest else NOTHING_HELD

    @property
    def is_idle(self) -> bool:
        """Awake, but neither serving nor loading."""
        return self.requested and not self.admitted and not self.offered

    def note(self, error: str) -> None:
        """Keeps the first error, which is the cause, and the last 8 later ones."""
        if not self.first_error:
            self.first_error = error
        else:
            self.later_errors = [*self.later_errors[-7:], error]

    def check(self, member: MemberId) -> None:
        """Raises if the record is inconsistent."""
        if self.admitted and not (self.state is ReplicaState.SERVING and self.digest):
            raise LocalProtocolError(f"{member} is admitted but {self}")
        if self.offered and self.waiting:
            raise LocalProtocolError(f"{member} waits although it has an offer: {self}")
        if self.evicting and (self.admitted or self.offered):
            raise LocalProtocolError(f"{member} is being evicted but still used: {self}")


class TransactionStatistics(msgspec.Struct):
    """Counted since the start, for metrics."""

    published: int = 0
    offers: int = 0
    updates: int = 0
    skipped_versions: int = 0
    failures: int = 0
    damaged: int = 0
    evictions: int = 0
    fleet_restarts: int = 0
    mismatches: int = 0


def metrics_of(
    replicas: Collection[ReplicaRecord], behind: Sequence[int], statistics: TransactionStatistics
) -> dict[str, float]:
    """Values by metric name. `behind` is the number of versions that each replica lacks: the whole backlog."""
    states = Counter(replica.state for replica in replicas)
    return {
        "weights_published_total": statistics.published,
        "weights_updates_total": statistics.updates,
        "weights_update_failures_total": statistics.failures,
        "weights_versions_damaged_total": statistics.damaged,
        "weights_skipped_versions_total": statistics.skipped_versions,
        "weights_evictions_total": statistics.evictions,
        "weights_fleet_restarts_total": statistics.fleet_restarts,
        "weights_mismatches_total": statistics.mismatches,
        "weights_versions_behind_max": max(behind, default=0),
        "weights_versions_behind_mean": sum(behind) / len(behind) if behind else 0.0,
        "weights_offers_open": sum(bool(replica.offered) for replica in replicas),
        "weights_pause_s_max": max((replica.pause_s for replica in replicas), default=0.0),
        **{f"weights_replicas_{state}": states[state] for state in ReplicaState},
    }
