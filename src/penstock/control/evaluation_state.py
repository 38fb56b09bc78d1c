"""State of evaluations: the running one and the results of the others."""

from __future__ import annotations

import msgspec

from penstock.records.ids import FIRST_EVALUATION_SAMPLE, MemberId, SampleId, Version

Place = int
"""Index of one sample in an evaluation: prompt * samples + member."""


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one evaluation."""

    due: Version
    version: Version | None
    """The version that was evaluated; None if no worker began."""
    samples: int = 0
    failed: int = 0
    reward_mean: float = 0.0
    reward_stderr: float = 0.0
    """Over the means of the prompts: samples of one prompt are not independent."""
    length_mean: float = 0.0
    took_s: float = 0.0
    skipped: str = ""
    """Why the evaluation has no scores; empty if it has."""

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
    """Workers that evaluate the version, with the time of their last lease or delivery."""

    def holds(self, member: MemberId) -> bool:
        return any(held.member == member for held in self.held.values())


class EvaluationState(msgspec.Struct):
    """The evaluation part of a snapshot."""

    next_sample: SampleId = FIRST_EVALUATION_SAMPLE
    next_due: Version | None = None
    """None before the first version is published."""
    running: RunningEvaluation | None = None
    waiting: Version | None = None
    """The version whose evaluation starts when the running one has ended."""
    undone: list[Version] = msgspec.field(default_factory=list)
    """The versions whose evaluations a stop of the run has ended, oldest first."""
    results: list[EvaluationResult] = msgspec.field(default_factory=list)
    moves: int = 0
    """Grows iff another field changed."""
