"""The controller's view of all replicas of a pipeline: feeds the weight transaction and keeps what follows from it."""

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
    """Which replicas may lease, and which must go.

    Rebuilt from reports after a restart, so it needs no journal: replicas that cannot load the newest version say so
    again, and the trainer is asked again for what is still wanted of it. `wake` lets held calls look again: "weights"
    when another version is offered, "checkpoint" when one is wanted. `say` gets a line for people.
    """

    def __init__(
        self,
        settings: WeightsSection,
        published: Callable[[], PublishedVersions],
        wake: Callable[[Topic], None],
        say: Callable[[Level, str], None],
    ) -> None:
        self.transaction = WeightTransaction(settings, published)
        self.fenced: dict[MemberId, str] = {}
        """Replicas that may not lease, and why."""
        self.evicted: dict[MemberId, str] = {}
        """Replicas that must be replaced; emptied by the owner."""
        self.dismissed: dict[MemberId, str] = {}
        """Trainers that are no longer members and must be gone, so that another can start; emptied by the owner."""
        self.admission_stopped: str = ""
        self.failure: str = ""
        self._wake = wake
        self._say = say
        self._trainer: MemberId | None = None

    def offer(self, member: MemberId, held: Held, now: float) -> Manifest | None:
        """What to answer a replica that waits for weights; None while it holds the newest, or is to get none."""
        newest = self.transaction.newest
        if newest is None or newest.held == held:
            return None
        offered = self.tell(events.WeightsAsked(member, held), now)
        return offered.manifest if offered is not None else None

    def holds_back(self, member: MemberId) -> Literal["throttled", "version_too_old"] | None:
        """Why a replica is leased nothing: no version can be loaded at all, or this one may not serve."""
        if self.admission_stopped:
            return "throttled"
        return "version_too_old" if member in self.fenced else None

    def is_steady(self, member: MemberId, version: Version) -> bool:
        """Whether a replica serves `version`, as far as is known, and no update of it is under way."""
        replica = self.transaction.replicas.get(member)
        if replica is None or replica.offered:
            return replica is None
        return replica.state is not ReplicaState.SERVING or replica.version == version

    def reconcile(
        self, live: frozenset[MemberId], trainer: MemberId | None, lost: Mapping[MemberId, str], now: float
    ) -> None:
        """Who is a member now, and why others are not. A trainer that deregistered is not among the lost."""
        self.tell(events.MembershipReconciled(live), now)
        if trainer is not None:
            if self.transaction.trainer_lost:
                self.tell(events.TrainerReturned(), now)
            self._trainer = trainer
        elif self._trainer is not None and self._trainer in lost:
            self.tell(events.TrainerLost(lost[self._trainer], self._trainer), now)
        elif self._trainer is not None:
            self.tell(events.TrainerLeft(), now)

    def tell(self, event: events.TransactionEvent, now: float) -> events.OfferVersion | None:
        """Feeds one event, and gives the offer it made to the asker, if it did."""
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
                        self._say("warning", f"{member} may not generate: {reason}")
                case events.EvictReplica(member=member, reason=reason):
                    self.evicted[member] = reason
                case events.StopAdmission(reason=reason):
                    self.admission_stopped = reason
                    self._say("warning", f"no new prompts are issued: {reason}")
                case events.OpenAdmission():
                    self.admission_stopped = ""
                    self._say("info", "a replica serves again, prompts are issued")
                    self._wake("leases")
                case events.NameReplica(member=member, reason=reason):
                    self._say("warning", f"{member} {reason}")
                case events.FailRun(sentence=sentence):
                    self.failure = sentence
                case events.CheckpointTrainer(reason=reason):
                    self._say("warning", f"the trainer is asked for a checkpoint: {reason}")
                    self._wake("checkpoint")
                case events.RestartFleet(manifest=manifest, reason=reason):  # an eviction of each replica follows
                    self._say("warning", f"all replicas are restarted, from version {manifest.version}: {reason}")
                case events.RestartTrainer(reason=reason, member=member):
                    self._say("warning", f"the trainer is restarted from its checkpoint: {reason}")
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
