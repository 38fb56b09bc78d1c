"""Runs a workload: does what the prefetch machine decides, on threads, and reports back to it.

Threads: one for preparation, one per engine slot for generation (none for `async def generate`), one for
postprocessing and payload writing. The event loop only moves references, so it stays free.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec

from penstock.errors import LocalProtocolError, PeerLost, RunFailed
from penstock.records.ids import SampleId
from penstock.records.payload import PayloadRef
from penstock.records.prompt import PromptLease
from penstock.records.rollout import FailedRollout, Rollout, StageTimes
from penstock.rollout import flow
from penstock.rollout.hooks import Arrays, Failed, Finished, Outcome, Unusable, Workload, held_bytes
from penstock.rollout.prefetch import Bounds, Prefetch
from penstock.runtime.offload import Offload
from penstock.wire.messages import Delivered, Leased

logger = logging.getLogger(__name__)

ERROR_CHARACTERS = 2000
"""Of a traceback, kept in a failed sample's record: its end says what happened."""


class Desk(Protocol):
    """The control plane, as a worker sees it. Retries and reconnects are its own affair."""

    async def lease(self, samples: int, wait_s: float) -> Leased: ...

    async def deliver(
        self,
        rollouts: Sequence[Rollout],
        failures: Sequence[FailedRollout],
        returned: Sequence[SampleId],
    ) -> Delivered: ...


class Store(Protocol):
    """Where finished samples wait for the trainer."""

    def write(self, arrays: Arrays) -> PayloadRef:
        """Blocks while there is no room: that is the backpressure. Called on the postprocessing thread."""
        ...


class RunnerSettings(msgspec.Struct, frozen=True):
    """How a worker runs its workload."""

    bounds: Bounds = Bounds()
    prefetch: bool = True
    lease_wait_s: float = 5.0
    """How long the desk may hold an ask."""
    drain_s: float = 10.0
    """How long the samples in the engine may take to finish once a stop was asked for."""
    return_s: float = 5.0
    """How long giving leases back, and joining the threads, may take at the very end."""


class _Work(msgspec.Struct):
    """What the runner keeps of one lease: the machine knows where it is, this is what it is."""

    lease: PromptLease
    leased_at: float
    prepared: Any = None
    generated: Any = None
    rollouts: list[Rollout] = []
    failures: list[FailedRollout] = []
    prepare_s: float = 0.0
    generate_s: float = 0.0
    waited_s: float = 0.0


