"""What is kept of evaluations: the one that runs, and how others ended."""

from __future__ import annotations

import msgspec

from penstock.records.ids import FIRST_EVALUATION_SAMPLE, MemberId, SampleId, Version

Place = int
"""Of one sample in an evaluation: prompt * samples + member."""


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one evaluation ended."""

    due: Version
    version: Version | None
    """What was measured; None when no worker ever began."""
    samples: int = 0
    failed: int = 0
    reward_mean: float = 0.0
    reward_stderr: float = 0.0
    """Over the prompts' means: samples of one prompt are not independent."""
    length_mean: float = 0.0
    took_s: float = 0.0
    skipped: str = ""
    """Why there are no scores."""

    def __str__(self) -> str:
        if self.skipped:
            return f"the evaluation due at version {self.due} was skipped: {self.skipped}"
        reward = f"reward {self.reward_mean:.4g} ± {self.reward_stderr:.2g}"
        return f"version {self.version} evaluated: {reward} over {self.samples} samples"


class HeldSample(msgspec.Struct, frozen=True, array_like=True):
    member: MemberId
    place: Place


class RunningEvaluation(msgspec.Struct):
    due: Version
    since: float
    deadline: float
    open: list[Place]
    version: Version | None = None
    digest: str = ""
    held: dict[SampleId, HeldSample] = msgspec.field(default_factory=dict)
    scores: dict[Place, tuple[float, int]] = msgspec.field(default_factory=dict)
    """Reward and length."""
    failures: dict[Place, int] = msgspec.field(default_factory=dict)
    failed: dict[Place, str] = msgspec.field(default_factory=dict)
    evaluators: dict[MemberId, float] = msgspec.field(default_factory=dict)
    """Workers that serve the version for it, and when they last took or delivered something."""

    def holds(self, member: MemberId) -> bool:
        return any(held.member == member for held in self.held.values())


class EvaluationState(msgspec.Struct):
    """All that a snapshot carries."""

    next_sample: SampleId = FIRST_EVALUATION_SAMPLE
    next_due: Version | None = None
    """None before the first version was published."""
    running: RunningEvaluation | None = None
    waiting: Version | None = None
    """Due, and to begin when the running one has ended."""
    results: list[EvaluationResult] = msgspec.field(default_factory=list)
    moves: int = 0
    """Grows iff anything else did."""
