"""Calls the hooks, on the thread that the runner chose, and classifies their errors.

Every ticket passed to a call is reported exactly once, by an event. An error of the worker itself is posted instead
and ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from math import isfinite
from typing import Any, Protocol

import msgspec

from penstock.errors import Aborted, LocalProtocolError, PeerLost, RunFailed
from penstock.records.ids import SampleId, Version
from penstock.records.payload import PayloadRef
from penstock.records.prompt import PromptLease
from penstock.records.rollout import FailedRollout, Rollout, Score, StageTimes
from penstock.rollout import flow, trace
from penstock.rollout.hooks import Arrays, Failed, Finished, Outcome, Unusable, Workload, held_bytes
from penstock.runtime.clock import monotonic

logger = logging.getLogger(__name__)

POST_EVERY_S = 0.002
"""Leases that take less than this are posted together: waking the loop for each would cost more than the work."""

ERROR_CHARACTERS = 2000
"""Kept of a traceback in a failed sample's record, from its end."""


class Store(Protocol):
    """Stores finished samples until the trainer fetches them."""

    def write(self, arrays: Arrays) -> PayloadRef:
        """Blocks while there is no room (backpressure). Called on the postprocessing thread."""
        ...

    def discard(self, payloads: Sequence[PayloadRef]) -> object:
        """Frees payloads that will not be reported. Idempotent. Any thread."""
        ...


class Versioned(Protocol):
    """The engine, reduced to the version that it serves."""

    @property
    def version(self) -> int: ...


class Evaluating(msgspec.Struct, frozen=True):
    """Hooks for leases of an evaluation: separate ones, so that an evaluation cannot affect training samples."""

    workload: Workload[Any, Any, Any]
    serving: Versioned
    keep: Callable[[PromptLease, int, Finished], None] = lambda lease, member, outcome: None
    """Called with every sample, on the postprocessing thread, to log it for users."""


class Defer(Protocol):
    """Submits a call to the postprocessing thread; does nothing once that thread is closed."""

    def __call__(self, function: Callable[..., None], *arguments: Any) -> None: ...


class Post(Protocol):
    """Posts events or errors to the loop, from any thread."""

    def __call__(self, *events: flow.Event | BaseException) -> None: ...


_Scoring = tuple[flow.Ticket, "Future[Any]", float]
"""A lease whose rewards are being computed, the future of its outcomes, and when its postprocessing began."""


class Work(msgspec.Struct):
    """Data of one lease; the state machine tracks its stage."""

    lease: PromptLease
    leased_at: float
    prepared: Any = None
    generated: Any = None
    rollouts: list[Rollout] = []
    failures: list[FailedRollout] = []
    scores: list[Score] = []
    served: Version = Version(0)
    """Version that the engine served when generation ended."""
    lease_s: float = 0.0
    prepare_s: float = 0.0
    generate_s: float = 0.0
    waited_s: float = 0.0

    def fail(self, hook: str, error: str, *, poison: bool = False) -> None:
        """Marks all samples of the lease as failed for one reason."""
        self.rollouts, self.scores = [], []
        self.failures = [failed_rollout(sample, hook, error, poison) for sample in self.lease.samples]
        self.prepared = self.generated = None


def is_infrastructure_error(error: BaseException) -> bool:
    """Whether an error is not attributed to a lease: a lost engine, a broken reward function, an exit."""
    return not isinstance(error, Exception) or isinstance(error, PeerLost | RunFailed)


