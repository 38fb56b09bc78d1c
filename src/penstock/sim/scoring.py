"""What evaluations really come to in a simulated run, beside what the control machine says of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock.control.evaluation_state import EvaluationResult
from penstock.control.pipeline import PipelineControl
from penstock.control.settings import EvaluationSection
from penstock.errors import InvalidTransition
from penstock.records.ids import SampleId, Version
from penstock.records.prompt import PromptLease
from penstock.records.rollout import Score


def worth(version: int, prompt: int, member: int) -> float:
    """What one sample earns: no other version, prompt or member earns just that."""
    return (7919 * version + 104729 * prompt + 1299709 * member) % 15485863 / 15485863


def scores(lease: PromptLease, samples: Iterable[SampleId], seen: list[tuple[Version, str]]) -> list[Score]:
    """Samples of an evaluation, made with the weights `seen` one after the other."""
    (oldest, digest), (newest, _) = min(seen), max(seen)
    member_of = dict(zip(lease.samples, lease.members, strict=True))
    return [
        Score(sample, oldest, newest, digest, worth(newest, lease.prompt, member_of[sample]), 1) for sample in samples
    ]


class Points:
    """Sees how every evaluation ended; raises InvalidTransition for one that is not what its version is worth."""

    def __init__(self, settings: EvaluationSection) -> None:
        self.settings = settings if settings.every_steps else None
        self.evaluated: Counter[Version] = Counter()
        self.skipped: Counter[str] = Counter()

    def saw(self, result: EvaluationResult) -> None:
        if self.settings is None:
            raise InvalidTransition(f"{result} was evaluated and nobody asked for it")
        if result.skipped or result.version is None:
            self.skipped[" ".join(result.skipped.split()[:2])] += 1
            return
        prompts, samples = range(self.settings.prompts), range(self.settings.samples)
        if result.samples + result.failed != self.settings.total_samples:
            raise InvalidTransition(f"{result}: {self.settings.total_samples} samples were asked for")
        values = [worth(result.version, prompt, member) for prompt in prompts for member in samples]
        if not result.failed and abs(result.reward_mean - sum(values) / len(values)) > 1e-9:
            raise InvalidTransition(f"{result}: the mean of that version is {sum(values) / len(values)}")
        self.evaluated[result.version] += 1

    def check_end(self, control: PipelineControl) -> None:
        """The books say how every point ended that was due, and of each only once."""
        if self.settings is None:
            return
        if not control.evaluation.idle:
            raise InvalidTransition(f"an evaluation is left over: {control.evaluation!r}")
        results, last = control.state.evaluation.results, control.ledger.state.version
        due = Counter(result.due for result in results)
        if twice := [version for version, times in due.items() if times > 1]:
            raise InvalidTransition(f"the evaluations due at versions {twice} ended more than once")
        known = due.keys() | {result.version for result in results}
        if missing := [
            version for version in (*range(0, last, self.settings.every_steps), last) if version not in known
        ]:
            raise InvalidTransition(f"nothing is said of the evaluations due at versions {missing}")
