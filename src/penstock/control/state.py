"""The state of a pipeline."""

from __future__ import annotations

import msgspec

from penstock.control.admission import ThrottleState
from penstock.control.evaluation_state import EvaluationState
from penstock.control.membership import MembershipState
from penstock.control.samples import LedgerState
from penstock.control.settings import PipelineSettings
from penstock.records.ids import MemberId, Version
from penstock.records.weights import Manifest
from penstock.weights.published import PublishedVersions
from penstock.wire.messages import Phase

RECENT_STEPS = 16


class StepSummary(msgspec.Struct, frozen=True, array_like=True):
    """Summary of a trained step."""

    step: int
    samples: int
    reward_mean: float
    staleness_mean: float
    staleness_max: int
    length_mean: float = 0.0


class PipelineState(msgspec.Struct):
    """The contents of a snapshot."""

    ledger: LedgerState
    settings: PipelineSettings | None = None
    """From the last `SettingsTaken`; None if there was none."""
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
    """Start of this session of the run."""
    issued_before: int = 0
    """Number of samples issued in former sessions."""
    last_event_at: float = 0.0
    progressed_at: float = 0.0
    stall_reported_at: float = 0.0
    batch_ready_at: float | None = None
    """When the next batch could be trained: it is ready, and the step before is acknowledged. None if it is not so."""
    not_awaited: dict[MemberId, None] = msgspec.field(default_factory=dict)
    """Workers for which a batch waited its whole time, and that have delivered nothing in time since."""
    trainer_lost_at: float | None = None
    trainer_left_well: bool = False
    wedged_at: float | None = None
    """When the first process was evicted without progress since the last sample or step arrived."""
    set_aside_in_a_row: int = 0
    wrong_weights: int = 0
    recent: list[StepSummary] = msgspec.field(default_factory=list)
    evaluation: EvaluationState = msgspec.field(default_factory=EvaluationState)

    @property
    def newest(self) -> Version:
        """The highest version that engines can hold: samples of higher versions come from a trainer that is gone."""
        return self.weights.version if self.weights is not None else self.ledger.version

    def fail(self, sentence: str) -> None:
        """Stops the run with this sentence as the reason."""
        self.stop_asked, self.stop_reason, self.failure = True, sentence, sentence
