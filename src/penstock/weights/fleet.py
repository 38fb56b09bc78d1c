"""What the controller's side keeps: one record per replica, and the counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from penstock.errors import LocalProtocolError
from penstock.records.ids import MemberId, Version
from penstock.records.weights import NOTHING_HELD, Held
from penstock.weights.replica import ReplicaState


class ReplicaRecord(msgspec.Struct):
    """What the controller knows of one replica."""

    state: ReplicaState = ReplicaState.STALE
    version: Version = Version(-1)
    digest: str = ""
    admitted: bool = False
    asked: bool = False
    """Has asked for weights: one that never did may be asleep by order of the pool, and owes nothing."""
    waiting: bool = False
    """Asks for weights right now and has no answer yet."""
    offered: str = ""
    """Digest of the open offer."""
    since: float = 0.0
    """When the offer was made, or else when the state was entered."""
    behind_since: float | None = None
    """Since when it has lacked the newest version with no update under way."""
    named: bool = False
    """Whether that was said."""
    failures: int = 0
    overdue: int = 0
    damaged: Held | None = None
    """The version it found damaged: not offered to it again until it is published afresh, or a newer one is."""
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
    def lies_idle(self) -> bool:
        """Awake, but neither serving nor loading."""
        return self.asked and not self.admitted and not self.offered

    def note(self, error: str) -> None:
        """The first error is the cause; what follows stands beside it."""
        if not self.first_error:
            self.first_error = error
        else:
            self.later_errors = [*self.later_errors[-7:], error]

    def check(self, member: MemberId) -> None:
        """Raises if the record contradicts itself."""
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
    """Figures by metric name. `behind` is how many versions each replica lacks: the whole backlog there is."""
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