def is_cancellation(error: BaseException) -> bool:
    """Whether the current task was cancelled; otherwise a CancelledError is an error of the code that raised it."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


class HookCalls:
    """Calls the five hooks of one workload and turns their outcomes into events for the prefetch machine."""

    def __init__(
        self,
        workload: Workload[Any, Any, Any],
        store: Store,
        *,
        works: dict[flow.Ticket, Work],
        post: Post,
        count: Callable[[str, float], None],
        record: Callable[[trace.Trace], None],
        progressed: Callable[[str], None],
        ends_the_run: Callable[[BaseException], bool] = is_infrastructure_error,
        evaluating: Evaluating | None = None,
        defer: Defer | None = None,
    ) -> None:
        """`ends_the_run` selects the errors that are not attributed to a lease: they are posted instead of an event.

        `defer` resumes a lease on the postprocessing thread when its rewards have arrived. Without it, that thread
        waits for the rewards of all leases of one call.
        """
        self._defer = defer
        self._ends_the_run = ends_the_run
        self._workload = workload
        self._evaluating = evaluating
        self._store = store
        self._works = works
        self._post = post
        self._count = count
        self._record = record
        self._progressed = progressed
        self.deliver_s = 0.0
        """Duration of the last delivery, for the samples of the next."""

    def prepare(self, tickets: Sequence[flow.Ticket]) -> None:
        self._each(tickets, "prepare", self._prepare_one)

    def postprocess(self, tickets: Sequence[flow.Ticket]) -> None:
        waiting: list[_Scoring] = []
        wait_for = waiting.append if self._defer is None else self._resume_when_scored
        self._each(tickets, "postprocess", lambda ticket, work: self._postprocess_one(ticket, work, wait_for))
        for scoring in waiting:
            wait([scoring[1]])
            self._on_scored(*scoring)

    def _resume_when_scored(self, scoring: _Scoring) -> None:
        defer = self._defer
        assert defer is not None
        scoring[1].add_done_callback(lambda _: defer(self._on_scored, *scoring))

    def _on_scored(self, ticket: flow.Ticket, scored: Future[Any], began: float) -> None:
        self._each([ticket], "postprocess", lambda ticket, work: self._conclude(ticket, work, scored.result(), began))

    def _each(
        self,
        tickets: Sequence[flow.Ticket],
        hook: str,
        call: Callable[[flow.Ticket, Work], flow.Event | None],
    ) -> None:
        posted_at = monotonic()
        ended: list[flow.Event] = []
        for ticket in tickets:
            work = self._works.get(ticket)
            if work is None:  # returned in the meantime
                continue
            self._progressed(hook)
            try:
                if (event := call(ticket, work)) is not None:
                    ended.append(event)
            except BaseException as error:  # noqa: BLE001 - sorted out by kind
                if self._ends_the_run(error):
                    self._post(_as_failure(hook, error))
                    return
                work.fail(hook, _text(error))
                preparing = hook == "prepare"
                ended.append(flow.PrepareEnded(ticket, failed=True) if preparing else flow.PostprocessEnded(ticket))
            if monotonic() - posted_at >= POST_EVERY_S:
                self._post(*ended)
                ended.clear()
                posted_at = monotonic()
        self._post(*ended)

    def _hooks_of(self, lease: PromptLease) -> Workload[Any, Any, Any]:
        if lease.evaluation is None:
            return self._workload
        if self._evaluating is None:
            raise LocalProtocolError("this worker was leased an evaluation, but its configuration has none")
        return self._evaluating.workload

    def _prepare_one(self, ticket: flow.Ticket, work: Work) -> flow.Event:
        started = monotonic()
        prepared = self._hooks_of(work.lease).prepare(work.lease)
        work.prepare_s = monotonic() - started
        self._count("prepare_s", work.prepare_s)
        if isinstance(prepared, Unusable):
            work.fail("prepare", prepared.reason, poison=True)
            return flow.PrepareEnded(ticket, failed=True)
        work.prepared = prepared
        return flow.PrepareEnded(ticket, held_bytes(prepared))

    def _postprocess_one(
        self, ticket: flow.Ticket, work: Work, wait_for: Callable[[_Scoring], None]
    ) -> flow.Event | None:
        started = monotonic()
        outcomes = self._hooks_of(work.lease).postprocess(work.prepared, work.generated)
        if not isinstance(outcomes, Future):
            return self._conclude(ticket, work, outcomes, started)
        wait_for((ticket, outcomes, started))
        return None if self._defer is None else flow.ScoringBegan(ticket)

    def _conclude(self, ticket: flow.Ticket, work: Work, outcomes: Sequence[Outcome], started: float) -> flow.Event:
        if len(outcomes) != len(work.lease.samples):
            raise LocalProtocolError(
                f"postprocess must return one outcome per sample: expected {len(work.lease.samples)}, "
                f"found {len(outcomes)}"
            )
        self._record_outcomes(work, outcomes, started)
        work.prepared = work.generated = None
        if ticket not in self._works:  # returned in the meantime
            self.drop(work)
        self._count("postprocess_s", monotonic() - started)
        return flow.PostprocessEnded(ticket)

    def drop(self, work: Work) -> None:
        """Discards the payloads of a lease whose samples will not be reported."""
        rollouts, work.rollouts = work.rollouts, []
        if rollouts:
            self._store.discard([rollout.payload for rollout in rollouts])

    def generate(self, batch: int, tickets: Sequence[flow.Ticket]) -> None:
        """For a workload whose `generate` blocks."""
        works = self._entered(batch, tickets)
        if not works:
            return
        started = monotonic()
        hook = "collate"
        try:
            workload = self._hooks_of(works[0].lease)
            collated = workload.collate([work.prepared for work in works])
            hook = "generate"
            generated: Any = workload.generate(collated)
            self._left(batch, works, generated, started)
        except BaseException as error:  # noqa: BLE001 - sorted out by kind
            self._raised(batch, works, hook, error, started)

    async def generate_awaiting(self, batch: int, tickets: Sequence[flow.Ticket]) -> None:
        """For a workload with `async def generate`: on the loop, many concurrently."""
        works = self._entered(batch, tickets)
        if not works:
            return
        started = monotonic()
        hook = "collate"
        try:
            workload = self._hooks_of(works[0].lease)
            collated = workload.collate([work.prepared for work in works])
            hook = "generate"
            answer: Any = workload.generate(collated)
            self._left(batch, works, await answer, started)
        except BaseException as error:  # sorted out by kind
            if is_cancellation(error):
                raise
            self._raised(batch, works, hook, error, started)

    def _entered(self, batch: int, tickets: Sequence[flow.Ticket]) -> list[Work]:
        """The leases to generate. Ends the batch at once if all of them were returned before its turn."""
        works = [work for ticket in tickets if (work := self._works.get(ticket)) is not None]
        if not works:
            self._post(flow.GenerateEnded(batch, failed=True))
            return works
        now = monotonic()
        samples = 0
        for work in works:
            samples += len(work.lease.samples)
            work.waited_s = max(0.0, now - work.leased_at - work.prepare_s)
        self._progressed(f"generate {samples} samples")
        self._record(trace.GenerateEntered(now, batch, len(works), samples))
        return works

    def _left(self, batch: int, works: Sequence[Work], generated: Any, started: float) -> None:
        if len(generated) != len(works):
            raise LocalProtocolError(
                f"generate must return one result per prompt: expected {len(works)}, found {len(generated)}"
            )
        now = monotonic()
        served = Version(self._evaluating.serving.version if self._evaluating is not None else 0)
        for work, result in zip(works, generated, strict=True):
            work.generated, work.served = result, served
            work.generate_s = now - started
        self._count("batches", 1)
        self._count("generate_s", now - started)
        self._record(trace.GenerateLeft(now, batch, now - started))
        sizes = tuple(held_bytes(work.prepared) + held_bytes(work.generated) for work in works)
        self._post(flow.GenerateEnded(batch, sizes))

    def _raised(self, batch: int, works: Sequence[Work], hook: str, error: BaseException, started: float) -> None:
        now = monotonic()
        self._record(trace.GenerateLeft(now, batch, now - started, f"{hook}: {type(error).__name__}: {error}"))
        if self._ends_the_run(error):
            self._post(_as_failure(hook, error))
            return
        if not isinstance(error, Aborted):
            logger.warning("%s of %d prompts raised %s: %s", hook, len(works), type(error).__name__, error)
        if len(works) == 1:
            works[0].fail(hook, _text(error))
        self._post(flow.GenerateEnded(batch, failed=True))

    def _record_outcomes(self, work: Work, outcomes: Sequence[Outcome], started: float) -> None:
        """Stores the arrays of each sample and records the outcomes to deliver."""
        work.rollouts, work.failures, work.scores = [], [], []
        try:
            normalized = map(_normalized, outcomes)
            for sample, member, outcome in zip(work.lease.samples, work.lease.members, normalized, strict=True):
                if isinstance(outcome, Failed):
                    work.failures.append(failed_rollout(sample, outcome.hook, outcome.error, outcome.poison))
                elif work.lease.evaluation is not None:
                    work.scores.append(self._scored(work, sample, member, outcome))
                else:
                    stored = self._stored(work, sample, outcome, started)  # may block, and `drop` replaces the list
                    work.rollouts.append(stored)
        except BaseException:
            self.drop(work)  # the lease fails as a whole
            raise

    def _scored(self, work: Work, sample: SampleId, member: int, outcome: Finished) -> Score:
        """A sample of an evaluation: only its score is reported, and it is logged for users."""
        assert self._evaluating is not None
        self._evaluating.keep(work.lease, member, outcome)
        self._count("evaluated_samples", 1)
        return Score(
            sample=sample,
            version=outcome.version,
            newest=max(outcome.version, work.served),
            weights_digest=outcome.weights_digest,
            reward=outcome.reward,
            length=outcome.length,
        )

    def _stored(self, work: Work, sample: SampleId, outcome: Finished, started: float) -> Rollout:
        self._count("reward_sum", outcome.reward)
        self._count("length_sum", outcome.length)
        self._count("unscored_samples", float(bool(outcome.unscored)))
        payload = self._store.write(outcome.arrays)
        times = StageTimes(
            prepare_s=work.prepare_s,
            generate_s=work.generate_s,
            postprocess_s=monotonic() - started,
            waited_s=work.waited_s,
            lease_s=work.lease_s,
            deliver_s=self.deliver_s,
        )
        return Rollout(
            sample=sample,
            version=outcome.version,
            weights_digest=outcome.weights_digest,
            reward=outcome.reward,
            length=outcome.length,
            payload=payload,
            unscored=outcome.unscored[-ERROR_CHARACTERS:],
            times=times,
        )


def _normalized(outcome: Outcome) -> Outcome:
    """Converts numpy numbers to Python's for the wire. A reward that is not finite fails only its own sample."""
    if isinstance(outcome, Failed):
        return outcome
    reward = float(outcome.reward)
    if not isfinite(reward):
        return Failed(f"its reward is {reward}: rewards must be finite")
    version, length = Version(int(outcome.version)), int(outcome.length)
    return msgspec.structs.replace(outcome, reward=reward, version=version, length=length)


def failed_rollout(sample: SampleId, hook: str, error: str, poison: bool) -> FailedRollout:
    return FailedRollout(sample=sample, hook=hook, error=error[-ERROR_CHARACTERS:], poison=poison)


def _as_failure(hook: str, error: BaseException) -> Exception:
    """Turns an exit in a hook into RunFailed: it would end the process silently, with `sys.exit(0)` as a success."""
    if isinstance(error, Exception):
        return error
    failure = RunFailed(f"{hook} raised {type(error).__name__}: {error}; a hook must not end the process, let it raise")
    failure.__cause__ = error
    return failure


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
