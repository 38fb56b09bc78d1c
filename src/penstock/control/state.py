"""All that a pipeline's control remembers."""

from __future__ import annotations

import msgspec

from penstock.control.admission import ThrottleState
from penstock.control.evaluation_state import EvaluationState
from penstock.control.membership import MembershipState
from penstock.control.samples import LedgerState
from penstock.control.settings import PipelineSettings
from penstock.records.ids import Version
from penstock.records.weights import Manifest
from penstock.weights.published import PublishedVersions
from penstock.wire.messages import Phase

RECENT_STEPS = 16


class StepSummary(msgspec.Struct, frozen=True, array_like=True):
    """What is remembered of a trained step."""

    step: int
    samples: int
    reward_mean: float
    staleness_mean: float
    staleness_max: int


class PipelineState(msgspec.Struct):
    """All that a snapshot carries."""

    ledger: LedgerState
    settings: PipelineSettings | None = None
    """Those that were taken; None in a run that began without taking any."""
    members: MembershipState = msgspec.field(default_factory=MembershipState)
    throttle: ThrottleState = msgspec.field(default_factory=ThrottleState)
    revision: int = 0
    phase: Phase = "running"
    stop_asked: bool = False
    stop_reason: str = ""
    failure: str = ""
    weights: Manifest | None = None
    published: PublishedVersions = msgspec.field(default_factory=PublishedVersions)
    started_at: float | None = None
    """This life of the run."""
    issued_before: int = 0
    """Samples of former lives."""
    last_event_at: float = 0.0
    progressed_at: float = 0.0
    stall_reported_at: float = 0.0
    batch_ready_at: float | None = None
    """Since when the next batch has enough groups."""
    trainer_lost_at: float | None = None
    trainer_left_well: bool = False
    wedged_at: float | None = None
    """When the first process was evicted for want of progress since a sample or a step last came in."""
    set_aside_in_a_row: int = 0
    wrong_weights: int = 0
    recent: list[StepSummary] = msgspec.field(default_factory=list)
    evaluation: EvaluationState = msgspec.field(default_factory=EvaluationState)

    @property
    def newest(self) -> Version:
        """The highest version that engines can have: samples of higher ones come from a trainer that is gone."""
        return self.weights.version if self.weights is not None else self.ledger.version

    def fail(self, sentence: str) -> None:
        """The run cannot go on: it stops, and this is why."""
        self.stop_asked, self.stop_reason, self.failure = True, sentence, sentence
