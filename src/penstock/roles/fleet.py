"""The controller's view of all replicas of a pipeline: feeds the weight transaction and does what it decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from penstock.config.run import WeightsSection
from penstock.records.ids import MemberId
from penstock.weights import events
from penstock.weights.fleet import TransactionSettings
from penstock.weights.replica import ReplicaState
from penstock.weights.transaction import WeightTransaction
from penstock.wire.messages import AskWeights, ReportReplica, Weights

log = logging.getLogger(__name__)


class Fleet:
    """Which replicas may lease, and which must go.

    Rebuilt from reports after a restart, so it needs no journal: replicas that cannot load the newest version say so
    again, and the trainer is asked again for what is still wanted of it. `wake` lets held calls look again: "weights"
    when another version is offered, "checkpoint" when one is wanted.
    """

    def __init__(self, pipeline: str, section: WeightsSection, wake: Callable[[str], None]) -> None:
        self.pipeline = pipeline
        self.transaction = WeightTransaction(
            TransactionSettings(
                policy=section.on_fault, min_healthy=section.min_healthy, update_timeout_s=section.deadline_s
            )
        )
        self.fenced: dict[MemberId, str] = {}
        """Replicas that may not lease, and why."""
        self.evicted: dict[MemberId, str] = {}
        """Replicas that must be replaced; emptied by the owner."""
        self.dismissed: dict[MemberId, str] = {}
        """Trainers that are no longer members and must be gone, so that another can start; emptied by the owner."""
        self.admission_stopped: str = ""
        self.failure: str = ""
        self._wake = wake
        self._trainer: MemberId | None = None

    def offer(self, request: AskWeights, now: float) -> Weights | None:
        """What to answer a replica that waits for weights; None while it holds the newest, or is to get none."""
        newest = self.transaction.newest
        if newest is None or newest.digest == request.held_digest:
            return None
        offered = self._tell(events.WeightsAsked(request.member, request.held_digest), now)
        return Weights(offered.manifest) if offered is not None else None

    def reported(self, report: ReportReplica, now: float) -> None:
        self._tell(
            events.ReplicaReported(
                member=report.member,
                state=ReplicaState(report.state),
                version=report.version,
                digest=report.digest,
                pause_s=report.pause_s,
                skipped_versions=report.skipped_versions,
                error=report.error,
            ),
            now,
        )

    def tell(self, event: events.TransactionEvent, now: float) -> None:
        self._tell(event, now)

    def reconcile(
        self, live: frozenset[MemberId], trainer: MemberId | None, lost: Mapping[MemberId, str], now: float
    ) -> None:
        """Who is a member now, and why others are not. A trainer that left in good order is not among the lost."""
        self._tell(events.MembershipReconciled(live), now)
        if trainer is not None:
            if self.transaction.trainer_lost:
                self._tell(events.TrainerReturned(trainer), now)
            self._trainer = trainer
        elif self._trainer is not None and self._trainer in lost:
            self._tell(events.TrainerLost(lost[self._trainer], self._trainer), now)
        elif self._trainer is not None:
            self._tell(events.TrainerLeft(), now)

    def _tell(self, event: events.TransactionEvent, now: float) -> events.OfferVersion | None:
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
                        log.warning("%s: %s may not generate: %s", self.pipeline, member, reason)
                case events.EvictReplica(member=member, reason=reason):
                    self.evicted[member] = reason
                case events.StopAdmission(reason=reason):
                    self.admission_stopped = reason
                    log.warning("%s: no new prompts are issued: %s", self.pipeline, reason)
                case events.OpenAdmission():
                    self.admission_stopped = ""
                    log.info("%s: a replica serves again, prompts are issued", self.pipeline)
                case events.FailRun(sentence=sentence):
                    self.failure = sentence
                case events.CheckpointTrainer(reason=reason):
                    log.warning("%s: the trainer is asked for a checkpoint: %s", self.pipeline, reason)
                    self._wake("checkpoint")
                case events.RestartFleet(manifest=manifest, reason=reason):  # an eviction of each replica follows
                    line = "%s: all replicas are restarted, from version %d: %s"
                    log.warning(line, self.pipeline, manifest.version, reason)
                case events.RestartTrainer(reason=reason, member=member):
                    log.warning("%s: the trainer is restarted from its checkpoint: %s", self.pipeline, reason)
                    self.dismissed[member] = reason
        if self.transaction.newest is not newest:
            self._wake("weights")
        return offered
