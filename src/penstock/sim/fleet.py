"""The controller's side of the weights in the simulation: the real transaction, with its effects carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.records.ids import MemberId
from penstock.records.weights import Manifest
from penstock.weights import events
from penstock.weights.fleet import TransactionSettings
from penstock.weights.transaction import WeightTransaction


class SimFleet:
    """Which replicas may lease, and which must go. Lost with the controller, and rebuilt from reports."""

    def __init__(self, settings: TransactionSettings, wake: Callable[[str], None]) -> None:
        self.transaction = WeightTransaction(settings)
        self.fenced: dict[MemberId, str] = {}
        self.evicted: dict[MemberId, str] = {}
        """Replicas that must be replaced; emptied by the owner."""
        self.dismissed: dict[MemberId, str] = {}
        """Trainers that must be gone, so that another can start; emptied by the owner."""
        self.admission_stopped = ""
        self.failure = ""
        self._wake = wake
        self._trainer: MemberId | None = None

    def offer(self, member: MemberId, held_digest: str, now: float) -> Manifest | None:
        """What to answer a replica that waits for weights; None while it holds the newest, or is to get none."""
        newest = self.transaction.newest
        if newest is None or newest.digest == held_digest:
            return None
        offered = self.tell(events.WeightsAsked(member, held_digest), now)
        return offered.manifest if offered is not None else None

    def reconcile(
        self, live: frozenset[MemberId], trainer: MemberId | None, lost: Mapping[MemberId, str], now: float
    ) -> None:
        """Who is a member now, and why others are not."""
        self.tell(events.MembershipReconciled(live), now)
        if trainer is not None:
            if self.transaction.trainer_lost:
                self.tell(events.TrainerReturned(trainer), now)
            self._trainer = trainer
        elif self._trainer is not None and self._trainer in lost:
            self.tell(events.TrainerLost(lost[self._trainer], self._trainer), now)
        elif self._trainer is not None:
            self.tell(events.TrainerLeft(), now)

    def tell(self, event: events.TransactionEvent, now: float) -> events.OfferVersion | None:
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
                case events.EvictReplica(member=member, reason=reason):
                    self.evicted[member] = reason
                case events.StopAdmission(reason=reason):
                    self.admission_stopped = reason
                case events.OpenAdmission():
                    self.admission_stopped = ""
                case events.FailRun(sentence=sentence):
                    self.failure = sentence
                case events.CheckpointTrainer():
                    self._wake("checkpoint")
                case events.RestartFleet():
                    pass  # an eviction of each replica follows
                case events.RestartTrainer(reason=reason, member=member):
                    self.dismissed[member] = reason
        if self.transaction.newest is not newest:
            self._wake("weights")
        self.transaction.check()
        return offered
