"""The states of a sample, the moves between them, and the rows of the ledger.

A sample is one attempt to generate one member of a prompt's group. Its first state is `leased`, and it is always in
exactly one of six states. `MOVES` lists every move and its cause.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from penstock.records.ids import MemberId, PromptIndex, SampleId, StepIndex, Version
from penstock.records.payload import PayloadRef

State = Literal["leased", "delivered", "buffered", "dispatched", "trained", "dropped"]
Reason = Literal["outdated", "filtered", "failed", "lost", "returned"]

STATES: Final[tuple[State, ...]] = ("leased", "delivered", "buffered", "dispatched", "trained", "dropped")
REASONS: Final[tuple[Reason, ...]] = ("outdated", "filtered", "failed", "lost", "returned")

MOVES: Final[dict[tuple[State | None, State], str]] = {
    (None, "leased"): "the sample was leased to a worker",
    ("leased", "delivered"): "its worker delivered it; other members of its group are still missing",
    ("delivered", "buffered"): "the last member of its group arrived",
    ("buffered", "dispatched"): "its group was sent to the trainer as part of a batch",
    ("dispatched", "trained"): "the trainer acknowledged the step",
    ("leased", "dropped"): "failed; or lost with its worker; or generated with outdated or unpublished weights",
    (
        "delivered",
        "dropped",
    ): "its group was filtered, became outdated, or its prompt was set aside; or the run resumed",
    ("buffered", "dropped"): "became too old for every remaining step; or the run was resumed without its payload",
    ("dispatched", "dropped"): "the trainer could not fetch its group, or was restarted from an earlier checkpoint",
    ("trained", "dropped"): "the trainer was restarted from a checkpoint before this step",
}

NOT_LEASED_TO_YOU: Final = "is not leased to this worker (any more)"
"""Why a sample without a current lease of the caller is refused."""
NOT_LEASED: Final = SampleId(-1)
NO_VERSION: Final = Version(-1)


class Group(msgspec.Struct):
    """The members of one prompt, by column. A member without a sample waits to be issued."""

    prompt: PromptIndex
    attempt: int
    failures: list[int]
    """How often each member failed."""
    losses: int
    """Number of workers that died while they generated it."""
    stage: Literal["open", "buffered", "dispatched", "trained"]
    samples: list[SampleId]
    owners: list[MemberId]
    payloads: list[PayloadRef | None]
    rewards: list[float]
    versions: list[Version]
    lengths: list[int]
    missing: int
    """Number of members not delivered yet."""
    promised: Version
    """The version that its first worker served at the lease: an estimate of the group's oldest version."""
    oldest: Version = NO_VERSION
    """The lowest version among the delivered members."""


class Redo(msgspec.Struct, frozen=True):
    """A prompt whose group was dropped and that must be issued again."""

    attempt: int = 0
    failures: tuple[int, ...] = ()
    losses: int = 0


class SetAside(msgspec.Struct, frozen=True):
    """A prompt that failed too often to be tried again."""

    failures: int
    hook: str
    error: str


class StepRecord(msgspec.Struct):
    """The batch of one step; kept until the step can no longer be undone."""

    prompts: list[PromptIndex]
    final: bool
    dispatched_at: float
    reward_mean: float = 0.0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    length_mean: float = 0.0


class LedgerState(msgspec.Struct):
    """The ledger part of a snapshot; everything else is an index over it."""

    version: Version = Version(0)
    """Number of acknowledged steps."""
    next_step: StepIndex = StepIndex(0)
    """The first step without a batch."""
    durable: StepIndex = StepIndex(0)
    """Steps below this are in a checkpoint."""
    settled: StepIndex = StepIndex(0)
    """Steps below this can no longer be undone, even if a checkpoint is damaged: their records are dropped."""
    next_sample: SampleId = SampleId(0)
    next_prompt: PromptIndex = PromptIndex(0)
    prompt_limit: int | None = None
    counts: dict[State, int] = msgspec.field(default_factory=lambda: dict.fromkeys(STATES, 0))
    dropped: dict[Reason, int] = msgspec.field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    dropped_finished: int = 0
    """Samples that were delivered in time but became outdated before they could be trained."""
    dropped_length: int = 0
    """Their total length."""
    moves: int = 0
    """Number of sample transitions; grows iff the table changed."""
    groups: dict[PromptIndex, Group] = msgspec.field(default_factory=dict)
    awaiting: dict[PromptIndex, list[int]] = msgspec.field(default_factory=dict)
    """Members of open groups that must be issued again, oldest first."""
    awaiting_count: int = 0
    redo: dict[PromptIndex, Redo] = msgspec.field(default_factory=dict)
    leases: dict[MemberId, dict[SampleId, None]] = msgspec.field(default_factory=dict)
    open_by_version: dict[Version, dict[PromptIndex, None]] = msgspec.field(default_factory=dict)
    promised_by_version: dict[Version, int] = msgspec.field(default_factory=dict)
    """Number of open groups by the version of their first lease."""
    ready_by_version: dict[Version, dict[PromptIndex, None]] = msgspec.field(default_factory=dict)
    steps: dict[StepIndex, StepRecord] = msgspec.field(default_factory=dict)
    settled_prompts: int = 0
    filtered_prompts: int = 0
    filtered_since_step: int = 0
    filtered_by: dict[str, int] = msgspec.field(default_factory=dict)
    """Groups that the filter removed, by its reason up to the first colon."""
    set_aside: dict[PromptIndex, SetAside] = msgspec.field(default_factory=dict)
