"""Evaluation during training: which versions are evaluated, by which workers, and the results.

An evaluation is due with the first version, with every `every_steps`-th version, and with the last. The first worker
that begins it binds it to the version that this worker serves: the due version or a later one (only some versions are
published, and fewer are loaded). From then on the worker is pinned: it is offered no other weights until the evaluation
ends or has no samples left for it. If no worker serves the version any more, the evaluation restarts with another.

Invariants, checked by `check()`:
- every sample of a result was generated, from its first token to its last, with the version of the evaluation;
- each sample of an evaluation is in exactly one place: open, held by one evaluator, scored, or failed permanently;
- every evaluation that was due ends once, with scores or with the reason why it was skipped. After a rollback or a stop
  it is due again;
- one evaluation runs and at most one waits. The running one is not interrupted, or a run whose evaluations take longer
  than the time between them would never complete one. Only the newest waits; older ones are skipped.
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
"""Fraction of the timeout after which an evaluator that holds no samples, although some are open, is removed."""
MAX_FAILURES = 3
"""Failures after which a sample is excluded from the result and counted as failed."""


class Evaluation:
    """The evaluations of one pipeline. None is due if `every_steps` is 0."""

    def __init__(self, settings: EvaluationSection, state: EvaluationState) -> None:
        self.settings = settings if settings.every_steps else None
        self.state = state
        self._ended: list[EvaluationResult] = []

    # -- queries ------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """No evaluation runs or waits."""
        return self.state.running is None and self.state.waiting is None

    @property
    def lacks_evaluator(self) -> bool:
        """Whether the running evaluation needs a worker to begin it, or to begin it again."""
        running = self.state.running
        return running is not None and bool(running.open) and not running.evaluators

    @property
    def outstanding(self) -> int:
        """Samples that workers hold or could lease."""
        running = self.state.running
        return len(running.open) + len(running.held) if running is not None else 0

    @property
    def evaluators(self) -> frozenset[MemberId]:
        """Members that are pinned to the version they serve."""
        return frozenset(self.state.running.evaluators) if self.state.running is not None else frozenset()

    def pins(self, member: MemberId) -> bool:
        """Whether the member must keep the version that it serves."""
        return self.state.running is not None and member in self.state.running.evaluators

    def keeps(self, member: MemberId, held: Held, published: PublishedVersions) -> bool:
        """Whether a member should keep serving `held`: it is pinned, or could begin the evaluation with its next lease.

        Otherwise, if weights change as fast as they are loaded, no worker would serve a version long enough to begin.
        """
        running = self.state.running
        if running is None or not self.lacks_evaluator:
            return self.pins(member)
        return held.version >= running.due and published.valid.get(held.version) == held.digest

    def take_notes(self, pipeline: str) -> list[NoteEvaluation | Log]:
        """Notes and log lines of evaluations that ended since the last call."""
        ended, self._ended = self._ended, []
        notes: list[NoteEvaluation | Log] = []
        for result in ended:
            notes += [NoteEvaluation(result), Log("warning" if result.skipped else "info", f"{pipeline}: {result}")]
        return notes

    # -- when an evaluation is due ------------------------------------------------------------------------------

    def published(self, version: Version, now: float) -> None:
        """A version was published: schedules its evaluation if one is due."""
        settings, state = self.settings, self.state
        if settings is None or (state.next_due is not None and version < state.next_due):
            return
        first = state.next_due is None
        state.next_due = _after(version, settings.every_steps)
        self._schedule(version if first else Version(version - version % settings.every_steps), now)

    def training_ended(self, version: Version, now: float) -> None:
        """There are no further versions: this last one is evaluated too."""
        if self.settings is not None:
            self._schedule(version, now)

    def _schedule(self, due: Version, now: float) -> None:
        """Starts the evaluation or lets it wait, unless that version was evaluated or will be."""
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
            why = f"superseded by version {due} while an older evaluation was running"
            self._end(EvaluationResult(due=state.waiting, version=None, skipped=why))
        state.waiting = due

    def _start(self, due: Version, now: float) -> None:
        assert self.settings is not None
        self.state.running = RunningEvaluation(
            due, now, now + self.settings.timeout_s, list(range(self.settings.total_samples))
        )

    # -- leases -------------------------------------------------------------------------------------------------

    def grant(self, member: MemberId, version: Version, digest: str, samples: int, now: float) -> list[PromptLease]:
        """Leases up to `samples` of the running evaluation to a member that serves `version` and will keep it.

        `digest` is that of the published version, empty if there is no record of it any more.
        """
        running, settings = self.state.running, self.settings
        if running is None or settings is None:
            return []
        if version != running.version or digest not in ("", running.digest):
            if member in running.evaluators:  # its weights changed although it was pinned
                self._remove_evaluator(running, member)
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
        """Starts from the beginning, with this version or with none yet; scores of another version are discarded."""
        assert self.settings is not None
        self.state.moves += 1
        running.version, running.digest = version, digest
        running.open = list(range(self.settings.total_samples))
        running.held, running.scores, running.failures, running.failed, running.evaluators = {}, {}, {}, {}, {}

    # -- results ------------------------------------------------------------------------------------------------

    def take(self, member: MemberId, score: Score, now: float) -> str:
        """Records a score. Returns why it was refused, or "". A refused sample is issued again if it was leased."""
        running, place = self._end_lease(member, score.sample, now)
        if running is None:
            return NOT_LEASED_TO_YOU
        if not score.version == score.newest == running.version or score.weights_digest != running.digest:
            self._reopen(running, place)
            self._remove_evaluator(running, member)  # it does not serve the version that it reported
            made = f"was generated with versions {score.version} to {score.newest}, digest {score.weights_digest!r}"
            return f"{made}; version {running.version} is evaluated, digest {running.digest!r}"
        if not isfinite(score.reward):
            self._record_failure(running, place, f"its reward is {score.reward}", once=False)
        else:
            running.scores[place] = (score.reward, score.length)
        self._finish_if_complete(running, now)
        return ""

    def fail(self, member: MemberId, failure: FailedRollout, now: float) -> str:
        running, place = self._end_lease(member, failure.sample, now)
        if running is None:
            return NOT_LEASED_TO_YOU
        lines = failure.error.strip().splitlines()
        self._record_failure(
            running, place, f"{failure.hook}: {lines[-1] if lines else 'no message'}", once=failure.poison
        )
        self._finish_if_complete(running, now)
        return ""

    def return_sample(self, member: MemberId, sample: SampleId, now: float) -> str:
        running, place = self._end_lease(member, sample, now)
        if running is None:
            return NOT_LEASED_TO_YOU
        self._reopen(running, place)
        if not running.holds(member):  # it stops generating: the others may serve another version by then
            self._remove_evaluator(running, member)
        return ""

    def _end_lease(self, member: MemberId, sample: SampleId, now: float) -> tuple[RunningEvaluation | None, Place]:
        running = self.state.running
        held = running.held.get(sample) if running is not None else None
        if running is None or held is None or held.member != member:
            return None, -1
        self.state.moves += 1
        del running.held[sample]
        running.evaluators[member] = now
        return running, held.place

    def _record_failure(self, running: RunningEvaluation, place: Place, error: str, *, once: bool) -> None:
        assert self.settings is not None
        running.failures[place] = running.failures.get(place, 0) + 1
        if once or running.failures[place] >= MAX_FAILURES:
            running.failed[place] = error
        else:
            self._reopen(running, place)

    def _reopen(self, running: RunningEvaluation, place: Place) -> None:
        insort(running.open, place)

    def _finish_if_complete(self, running: RunningEvaluation, now: float) -> None:
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

    # -- evaluators ---------------------------------------------------------------------------------------------

    def release_member(self, member: MemberId) -> None:
        """The member left or died: its samples are issued again."""
        if self.pins(member) and self.state.running is not None:
            self._remove_evaluator(self.state.running, member)

    def _remove_evaluator(self, running: RunningEvaluation, member: MemberId) -> None:
        self.state.moves += 1
        for sample in [sample for sample, held in running.held.items() if held.member == member]:
            self._reopen(running, running.held.pop(sample).place)
        running.evaluators.pop(member, None)

    def _release_idle(self, running: RunningEvaluation) -> None:
        """Unpins evaluators without samples once no sample is open."""
        if not running.open:
            for member in [member for member in running.evaluators if not running.holds(member)]:
                del running.evaluators[member]

    # -- timeouts, rollback and stop ----------------------------------------------------------------------------

    def expire(self, now: float) -> bool:
        """Ends an evaluation past its deadline, and removes idle evaluators. Returns whether the state changed."""
        running, settings, moves = self.state.running, self.settings, self.state.moves
        if running is None or settings is None:
            return False
        if now >= running.deadline:
            if running.version is None:
                missed = f"no worker served version {running.due} or a later one"
            else:
                scored = f"{len(running.scores)} of {settings.total_samples}"
                missed = f"only {scored} samples of version {running.version} were scored"
            self._skip(f"{missed} within {now - running.since:.0f} s", now)
            return True
        for member, since in list(running.evaluators.items()):
            if now - since > IDLE_SHARE * settings.timeout_s and not running.holds(member):
                self._remove_evaluator(running, member)
        return self.state.moves > moves

    def extend_deadlines(self, away_s: float) -> None:
        """Extends all deadlines by the time in which the controller did not run."""
        running = self.state.running
        if running is not None:
            self.state.moves += 1
            running.deadline += away_s
            running.evaluators = {member: since + away_s for member, since in running.evaluators.items()}

    def roll_back(self, version: Version, now: float) -> None:
        """Training restarts from `version`: drops results of later versions, whose weights are discarded."""
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
            if result.due <= version:  # a later version was evaluated than the due one
                self._schedule(result.due, now)

    def resume(self, now: float) -> None:
        """No former worker is left: the running evaluation restarts, with its full timeout. Those that a stop has
        interrupted are due again."""
        state, settings = self.state, self.settings
        if settings is None:
            return
        if state.running is not None:
            self._begin(state.running, None, "")
            state.running.since, state.running.deadline = now, now + settings.timeout_s
        undone, state.undone = state.undone, []
        state.moves += len(undone)
        for due in undone:
            self._schedule(due, now)

    def stop(self, now: float) -> None:
        """The run stops: ends the running and the waiting evaluation. They are due again when it is resumed."""
        state = self.state
        if state.running is not None:
            state.undone.append(state.running.due)
        if state.waiting is not None:
            state.undone.append(state.waiting)
        self._skip_all(now, "the run was stopped", keep=False)

    def switch_off(self, now: float) -> None:
        """Skips the running and the waiting evaluation."""
        self._skip_all(now, "evaluation was switched off", keep=True)

    def _skip_all(self, now: float, why: str, *, keep: bool) -> None:
        state = self.state
        if state.waiting is not None:
            state.moves += 1
            due, state.waiting = state.waiting, None
            self._end(EvaluationResult(due=due, version=None, skipped=why), keep=keep)
        if state.running is not None:
            self._skip(why, now, keep=keep)

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
        """Every evaluation ends here, once. One that a rollback or a stop undoes is not kept: it will be due again."""
        if keep:
            self.state.results.append(result)
        self._ended.append(result)

    def check(self, live: Container[MemberId]) -> None:
        """Raises if an invariant is broken. `live` are the registered members."""
        running, settings = self.state.running, self.settings
        if running is None:
            if self.state.waiting is not None:
                raise InvalidTransition(f"version {self.state.waiting} waits although no evaluation runs")
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
            raise InvalidTransition(f"{len(running.evaluators)} workers evaluate, at most {settings.workers} may")

    def __repr__(self) -> str:
        running = self.state.running
        if running is None:
            return f"<Evaluation idle, {len(self.state.results)} evaluations, next due {self.state.next_due}>"
        held = f"{len(running.held)} held by {list(running.evaluators)}"
        ended = f"{len(running.scores)} scored, {len(running.failed)} failed"
        return f"<Evaluation due {running.due} of version {running.version}: {len(running.open)} open, {held}, {ended}>"


def _after(version: Version, every: int) -> Version:
    return Version((version // every + 1) * every)
