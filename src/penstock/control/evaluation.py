"""Evaluation while training goes on: which versions are measured, by which workers, and the results.

An evaluation becomes due with the first version, with every `every_steps`-th one, and with the last. It is bound to one
version by the first worker that begins it: the one that worker serves, at or after the one that was due (only some of
the versions are published, and fewer loaded). From then on the worker is pinned: it is offered no other weights until
the evaluation ends or has nothing left for it. When all that serve the version are gone, it begins again with another.

Promises, checked by `check()`:
- every sample of a result was made, from its first token to its last, with the one version of the evaluation;
- each sample of an evaluation is in exactly one place: open, held by one evaluator, scored, or failed for good;
- every evaluation that was due ends in one result, with scores or with the reason why it was skipped;
- one evaluation runs and at most one waits. The running one is left to end, or a run whose evaluations take longer than
  the time between them would never see any; of those that wait the newest wins, and the older ones are skipped.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container
from itertools import groupby
from math import isfinite, sqrt

from penstock.control.effects import Log, NoteEvaluation
from penstock.control.evaluation_state import EvaluationResult, EvaluationState, HeldSample, Place, RunningEvaluation
from penstock.control.samples import NOT_LEASED_TO_YOU
from penstock.control.settings import EvaluationSection
from penstock.errors import InvalidTransition
from penstock.records.ids import MemberId, PromptIndex, SampleId, Version
from penstock.records.prompt import PromptLease
from penstock.records.rollout import FailedRollout, Score
from penstock.records.weights import Held
from penstock.weights.published import PublishedVersions

IDLE_SHARE = 0.25
"""Of the deadline: how long an evaluator may hold nothing, though there is more to do, before it counts as gone."""
MAX_FAILURES = 3
"""Failures after which a sample is left out of the result, and counted."""


class Evaluation:
    """One pipeline's evaluations. Without settings nothing is ever due."""

    def __init__(self, settings: EvaluationSection, state: EvaluationState) -> None:
        self.settings = settings if settings.every_steps else None
        self.state = state
        self._ended: list[EvaluationResult] = []

    # -- what one may ask ---------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return self.state.running is None and self.state.waiting is None

    @property
    def lacks_evaluator(self) -> bool:
        """Whether an evaluation is there to be begun, or begun again, by a worker that serves recent weights."""
        running = self.state.running
        return running is not None and bool(running.open) and not running.evaluators

    @property
    def outstanding(self) -> int:
        """Samples that workers hold or could be given."""
        running = self.state.running
        return len(running.open) + len(running.held) if running is not None else 0

    @property
    def evaluators(self) -> frozenset[MemberId]:
        """Who is pinned to what it serves."""
        return frozenset(self.state.running.evaluators) if self.state.running is not None else frozenset()

    def pins(self, member: MemberId) -> bool:
        """Whether the member must go on serving what it serves."""
        return self.state.running is not None and member in self.state.running.evaluators

    def keeps(self, member: MemberId, held: Held, published: PublishedVersions) -> bool:
        """Whether a member that serves `held` should go on doing so: it is pinned, or could begin the evaluation the
        next time it asks for work. Where weights change as fast as they can be loaded, none would be found that
        serves any for a while.
        """
        running = self.state.running
        if running is None or not self.lacks_evaluator:
            return self.pins(member)
        return held.version >= running.due and published.valid.get(held.version) == held.digest

    def take_notes(self, pipeline: str) -> list[NoteEvaluation | Log]:
        """What there is to be said about evaluations that ended since this was last asked."""
        ended, self._ended = self._ended, []
        notes: list[NoteEvaluation | Log] = []
        for result in ended:
            notes += [NoteEvaluation(result), Log("warning" if result.skipped else "info", f"{pipeline}: {result}")]
        return notes

    # -- when an evaluation is due ------------------------------------------------------------------------------

    def published(self, version: Version, now: float) -> None:
        """Weights came into being."""
        settings, state = self.settings, self.state
        if settings is None or (state.next_due is not None and version < state.next_due):
            return
        first = state.next_due is None
        state.next_due = _after(version, settings.every_steps)
        self._fall_due(version if first else Version(version - version % settings.every_steps), now)

    def training_ended(self, version: Version, now: float) -> None:
        """No further version will come: this one is measured too."""
        if self.settings is not None:
            self._fall_due(version, now)

    def _fall_due(self, due: Version, now: float) -> None:
        """Unless that version was measured, or is going to be."""
        state = self.state
        evaluations = [*state.results, state.running] if state.running is not None else state.results
        if state.waiting == due or any(due in (running.due, running.version) for running in evaluations):
            return
        state.moves += 1
        if state.running is not None and state.running.version is None:
            self._skip(f"superseded by version {due} before it began", now)
        if state.running is None:
            self._start(due, now)
            return
        if state.waiting is not None:
            why = f"superseded by version {due} while the evaluation of an older one still ran"
            self._end(EvaluationResult(due=state.waiting, version=None, skipped=why))
        state.waiting = due

    def _start(self, due: Version, now: float) -> None:
        assert self.settings is not None
        self.state.running = RunningEvaluation(
            due, now, now + self.settings.timeout_s, list(range(self.settings.total_samples))
        )

    # -- leases -------------------------------------------------------------------------------------------------

    def grant(self, member: MemberId, version: Version, digest: str, samples: int, now: float) -> list[PromptLease]:
        """Up to `samples` of the running evaluation for a member that serves `version` and will go on serving it.

        `digest` is what was published as that version, empty if that is not known any more.
        """
        running, settings = self.state.running, self.settings
        if running is None or settings is None:
            return []
        if version != running.version or digest not in ("", running.digest):
            if member in running.evaluators:  # its weights changed all the same
                self._dismiss(running, member)
            if running.evaluators or not running.open or not digest or version < running.due:
                return []
            self._begin(running, version, digest)
        if not running.open or (member not in running.evaluators and len(running.evaluators) >= settings.workers):
            return []
        self.state.moves += 1
        places, running.open = running.open[:samples], running.open[samples:]
        running.evaluators[member] = now
        leases: list[PromptLease] = []
        for prompt, of_prompt in groupby(places, lambda place: place // settings.samples):
            taken = tuple(of_prompt)
            numbers = tuple(SampleId(self.state.next_sample + index) for index in range(len(taken)))
            self.state.next_sample = SampleId(self.state.next_sample + len(taken))
            running.held |= {sample: HeldSample(member, place) for sample, place in zip(numbers, taken, strict=True)}
            members = tuple(place % settings.samples for place in taken)
            leases.append(PromptLease(PromptIndex(prompt), 0, numbers, members, version, evaluation=version))
        self._release_idle(running)
        return leases

    def _begin(self, running: RunningEvaluation, version: Version | None, digest: str) -> None:
        """From the start, with this version or with none yet; what was scored with another does not count."""
        assert self.settings is not None
        self.state.moves += 1
        running.version, running.digest = version, digest
        running.open = list(range(self.settings.total_samples))
        running.held, running.scores, running.failures, running.failed, running.evaluators = {}, {}, {}, {}, {}

    # -- what comes back ----------------------------------------------------------------------------------------

    def take(self, member: MemberId, score: Score, now: float) -> str:
        """Counts a score; why not, otherwise. What does not count is there to be made again."""
        running, place = self._let_go(member, score.sample, now)
        if running is None:
            return NOT_LEASED_TO_YOU
        if not score.version == score.newest == running.version or score.weights_digest != running.digest:
            self._reopen(running, place)
            self._dismiss(running, member)  # it does not serve what it said
            made = f"was made with versions {score.version} to {score.newest}, digest {score.weights_digest!r}"
            return f"{made}; version {running.version} is evaluated, digest {running.digest!r}"
        if not isfinite(score.reward):
            self._strike(running, place, f"its reward is {score.reward}", once=False)
        else:
            running.scores[place] = (score.reward, score.length)
        self._look_for_end(running, now)
        return ""

    def fail(self, member: MemberId, failure: FailedRollout, now: float) -> str:
        running, place = self._let_go(member, failure.sample, now)
        if running is None:
            return NOT_LEASED_TO_YOU
        lines = failure.error.strip().splitlines()
        self._strike(running, place, f"{failure.hook}: {lines[-1] if lines else 'no message'}", once=failure.poison)
        self._look_for_end(running, now)
        return ""

    def give_back(self, member: MemberId, sample: SampleId, now: float) -> str:
        running, place = self._let_go(member, sample, now)
        if running is None:
            return NOT_LEASED_TO_YOU
        self._reopen(running, place)
        if not running.holds(member):  # it stops generating: others may serve another version by now
            self._dismiss(running, member)
        return ""

    def _let_go(self, member: MemberId, sample: SampleId, now: float) -> tuple[RunningEvaluation | None, Place]:
        running = self.state.running
        held = running.held.get(sample) if running is not None else None
        if running is None or held is None or held.member != member:
            return None, -1
        self.state.moves += 1
        del running.held[sample]
        running.evaluators[member] = now
        return running, held.place

    def _strike(self, running: RunningEvaluation, place: Place, error: str, *, once: bool) -> None:
        assert self.settings is not None
        running.failures[place] = running.failures.get(place, 0) + 1
        if once or running.failures[place] >= MAX_FAILURES:
            running.failed[place] = error
        else:
            self._reopen(running, place)

    def _reopen(self, running: RunningEvaluation, place: Place) -> None:
        insort(running.open, place)

    def _look_for_end(self, running: RunningEvaluation, now: float) -> None:
        self._release_idle(running)
        if running.open or running.held:
            return
        if not running.scores:
            self._skip(f"every sample failed, the last with {list(running.failed.values())[-1]}", now)
            return
        assert self.settings is not None
        by_prompt: dict[int, list[float]] = {}
        for place, (reward, _) in sorted(running.scores.items()):
            by_prompt.setdefault(place // self.settings.samples, []).append(reward)
        means = [sum(rewards) / len(rewards) for rewards in by_prompt.values()]
        mean = sum(means) / len(means)
        spread = sum((one - mean) ** 2 for one in means) / max(1, len(means) - 1)
        result = EvaluationResult(
            due=running.due,
            version=running.version,
            samples=len(running.scores),
            failed=len(running.failed),
            reward_mean=mean,
            reward_stderr=sqrt(spread / len(means)),
            length_mean=sum(length for _, length in running.scores.values()) / len(running.scores),
            took_s=now - running.since,
        )
        self._end_running(result, now)

    # -- who is there -------------------------------------------------------------------------------------------

    def lose_member(self, member: MemberId) -> None:
        """It left or died: what it held is issued again."""
        if self.pins(member) and self.state.running is not None:
            self._dismiss(self.state.running, member)

    def _dismiss(self, running: RunningEvaluation, member: MemberId) -> None:
        self.state.moves += 1
        for sample in [sample for sample, held in running.held.items() if held.member == member]:
            self._reopen(running, running.held.pop(sample).place)
        running.evaluators.pop(member, None)

    def _release_idle(self, running: RunningEvaluation) -> None:
        """Those for whom nothing is left need not hold on to their weights."""
        if not running.open:
            for member in [member for member in running.evaluators if not running.holds(member)]:
                del running.evaluators[member]

    # -- time, and what undoes things ---------------------------------------------------------------------------

    def look(self, now: float) -> bool:
        """Ends an evaluation that took too long, and gives up evaluators that come for no more; True if that was so."""
        running, settings, moves = self.state.running, self.settings, self.state.moves
        if running is None or settings is None:
            return False
        if now >= running.deadline:
            if running.version is None:
                came = f"no worker came to serve version {running.due} or a later one"
            else:
                scored = f"{len(running.scores)} of {settings.total_samples}"
                came = f"only {scored} samples of version {running.version} came in"
            self._skip(f"{came} within {now - running.since:.0f} s", now)
            return True
        for member, since in list(running.evaluators.items()):
            if now - since > IDLE_SHARE * settings.timeout_s and not running.holds(member):
                self._dismiss(running, member)
        return self.state.moves > moves

    def excuse(self, away_s: float) -> None:
        """The controller itself was away: that time does not count."""
        running = self.state.running
        if running is not None:
            self.state.moves += 1
            running.deadline += away_s
            running.evaluators = {member: since + away_s for member, since in running.evaluators.items()}

    def roll_back(self, version: Version, now: float) -> None:
        """Training starts again from `version`: what was measured of later ones is of weights that never were."""
        state, settings = self.state, self.settings
        if settings is None or state.next_due is None:
            return
        state.moves += 1
        undone = [result for result in state.results if max(result.due, result.version or 0) > version]
        state.next_due = min(state.next_due, _after(version, settings.every_steps))
        state.results = [result for result in state.results if result not in undone]
        why = f"training was rolled back to version {version}"
        if state.waiting is not None and state.waiting > version:
            due, state.waiting = state.waiting, None
            self._end(EvaluationResult(due=due, version=None, skipped=why), keep=False)
        running = state.running
        if running is not None and running.due > version:
            self._skip(why, now, keep=False)
        elif running is not None and running.version is not None and running.version > version:
            self._begin(running, None, "")
        for result in undone:
            if result.due <= version:  # it was measured later than it was due
                self._fall_due(result.due, now)

    def resume(self, now: float) -> None:
        """No former worker is left: an evaluation that had begun is made again, with its whole time."""
        running, settings = self.state.running, self.settings
        if running is not None and settings is not None:
            self._begin(running, None, "")
            running.since, running.deadline = now, now + settings.timeout_s

    def stop(self, now: float, why: str) -> None:
        """Whatever has not ended is skipped."""
        state = self.state
        if state.waiting is not None:
            state.moves += 1
            due, state.waiting = state.waiting, None
            self._end(EvaluationResult(due=due, version=None, skipped=why))
        if state.running is not None:
            self._skip(why, now)

    def _skip(self, why: str, now: float, *, keep: bool = True) -> None:
        running = self.state.running
        assert running is not None
        result = EvaluationResult(
            due=running.due,
            version=running.version,
            failed=len(running.failed),
            took_s=now - running.since,
            skipped=why,
        )
        self._end_running(result, now, keep=keep)

    def _end_running(self, result: EvaluationResult, now: float, *, keep: bool = True) -> None:
        state = self.state
        state.moves += 1
        state.running = None
        self._end(result, keep=keep)
        if state.waiting is not None:
            due, state.waiting = state.waiting, None
            self._start(due, now)

    def _end(self, result: EvaluationResult, *, keep: bool = True) -> None:
        """Every evaluation ends here, once. Those that a rollback undoes will be due again, so they are not kept."""
        if keep:
            self.state.results.append(result)
        self._ended.append(result)

    def check(self, live: Container[MemberId]) -> None:
        """Raises if an invariant is broken. `live` are the members there are."""
        running, settings = self.state.running, self.settings
        if running is None:
            if self.state.waiting is not None:
                raise InvalidTransition(f"version {self.state.waiting} waits to be evaluated although nothing runs")
            return
        if settings is None:
            raise InvalidTransition("an evaluation runs although there are no settings for it")
        places = [*running.open, *(held.place for held in running.held.values()), *running.scores, *running.failed]
        if sorted(places) != list(range(settings.total_samples)):
            raise InvalidTransition(
                f"{len(places)} samples of an evaluation are accounted for, not {settings.total_samples}"
            )
        if running.open != sorted(running.open):
            raise InvalidTransition("the open samples of an evaluation are out of order")
        for member in running.evaluators:
            if member not in live:
                raise InvalidTransition(f"{member} evaluates but is not a live member")
        for held in running.held.values():
            if held.member not in running.evaluators:
                raise InvalidTransition(f"{held.member} holds samples of an evaluation without being an evaluator")
        if running.version is None and (running.held or running.scores or running.failed or running.evaluators):
            raise InvalidTransition(f"an evaluation has begun without a version: {self!r}")
        if running.version is not None and (running.version < running.due or not running.digest):
            raise InvalidTransition(f"version {running.version} is evaluated where {running.due} was due: {self!r}")
        if len(running.evaluators) > settings.workers:
            raise InvalidTransition(f"{len(running.evaluators)} workers evaluate, {settings.workers} may")

    def __repr__(self) -> str:
        running = self.state.running
        if running is None:
            return f"<Evaluation idle, {len(self.state.results)} evaluations, next due {self.state.next_due}>"
        held = f"{len(running.held)} held by {list(running.evaluators)}"
        ended = f"{len(running.scores)} scored, {len(running.failed)} failed"
        return f"<Evaluation due {running.due} of version {running.version}: {len(running.open)} open, {held}, {ended}>"


def _after(version: Version, every: int) -> Version:
    return Version((version // every + 1) * every)
