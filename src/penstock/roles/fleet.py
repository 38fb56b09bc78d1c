"""The controller's view of all replicas of a pipeline: feeds the weight transaction and does what it decides."""

from __future__ import annotations

import logging

from penstock.config.run import WeightsSection
from penstock.records.ids import MemberId
from penstock.weights import events
from penstock.weights.fleet import TransactionSettings
from penstock.weights.replica import ReplicaState
from penstock.weights.transaction import WeightTransaction
from penstock.wire.messages import AskWeights, ReportReplica, Weights

log = logging.getLogger(__name__)


class Fleet:
    """Which replicas may lease, and which must go. Rebuilt from reports after a restart: it needs no journal."""

    def __init__(self, pipeline: str, section: WeightsSection) -> None:
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
        self.admission_stopped: str = ""
        self.failure: str = ""

    def offer(self, request: AskWeights, now: float) -> Weights | None:
        """What to answer a replica that waits for weights."""
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

    def _tell(self, event: events.TransactionEvent, now: float) -> events.OfferVersion | None:
        offered: events.OfferVersion | None = None
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
                case events.FailRun(sentence=sentence):
                    self.failure = sentence
                case events.RestartTrainer() | events.CheckpointTrainer() | events.RestartFleet():
                    # The supervisor starts what ended, the trainer from its last checkpoint; nothing more to do here.
                    log.warning("%s: %s", self.pipeline, effect)
        return offered