class Runner:
    """One worker's generation loop, until the prompts are exhausted, the run is over, or `stop` was called."""

    def __init__(
        self,
        workload: Workload[Any, Any, Any],
        desk: Desk,
        store: Store,
        settings: RunnerSettings = RunnerSettings(),
        *,
        progressed: Callable[[str], None] = lambda doing: None,
    ) -> None:
        self.workload = workload
        self.settings = settings
        self.machine = Prefetch(settings.bounds, prefetch=settings.prefetch)
        self._configured_prefetch = settings.prefetch
        self._desk = desk
        self._store = store
        self._progressed = progressed
        self._work: dict[flow.Ticket, _Work] = {}
        self._inbox: deque[flow.Event | BaseException] = deque()
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._awaits = inspect.iscoroutinefunction(workload.generate)
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: asyncio.Task[None] | None = None
        self._counts: dict[str, float] = {}
        self._fatal: BaseException | None = None
        self._finished: str | None = None
        self._drain_deadline: float | None = None
        self._preparation: Offload | None = None
        self._engine: Offload | None = None
        self._postprocessing: Offload | None = None

    @property
    def prefetch(self) -> bool:
        """The live setting: assigning takes effect at the next batch."""
        return self.machine.prefetch

    @prefetch.setter
    def prefetch(self, on: bool) -> None:
        self._configured_prefetch = on
        self._post(flow.PrefetchSet(on))

    def stop(self, reason: str = "stop was asked for") -> None:
        """Ends within `drain_s`: the engine's samples are finished, waiting leases go back at once. Any thread."""
        self._post(flow.StopAsked(reason))

    async def run(self) -> str:
        """Generates until there is no more to do; returns why it ended, raises what a hook could not survive."""
        self._loop = asyncio.get_running_loop()
        bounds = self.settings.bounds
        self._preparation = Offload(bounds.preparations, "prepare")
        self._engine = Offload(1 if self._awaits else bounds.concurrency, "engine")
        self._postprocessing = Offload(1, "postprocess")
        try:
            self._progressed("preflight")
            await self._engine.run(self.workload.preflight)
            self._post(flow.Started())
            return await self._serve()
        finally:
            await asyncio.gather(
                *(
                    asyncio.to_thread(offload.close, self.settings.return_s)
                    for offload in (self._preparation, self._engine, self._postprocessing)
                )
            )

    async def _serve(self) -> str:
        async with asyncio.TaskGroup() as group:
            while self._finished is None:
                await self._wait_for_news()
                while self._inbox and self._finished is None:
                    self._take(self._inbox.popleft(), group)
            for task in self._tasks:
                task.cancel()
        if self._fatal is not None:
            raise self._fatal
        return self._finished

    async def _wait_for_news(self) -> None:
        """Waits for the inbox; unblocked by any hook's end, any answer of the desk, `stop`, or the drain deadline."""
        if self._inbox:
            return
        self._wake.clear()
        if self._inbox:
            return
        if self._drain_deadline is None:
            await self._wake.wait()
            return
        try:
            async with asyncio.timeout_at(self._drain_deadline):
                await self._wake.wait()
        except TimeoutError:
            self._on_drain_deadline()

    def _on_drain_deadline(self) -> None:
        assert self._loop is not None
        if self.machine.ending is not None and not self._counts.get("abandoned"):
            logger.warning("drain took longer than %.1f s, giving up: %r", self.settings.drain_s, self.machine)
            self._counts["abandoned"] = 1
            self._drain_deadline = self._loop.time() + self.settings.return_s
            self._inbox.append(flow.Abandoned(self.machine.ending))
        else:
            logger.warning(
                "giving leases back took longer than %.1f s, leaving: %r", self.settings.return_s, self.machine
            )
            self._finished = self.machine.ending or "abandoned"

    def _post(self, event: flow.Event | BaseException) -> None:
        """Tells the loop something, from any thread; wakes it only if it may be asleep."""
        self._inbox.append(event)
        if not self._wake.is_set() and self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake.set)

    def _take(self, event: flow.Event | BaseException, group: asyncio.TaskGroup) -> None:
        assert self._loop is not None
        if isinstance(event, BaseException):
            if self._fatal is None:
                self._fatal = event
                self._drain_deadline = self._loop.time() + self.settings.return_s
                self._counts["abandoned"] = 1
                event = flow.Abandoned(f"{type(event).__name__}: {event}")
            else:
                return
        first_ticket = self.machine.next_ticket
        effects = self.machine.handle(event, time.monotonic())
        if isinstance(event, flow.LeaseAnswered):
            now = time.monotonic()
            for ticket in range(first_ticket, self.machine.next_ticket):
                if self.machine.holds(ticket):
                    self._work[ticket] = _Work(self.machine.lease(ticket), now)
        elif isinstance(event, flow.StopAsked) and self._drain_deadline is None:
            self._drain_deadline = self._loop.time() + self.settings.drain_s
        if self.machine.ending is not None and self._asking is not None:
            self._asking.cancel()
        for effect in effects:
            self._do(effect, group)

    def _do(self, effect: flow.Effect, group: asyncio.TaskGroup) -> None:
        assert self._preparation is not None
        assert self._engine is not None
        assert self._postprocessing is not None
        match effect:
            case flow.AskLease(samples, after_s):
                self._asking = self._spawn(group, self._ask(samples, after_s), "ask lease")
            case flow.Prepare(tickets):
                self._preparation.submit(self._prepare, tickets)
            case flow.Generate(batch, tickets):
                if self._awaits:
                    self._spawn(group, self._generate_awaiting(batch, tickets), f"generate {batch}")
                else:
                    self._engine.submit(self._generate_blocking, batch, tickets)
            case flow.Postprocess(tickets):
                self._postprocessing.submit(self._postprocess, tickets)
            case flow.Deliver(tickets):
                self._spawn(group, self._deliver(tickets), "deliver")
            case flow.ReturnLeases(tickets, samples):
                for ticket in tickets:
                    self._work.pop(ticket, None)
                self._spawn(group, self._return(samples), "return leases")
            case flow.Finish(reason):
                self._finished = reason

    def _spawn(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # What the loop waits for.

    async def _ask(self, samples: int, after_s: float) -> None:
        """Consumes one answer of the desk. Waits at most `after_s + lease_wait_s` and the desk's own retries."""
        try:
            if after_s:
                await asyncio.sleep(after_s)
            asked = time.monotonic()
            answer = await self._desk.lease(samples, self.settings.lease_wait_s)
        except asyncio.CancelledError:
            # What the desk may have granted meanwhile goes back when the worker unregisters.
            self._post(flow.LeaseAnswered((), "throttled"))
            raise
        except Exception as error:  # noqa: BLE001 - raised by `run`, once the leases in hand are given back
            self._post(error)
            return
        on = self._configured_prefetch if answer.prefetch is None else answer.prefetch
        if on != self.machine.prefetch:
            self._post(flow.PrefetchSet(on))
        self._post(flow.LeaseAnswered(answer.leases, answer.verdict, time.monotonic() - asked))
        if answer.phase in ("complete", "stopped"):
            self._post(flow.Abandoned(f"the run is {answer.phase}"))
        self._progressed(f"lease {answer.verdict}")

    async def _deliver(self, tickets: tuple[flow.Ticket, ...]) -> None:
        works = [self._work[ticket] for ticket in tickets]
        rollouts = [rollout for work in works for rollout in work.rollouts]
        failures = [failure for work in works for failure in work.failures]
        try:
            answer = await self._desk.deliver(rollouts, failures, ())
        except Exception as error:  # noqa: BLE001 - raised by `run`
            self._post(error)
            return
        for ticket in tickets:
            del self._work[ticket]
        self._count("delivered_samples", len(rollouts))
        self._count("failed_samples", len(failures))
        self._count("refused_samples", len(answer.refused))
        self._count("deliveries", 1)
        self._post(flow.DeliverEnded())

    async def _return(self, samples: tuple[SampleId, ...]) -> None:
        try:
            await self._desk.deliver((), (), samples)
        except Exception as error:  # noqa: BLE001 - they expire with this worker anyway
            logger.warning("%d leases could not be given back: %s", len(samples), error)
        self._count("returned_samples", len(samples))
        self._post(flow.ReturnEnded())

    # What runs on threads. Each reports every ticket it was given exactly once, or an error that ends the run.

    def _prepare(self, tickets: tuple[flow.Ticket, ...]) -> None:
        for ticket in tickets:
            work = self._work.get(ticket)
            if work is None:  # given back in the meantime
                continue
            self._progressed("prepare")
            started = time.monotonic()
            try:
                prepared = self.workload.prepare(work.lease)
                work.prepare_s = time.monotonic() - started
                if isinstance(prepared, Unusable):
                    self._fail(work, "prepare", prepared.reason, poison=True)
                    self._post(flow.PrepareEnded(ticket, failed=True))
                    continue
                work.prepared = prepared
                self._post(flow.PrepareEnded(ticket, held_bytes(prepared)))
            except (PeerLost, RunFailed) as error:
                self._post(error)
                return
            except Exception:  # noqa: BLE001 - costs the lease; recorded with its traceback
                self._fail(work, "prepare", traceback.format_exc())
                self._post(flow.PrepareEnded(ticket, failed=True))
            except BaseException as error:  # noqa: BLE001 - raised by `run`
                self._post(error)
                return

    def _generate_blocking(self, batch: int, tickets: tuple[flow.Ticket, ...]) -> None:
        works = self._entered(tickets)
        if works is None:
            return
        started = time.monotonic()
        hook = "collate"
        try:
            collated = self.workload.collate([work.prepared for work in works])
            hook = "generate"
            generated: Any = self.workload.generate(collated)
            self._left(batch, works, generated, started)
        except BaseException as error:  # noqa: BLE001 - sorted out by kind
            self._generate_raised(batch, works, hook, error)

    async def _generate_awaiting(self, batch: int, tickets: tuple[flow.Ticket, ...]) -> None:
        works = self._entered(tickets)
        if works is None:
            return
        started = time.monotonic()
        hook = "collate"
        try:
            collated = self.workload.collate([work.prepared for work in works])
            hook = "generate"
            answer: Any = self.workload.generate(collated)
            self._left(batch, works, await answer, started)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - sorted out by kind
            self._generate_raised(batch, works, hook, error)

    def _entered(self, tickets: tuple[flow.Ticket, ...]) -> list[_Work] | None:
        works = [self._work.get(ticket) for ticket in tickets]
        kept = [work for work in works if work is not None]
        if len(kept) != len(works):  # abandoned before it began
            return None
        now = time.monotonic()
        for work in kept:
            work.waited_s = max(0.0, now - work.leased_at - work.prepare_s)
        self._progressed(f"generate {sum(len(work.lease.samples) for work in kept)} samples")
        return kept

    def _left(self, batch: int, works: list[_Work], generated: Any, started: float) -> None:
        if len(generated) != len(works):
            raise LocalProtocolError(
                f"generate must return one result per prompt: expected {len(works)}, found {len(generated)}"
            )
        took_s = time.monotonic() - started
        for work, result in zip(works, generated, strict=True):
            work.generated = result
            work.generate_s = took_s
        self._count("batches", 1)
        self._count("generate_s", took_s)
        sizes = tuple(held_bytes(work.prepared) + held_bytes(work.generated) for work in works)
        self._post(flow.GenerateEnded(batch, sizes))

    def _generate_raised(self, batch: int, works: list[_Work], hook: str, error: BaseException) -> None:
        if not isinstance(error, Exception) or isinstance(error, PeerLost | RunFailed):
            self._post(error)
            return
        logger.warning("%s of %d prompts raised %s: %s", hook, len(works), type(error).__name__, error)
        if len(works) == 1:
            text = "".join(traceback.format_exception(error))
            self._fail(works[0], hook, text)
        self._post(flow.GenerateEnded(batch, failed=True))

    def _postprocess(self, tickets: tuple[flow.Ticket, ...]) -> None:
        for ticket in tickets:
            work = self._work.get(ticket)
            if work is None:
                continue
            self._progressed("postprocess")
            started = time.monotonic()
            try:
                outcomes = self.workload.postprocess(work.prepared, work.generated)
                if len(outcomes) != len(work.lease.samples):
                    raise LocalProtocolError(
                        f"postprocess must return one outcome per sample: expected {len(work.lease.samples)}, "
                        f"found {len(outcomes)}"
                    )
                self._keep(work, outcomes, started)
            except (PeerLost, RunFailed) as error:
                self._post(error)
                return
            except Exception:  # noqa: BLE001 - costs the lease; recorded with its traceback
                self._fail(work, "postprocess", traceback.format_exc())
            except BaseException as error:  # noqa: BLE001 - raised by `run`
                self._post(error)
                return
            work.prepared = work.generated = None
            self._count("postprocess_s", time.monotonic() - started)
            self._post(flow.PostprocessEnded(ticket))

    def _keep(self, work: _Work, outcomes: Sequence[Outcome], started: float) -> None:
        """Writes the bulk of each sample and notes what is to be reported."""
        rollouts: list[Rollout] = []
        failures: list[FailedRollout] = []
        samples = len(outcomes)
        for sample, outcome in zip(work.lease.samples, outcomes, strict=True):
            if isinstance(outcome, Failed):
                failures.append(_failed(sample, "postprocess", outcome.error, outcome.poison))
                continue
            assert isinstance(outcome, Finished)
            self._count("reward_sum", outcome.reward)
            self._count("length_sum", outcome.length)
            rollouts.append(
                Rollout(
                    sample=sample,
                    version=outcome.version,
                    weights_digest=outcome.weights_digest,
                    reward=outcome.reward,
                    length=outcome.length,
                    payload=self._store.write(outcome.arrays),
                    times=StageTimes(
                        prepare_s=work.prepare_s,
                        generate_s=work.generate_s,
                        postprocess_s=(time.monotonic() - started) / samples,
                        waited_s=work.waited_s,
                    ),
                )
            )
        work.rollouts, work.failures = rollouts, failures

    def _fail(self, work: _Work, hook: str, error: str, poison: bool = False) -> None:
        work.rollouts = []
        work.failures = [_failed(sample, hook, error, poison) for sample in work.lease.samples]
        work.prepared = work.generated = None

    def _count(self, name: str, amount: float) -> None:
        self._counts[name] = self._counts.get(name, 0.0) + amount

    def statistics(self) -> dict[str, float]:
        """Counters since the start and depths now, by plain names."""
        held = self.machine
        depths = {
            "line_samples": held.line_samples,
            "output_samples": held.output_samples,
            "held_bytes": held.held_bytes,
            "generating_batches": held.generating,
            "prefetch": float(held.prefetch),
        }
        branches = {f"branch_{name}": float(count) for name, count in held.branches.items()}
        return {**self._counts, **depths, **branches}

    def __repr__(self) -> str:
        return f"Runner({type(self.workload).__name__}, {self.machine!r})"


def _failed(sample: SampleId, hook: str, error: str, poison: bool) -> FailedRollout:
    return FailedRollout(sample=sample, hook=hook, error=error[-ERROR_CHARACTERS:], poison=poison)
