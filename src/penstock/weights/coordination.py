"""The controller's view of a pipeline's replicas: passes events to the weight transaction and applies its effects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from penstock.records.ids import MemberId, Version
from penstock.records.weights import Held, Manifest
from penstock.weights import events
from penstock.weights.published import PublishedVersions
from penstock.weights.replica import ReplicaState
from penstock.weights.settings import WeightsSection
from penstock.weights.transaction import WeightTransaction

Level = Literal["info", "warning"]
Topic = Literal["leases", "weights", "checkpoint"]


class Coordination:
    """Which replicas may lease, and which must be replaced.

    Rebuilt from reports after a restart, so it needs no journal: replicas that cannot load the newest version report
    that again, and open requests to the trainer are repeated. `wake` makes held calls check again: "leases" when
    admission opens, "weights" when another version is offered, "checkpoint" when one is requested. `log` receives a
    line for users.
    """

    def __init__(
        self,
        settings: WeightsSection,
        published: Callable[[], PublishedVersions],
        wake: Callable[[Topic], None],
        log: Callable[[Level, str], None],
    ) -> None:
        self.transaction = WeightTransaction(settings, published)
        self.fenced: dict[MemberId, str] = {}
        """Replicas that may not lease, and why."""
        self.evicted: dict[MemberId, str] = {}
        """Replicas that must be replaced; emptied by the owner."""
        self.dismissed: dict[MemberId, str] = {}
        """Trainers that are not members any more and must end before another can start; emptied by the owner."""
        self.admission_stopped: str = ""
        self.failure: str = ""
        self._wake = wake
        self._log = log
        self._trainer: MemberId | None = None

    def offer(self, member: MemberId, held: Held, now: float) -> Manifest | None:
        """The version for a replica that waits for weights; None while it holds the newest, or must not get one."""
        newest = self.transaction.newest
        if newest is None:
            return None
        if newest.held == held:
            self.handle(events.NewestHeld(member, held), now)
            return None
        offered = self.handle(events.WeightsRequested(member, held), now)
        return offered.manifest if offered is not None else None

    def lease_refusal(self, member: MemberId) -> Literal["throttled", "version_too_old"] | None:
        """Why a replica gets no lease: no version can be loaded at all, or this replica may not serve."""
        if self.admission_stopped:
            return "throttled"
        return "version_too_old" if member in self.fenced else None

    def is_steady(self, member: MemberId, version: Version) -> bool:
        """False if an update of the replica is under way, or if it is recorded as serving another version."""
        replica = self.transaction.replicas.get(member)
        if replica is None or replica.offered:
            return replica is None
        return replica.state is not ReplicaState.SERVING or replica.version == version

    def reconcile(
        self, live: frozenset[MemberId], trainer: MemberId | None, lost: Mapping[MemberId, str], now: float
    ) -> None:
        """Updates the membership. `lost` gives the reason per lost member; a trainer that deregistered is not in it."""
        self.handle(events.MembershipReconciled(live), now)
        if trainer is not None:
            if self.transaction.trainer_lost:
                self.handle(events.TrainerReturned(), now)
            self._trainer = trainer
        elif self._trainer is not None and self._trainer in lost:
            self.handle(events.TrainerLost(lost[self._trainer], self._trainer), now)
        elif self._trainer is not None:
            self.handle(events.TrainerLeft(), now)

    def handle(self, event: events.TransactionEvent, now: float) -> events.OfferVersion | None:
        """Handles one event and applies its effects; returns the offer, if it made one."""
        offered: events.OfferVersion | None = None
        newest = self.transaction.newest
        for effect in self.transaction.handle(event, now):
            match effect:
                case events.OfferVersion():
                    offered = effect
                case events.AdmitReplica(member=member):
                    self.fenced.pop(member, None)
                case events.FenceReplica(member=member, reason=reason):
                    self.fenced[member] = reason
                    if member in self.transaction.replicas:
                        self._log("warning", f"{member} may not generate: {reason}")
                case events.EvictReplica(member=member, reason=reason):
                    self.evicted[member] = reason
                case events.StopAdmission(reason=reason):
                    self.admission_stopped = reason
                    self._log("warning", f"no new prompts are issued: {reason}")
                case events.OpenAdmission():
                    self.admission_stopped = ""
                    self._log("info", "a replica serves again, prompts are issued")
                    self._wake("leases")
                case events.WarnAboutReplica(member=member, reason=reason):
                    self._log("warning", f"{member} {reason}")
                case events.FailRun(sentence=sentence):
                    self.failure = sentence
                case events.CheckpointTrainer(reason=reason):
                    self._log("warning", f"the trainer must save a checkpoint: {reason}")
                    self._wake("checkpoint")
                case events.RestartFleet(manifest=manifest, reason=reason):  # an eviction of each replica follows
                    self._log("warning", f"all replicas are restarted, from version {manifest.version}: {reason}")
                case events.RestartTrainer(reason=reason, member=member):
                    self._log("warning", f"the trainer is restarted from its checkpoint: {reason}")
                    self.dismissed[member] = reason
        if self.transaction.newest is not newest:
            self._wake("weights")
        return offered

    @property
    def replicas(self) -> frozenset[MemberId]:
        return frozenset(self.transaction.replicas)

    def check(self) -> None:
        self.transaction.check()

    def __repr__(self) -> str:
        return f"Coordination({self.transaction!r}, fenced {sorted(self.fenced)}, failure {self.failure!r})"
