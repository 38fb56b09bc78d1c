"""From the user's configuration to a pipeline's replicas as the controller sees them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.weights.coordination import Coordination, Level
from penstock.weights.events import ReplicaReported
from penstock.weights.fleet import TransactionSettings
from penstock.weights.replica import ReplicaState
from penstock.weights.settings import WeightsSection
from penstock.wire.messages import ReportReplica

log = logging.getLogger(__name__)

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING}


def fleet_of(pipeline: str, section: WeightsSection, wake: Callable[[str], None]) -> Coordination:
    def say(level: Level, line: str) -> None:
        log.log(_LEVELS[level], "%s: %s", pipeline, line)

    settings = TransactionSettings(
        policy=section.on_fault, min_healthy=section.min_healthy, update_timeout_s=section.deadline_s
    )
    return Coordination(settings, wake, say)


def reported(report: ReportReplica) -> ReplicaReported:
    return ReplicaReported(
        member=report.member,
        state=ReplicaState(report.state),
        version=report.version,
        digest=report.digest,
        pause_s=report.pause_s,
        skipped_versions=report.skipped_versions,
        error=report.error,
    )
