"""Evaluation while training goes on: which versions are measured, by whom, and what came out.

A point becomes due with the first version, with every `every`-th one, and with the last. It is bound to one version by
the first worker that begins it: the one that worker serves, at or after the one that was due (only some of the versions
are published, and fewer loaded). From then on the worker is pinned: it is offered no other weights until the point
ends or has nothing left for it. When all who serve the version are gone, the point begins again with another.

Promises, checked by `check()`:
- every sample of a point's result was made, from its first token to its last, with the point's one version, by digest;
- each (prompt, member) of a point is in exactly one place: open, held by one evaluator, scored, or failed for good;
- every point that was due ends in one result, with scores or with the reason why it was skipped;
- one point runs and at most one waits. The running one is left to end, or a run whose points take longer than the time
  between them would never see any; of those that wait the newest wins, and the older ones are skipped as superseded.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container
from itertools import groupby
from math import isfinite, sqrt

from penstock.control.effects import Log, NoteEvaluation
from penstock.control.points import Cell, EvaluationResult, EvaluationState, HeldCell, Point
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
"""A sample that fails so often is left out of the result, and counted."""


class Evaluation:
    """One pipeline's points. Without settings nothing is ever due."""

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
        """Whether a point is there to be begun, or begun again, by whoever serves recent weights."""
        point = self.state.running
        return point is not None and bool(point.open) and not point.evaluators

    @property
    def outstanding(self) -> int:
        """Samples that workers hold or could be given."""
        point = self.state.running
        return len(point.open) + len(point.held) if point is not None else 0

    @property
    def evaluators(self) -> frozenset[MemberId]:
        """Who is pinned to what it serves."""
        return frozenset(self.state.running.evaluators) if self.state.running is not None else frozenset()

    def pins(self, member: MemberId) -> bool:
        """Whether the member must go on serving what it serves."""
        return self.state.running is not None and member in self.state.running.evaluators

    def keeps(self, member: MemberId, held: Held, published: PublishedVersions) -> bool:
        """Whether a member that serves `held` should go on doing so: it is pinned, or could begin the running point
        the next time it asks for work. Where weights change as fast as they can be loaded, nobody would be found that
        serves any for a while.
        """
        point = self.state.running
        if point is None or not self.lacks_evaluator:
            return self.pins(member)
        return held.version >= point.due and published.valid.get(held.version) == held.digest

    def take_notes(self, pipeline: str) -> list[NoteEvaluation | Log]:
        """What there is to be said about points that ended since this was last asked."""
        ended, self._ended = self._ended, []
        notes: list[NoteEvaluation | Log] = []
        for result in ended:
            notes += [NoteEvaluation(result), Log("warning" if result.skipped else "info", f"{pipeline}: {result}")]
        return notes

    # -- when a point is due ------------------------------------------------------------------------------------

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
        points = [*state.results, state.running] if state.running is not None else state.results
        if state.waiting == due or any(due in (point.due, point.version) for point in points):
            return
        state.moves += 1
        if state.running is not None and state.running.version is None:
            self._skip(f"superseded by version {due} before anybody began it", now)
        if state.running is None:
            self._start(due, now)
            return
        if state.waiting is not None:
            why = f"superseded by version {due} while the evaluation of an older one still ran"
            self._end(EvaluationResult(due=state.waiting, version=None, skipped=why))
        state.waiting = due

    def _start(self, due: Version, now: float) -> None:
        assert self.settings is not None
        self.state.running = Point(due, now, now + self.settings.timeout_s, list(range(self.settings.total_samples)))

    # -- leases -------------------------------------------------------------------------------------------------

    def grant(self, member: MemberId, version: Version, digest: str, samples: int, now: float) -> list[PromptLease]:
        """Up to `samples` of the running point for a member that serves `version` and will go on serving it.

        `digest` is what was published as that version, empty if that is not known any more.
        """
        point, settings = self.state.running, self.settings
        if point is None or settings is None:
            return []
        if version != point.version or digest not in ("", point.digest):
            if member in point.evaluators:  # its weights changed all the same
                self._dismiss(point, member)
            if point.evaluators or not point.open or not digest or version < point.due:
                return []
            self._begin(point, version, digest)
        if not point.open or (member not in point.evaluators and len(point.evaluators) >= settings.workers):
            return []
        self.state.moves += 1
        cells, point.open = point.open[:samples], point.open[samples:]
        point.evaluators[member] = now
        leases: list[PromptLease] = []
        for prompt, members in groupby(cells, lambda cell: cell // settings.samples):
            taken = tuple(members)
            numbers = tuple(SampleId(self.state.next_sample + index) for index in range(len(taken)))
            self.state.next_sample = SampleId(self.state.next_sample + len(taken))
            point.held |= {sample: HeldCell(member, cell) for sample, cell in zip(numbers, taken, strict=True)}
            places = tuple(cell % settings.samples for cell in taken)
            leases.append(PromptLease(PromptIndex(prompt), 0, numbers, places, version, evaluation=version))
        self._release_idle(point)
        return leases

    def _begin(self, point: Point, version: Version | None, digest: str) -> None:
        """From the start, with this version or with none yet; what was scored with another does not count."""
        assert self.settings is not None
        self.state.moves += 1
        point.version, point.digest = version, digest
        point.open = list(range(self.settings.total_samples))
        point.held, point.scores, point.failures, point.failed, point.evaluators = {}, {}, {}, {}, {}

    # -- what comes back ----------------------------------------------------------------------------------------

    def take(self, member: MemberId, score: Score, now: float) -> str:
        """Counts a score; why not, otherwise. What does not count is there to be made again."""
        point, cell = self._let_go(member, score.sample, now)
        if point is None:
            return NOT_LEASED_TO_YOU
        if not score.version == score.newest == point.version or score.weights_digest != point.digest:
            self._reopen(point, cell)
            self._dismiss(point, member)  # it does not serve what it said
            made = f"was made with versions {score.version} to {score.newest}, digest {score.weights_digest!r}"
            return f"{made}; version {point.version} is evaluated, digest {point.digest!r}"
        if not isfinite(score.reward):
            self._strike(point, cell, f"its reward is {score.reward}", once=False)
        else:
            point.scores[cell] = (score.reward, score.length)
        self._look_for_end(point, now)
        return ""

    def fail(self, member: MemberId, failure: FailedRollout, now: float) -> str:
        point, cell = self._let_go(member, failure.sample, now)
        if point is None:
            return NOT_LEASED_TO_YOU
        lines = failure.error.strip().splitlines()
        self._strike(point, cell, f"{failure.hook}: {lines[-1] if lines else 'no message'}", once=failure.poison)
        self._look_for_end(point, now)
        return ""

    def give_back(self, member: MemberId, sample: SampleId, now: float) -> str:
        point, cell = self._let_go(member, sample, now)
        if point is None:
            return NOT_LEASED_TO_YOU
        self._reopen(point, cell)
        if not point.holds(member):  # it stops generating: others may serve another version by now
            self._dismiss(point, member)
        return ""

    def _let_go(self, member: MemberId, sample: SampleId, now: float) -> tuple[Point | None, Cell]:
        point = self.state.running
        held = point.held.get(sample) if point is not None else None
        if point is None or held is None or held.member != member:
            return None, -1
        self.state.moves += 1
        del point.held[sample]
        point.evaluators[member] = now
        return point, held.cell

    def _strike(self, point: Point, cell: Cell, error: str, *, once: bool) -> None:
        assert self.settings is not None
        point.failures[cell] = point.failures.get(cell, 0) + 1
        if once or point.failures[cell] >= MAX_FAILURES:
            point.failed[cell] = error
        else:
            self._reopen(point, cell)

    def _reopen(self, point: Point, cell: Cell) -> None:
        insort(point.open, cell)

    def _look_for_end(self, point: Point, now: float) -> None:
        self._release_idle(point)
        if point.open or point.held:
            return
        if not point.scores:
            self._skip(f"every sample failed, the last with {list(point.failed.values())[-1]}", now)
            return
        assert self.settings is not None
        by_prompt: dict[int, list[float]] = {}
        for cell, (reward, _) in sorted(point.scores.items()):
            by_prompt.setdefault(cell // self.settings.samples, []).append(reward)
        means = [sum(rewards) / len(rewards) for rewards in by_prompt.values()]
        mean = sum(means) / len(means)
        spread = sum((one - mean) ** 2 for one in means) / max(1, len(means) - 1)
        result = EvaluationResult(
            due=point.due,
            version=point.version,
            samples=len(point.scores),
            failed=len(point.failed),
            reward_mean=mean,
            reward_stderr=sqrt(spread / len(means)),
            length_mean=sum(length for _, length in point.scores.values()) / len(point.scores),
            took_s=now - point.since,
        )
        self._end_running(result, now)

    # -- who is there -------------------------------------------------------------------------------------------

    def lose_member(self, member: MemberId) -> None:
        """It left or died: what it held is issued again."""
        if self.pins(member) and self.state.running is not None:
            self._dismiss(self.state.running, member)

    def _dismiss(self, point: Point, member: MemberId) -> None:
        self.state.moves += 1
        for sample in [sample for sample, held in point.held.items() if held.member == member]:
            self._reopen(point, point.held.pop(sample).cell)
        point.evaluators.pop(member, None)

    def _release_idle(self, point: Point) -> None:
        """Those for whom nothing is left need not hold on to their weights."""
        if not point.open:
            for member in [member for member in point.evaluators if not point.holds(member)]:
                del point.evaluators[member]

    # -- time, and what undoes things ---------------------------------------------------------------------------

    def look(self, now: float) -> bool:
        """Ends a point that took too long, and gives up evaluators that come for no more; True if that was so."""
        point, settings, moves = self.state.running, self.settings, self.state.moves
        if point is None or settings is None:
            return False
        if now >= point.deadline:
            if point.version is None:
                came = f"no worker came to serve version {point.due} or a later one"
            else:
                came = (
                    f"only {len(point.scores)} of {settings.total_samples} samples of version {point.version} came in"
                )
            self._skip(f"{came} within {now - point.since:.0f} s", now)
            return True
        for member, since in list(point.evaluators.items()):
            if now - since > IDLE_SHARE * settings.timeout_s and not point.holds(member):
                self._dismiss(point, member)
        return self.state.moves > moves

    def excuse(self, away_s: float) -> None:
        """The controller itself was away: that time is nobody's fault."""
        point = self.state.running
        if point is not None:
            self.state.moves += 1
            point.deadline += away_s
            point.evaluators = {member: since + away_s for member, since in point.evaluators.items()}

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
        point = state.running
        if point is not None and point.due > version:
            self._skip(why, now, keep=False)
        elif point is not None and point.version is not None and point.version > version:
            self._begin(point, None, "")
        for result in undone:
            if result.due <= version:  # it was measured later than it was due
                self._fall_due(result.due, now)

    def resume(self, now: float) -> None:
        """No former worker is left: a point that had begun is made again, with its whole time."""
        point, settings = self.state.running, self.settings
        if point is not None and settings is not None:
            self._begin(point, None, "")
            point.since, point.deadline = now, now + settings.timeout_s

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
        point = self.state.running
        assert point is not None
        result = EvaluationResult(
            due=point.due, version=point.version, failed=len(point.failed), took_s=now - point.since, skipped=why
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
        """Every point ends here, once. Those that a rollback undoes will be due again, so they are not kept."""
        if keep:
            self.state.results.append(result)
        self._ended.append(result)

    def check(self, live: Container[MemberId]) -> None:
        """Raises if an invariant is broken. `live` are the members there are."""
        point, settings = self.state.running, self.settings
        if point is None:
            if self.state.waiting is not None:
                raise InvalidTransition(f"version {self.state.waiting} waits to be evaluated although nothing runs")
            return
        if settings is None:
            raise InvalidTransition("an evaluation runs although there are no settings for it")
        cells = [*point.open, *(held.cell for held in point.held.values()), *point.scores, *point.failed]
        if sorted(cells) != list(range(settings.total_samples)):
            raise InvalidTransition(
                f"{len(cells)} samples of an evaluation are accounted for, not {settings.total_samples}"
            )
        if point.open != sorted(point.open):
            raise InvalidTransition("the open samples of an evaluation are out of order")
        for member in point.evaluators:
            if member not in live:
                raise InvalidTransition(f"{member} evaluates but is not a live member")
        for held in point.held.values():
            if held.member not in point.evaluators:
                raise InvalidTransition(f"{held.member} holds samples of an evaluation without being an evaluator")
        if point.version is None and (point.held or point.scores or point.failed or point.evaluators):
            raise InvalidTransition(f"an evaluation has begun without a version: {self!r}")
        if point.version is not None and (point.version < point.due or not point.digest):
            raise InvalidTransition(f"version {point.version} is evaluated where {point.due} was due: {self!r}")
        if len(point.evaluators) > settings.workers:
            raise InvalidTransition(f"{len(point.evaluators)} workers evaluate, {settings.workers} may")

    def __repr__(self) -> str:
        point = self.state.running
        if point is None:
            return f"<Evaluation idle, {len(self.state.results)} points, next due {self.state.next_due}>"
        held = f"{len(point.held)} held by {list(point.evaluators)}"
        ended = f"{len(point.scores)} scored, {len(point.failed)} failed"
        return f"<Evaluation due {point.due} of version {point.version}: {len(point.open)} open, {held}, {ended}>"


def _after(version: Version, every: int) -> Version:
    return Version((version // every + 1) * every)
