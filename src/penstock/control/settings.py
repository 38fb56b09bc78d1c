"""What a pipeline's control needs to be told, and all that it remembers."""

from __future__ import annotations

import msgspec

from penstock.control.admission import ThrottleState
from penstock.control.effects import Effect
from penstock.control.membership import MembershipState, Patience
from penstock.control.points import EvaluationSettings, EvaluationState
from penstock.control.samples import LedgerState
from penstock.records.ids import PipelineName, Version
from penstock.records.weights import Manifest
from penstock.wire.messages import Phase

RECENT_STEPS = 16

Outcome = tuple[list[Effect], bool]
"""What handling one event comes to: what to do, and whether the state changed."""


class PipelineSettings(msgspec.Struct, frozen=True, kw_only=True):
    name: PipelineName
    steps: int | None = None
    """Length of the run; None: until the prompts run out."""
    groups_per_step: int
    group_size: int
    max_staleness: int = 1
    prompt_limit: int | None = None
    """Prompts in the whole run; None: endless, or `epochs` times what the first worker reports."""
    epochs: int | None = None
    straggler_wait_s: float = 0.0
    """How long a full batch waits for groups that would be outdated without it: none of their work is wasted then, and
    long samples are not weeded out. Past this, the batch leaves without them."""
    max_failures: int = 3
    """A prompt that fails this often is set aside."""
    max_losses: int | None = None
    """And so is a prompt during whose generation this many workers died: it may be what kills them. Off by default,
    since a storm of other deaths could then cost an innocent prompt."""
    max_filtered_per_step: int | None = None
    """Groups the filter may take away between two batches, by default four batches' worth; then groups pass anyway,
    so that a filter that dislikes everything slows the run down but cannot stop it."""
    suspect_after_s: float = 10.0
    reap_after_s: float = 30.0
    wedge_after_s: float = 300.0
    startup_grace_s: float = 120.0
    stall_after_s: float = 60.0
    stall_fail_after_s: float | None = 1800.0
    exit_without_trainer_s: float | None = None
    throttle_report_s: float = 30.0
    evaluation: EvaluationSettings | None = None
    """None: versions are never evaluated."""
    filters: tuple[str, ...] = ()
    """Names of what the group filter is made of: it decided what was filtered, so a replay needs the same."""

    @property
    def patience(self) -> Patience:
        return Patience(
            suspect_after_s=self.suspect_after_s,
            reap_after_s=self.reap_after_s,
            wedge_after_s=self.wedge_after_s,
            startup_grace_s=self.startup_grace_s,
        )

    @property
    def set_aside_in_a_row_allowed(self) -> int:
        """So many prompts set aside with nothing delivered in between mean that the environment itself is broken."""
        return max(8, self.groups_per_step)


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
    digests: dict[Version, str] = msgspec.field(default_factory=dict)
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
