"""What a pipeline's control needs to be told."""

from __future__ import annotations

import msgspec

from penstock.control.points import EvaluationSettings
from penstock.records.ids import PipelineName


class Patience(msgspec.Struct, frozen=True):
    """How long silence is tolerated."""

    suspect_after_s: float = 10.0
    reap_after_s: float = 30.0
    wedge_after_s: float = 300.0
    """A member whose heartbeat arrives but whose parent made no progress for this long is reaped too."""
    startup_grace_s: float = 120.0

    @property
    def resolution_s(self) -> float:
        """Heartbeats closer together than this are not recorded: they would fill the journal and decide nothing."""
        return self.suspect_after_s / 4


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
