"""Runs a workload: executes the effects of the prefetch machine on threads, and posts the resulting events to it.

Threads: `preparations` for preparation, `concurrency` for generation (one for `async def generate`, used for preflight
only), one for postprocessing and payload writing. The event loop only moves references, so it stays free.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from penstock.errors import LocalProtocolError
from penstock.records.ids import SampleId
from penstock.rollout import flow, trace
from penstock.rollout.hooks import Workload
from penstock.rollout.io.controller_calls import ControllerApi, ControllerCalls
from penstock.rollout.io.hook_calls import Evaluating, HookCalls, Store, Work
from penstock.rollout.io.tracing import Tracing, branch_counts, depth_gauges
from penstock.rollout.prefetch import Bounds, Prefetch
from penstock.rollout.settings import RolloutSection
from penstock.runtime.clock import monotonic
from penstock.runtime.offload import Offload, background
from penstock.wire.messages import Leased

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_EVERY_S = 1.0
"""Interval of polling the engine's load."""


class RunnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a generation loop."""

    bounds: Bounds = Bounds()
    prefetch: bool = RolloutSection().prefetch
    lease_wait_s: float = 5.0
    """How long the controller may hold a lease request."""
    drain_s: float
    """How long the samples in the engine may take to finish after a stop request."""
    return_s: float = 5.0
    """How long returning leases, and joining the threads, may take at the end."""


class Runner:
    """One worker's generation loop, until the prompts are exhausted, the run ends, or `stop` is called."""

    def __init__(
        self,
        workload: Workload[Any, Any, Any],
        controller: ControllerApi,
        store: Store,
        settings: RunnerSettings,
        *,
        progressed: Callable[[str], None] = lambda doing: None,
        interrupt: Callable[[], None] = lambda: None,
        traced: Callable[[trace.Trace], None] = lambda trace: None,
        evaluating: Evaluating | None = None,
        engine_figures: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """`progressed` receives the current activity, `traced` every trace. `interrupt` is called when a drain takes
        too long, and should make a blocking `generate` return early. `evaluating` generates leases of an evaluation.
        `engine_figures` returns the engine's load (see `protocol.Engine.statistics`)."""
        self.workload = workload
        self.settings = settings
        self._awaits = inspect.iscoroutinefunction(workload.generate)
        # A request engine needs new requests while it generates; a blocking one may be faster without overlap.
        measured = not self._awaits and settings.bounds.concurrency == 1
        self.machine = Prefetch(settings.bounds, prefetch=settings.prefetch, measured=measured)
        self._tracing = Tracing(traced)
        self._progressed = progressed
        self._interrupt = interrupt
        self._works: dict[flow.Ticket, Work] = {}
        self._hooks = HookCalls(
            workload,
            store,
            works=self._works,
            post=self._post,
            count=self._tracing.count,
            record=self._tracing.record,
            progressed=progressed,
            evaluating=evaluating,
            defer=self._postprocess_later,
        )
        self._postprocessing: Offload | None = None
        self._engine_figures = engine_figures
        self._evaluating = evaluating
        self._calls = ControllerCalls(
            controller,
            self._tracing,
            self._post,
            lease_wait_s=settings.lease_wait_s,
            prefetch=settings.prefetch,
            progressed=progressed,
        )
        self._inbox: deque[flow.Event | BaseException] = deque()
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._asking: asyncio.Task[Leased | None] | None = None
        self._fatal: BaseException | None = None
        self._finished: str | None = None
        self._deadline: float | None = None
        self._abandoned = False

    @property
    def traces(self) -> deque[trace.Trace]:
        """The newest traces."""
        return self._tracing.traces

    @property
    def prefetch(self) -> bool:
        """The live setting: assigning takes effect at the next batch. A setting sent with a lease overrides it."""
        return self.machine.prefetch

    @prefetch.setter
    def prefetch(self, on: bool) -> None:
        self._calls.prefetch = on
        self._post(flow.PrefetchSet(on))

    def stop(self, reason: str = "stop was requested") -> None:
        """Ends within `drain_s`: the engine's samples are finished, queued leases are returned at once. Any thread."""
        self._post(flow.StopRequested(reason))

    def abandon(self, reason: str) -> None:
        """Ends now: the engine is interrupted and every lease is returned, also those being generated. Any thread."""
        self._post(flow.Abandoned(reason))  # first: events of the interrupted engine are then late and ignored
        self._interrupt()

    async def run(self) -> str:
        """Generates until no work is left; returns the reason. Raises an error that is not attributed to a lease."""
        self._loop = asyncio.get_running_loop()
        bounds = self.settings.bounds
        threads = (
            background(bounds.preparations, "prepare"),
            background(1 if self._awaits else bounds.concurrency, "engine"),
            background(1, "postprocess"),
        )
        self._postprocessing = threads[2]
        try:
            self._progressed("preflight")
            await threads[1].run(self.workload.preflight)
            if self._evaluating is not None:
                await threads[1].run(self._evaluating.workload.preflight)
            self._post(flow.Started())
            return await self._serve(*threads)
        finally:
            closing = [asyncio.to_thread(offload.close, self.settings.return_s) for offload in threads]
            await asyncio.gather(*closing)

    async def _serve(self, preparation: Offload, engine: Offload, postprocessing: Offload) -> str:
        """Consumes the inbox; produces calls of hooks and controller; waits for events, or the deadline of a stop."""

        generating: set[asyncio.Task[None]] = set()

        def act(effect: flow.Effect) -> None:
            match effect:
                case flow.AskLease(samples, after_s):
                    ask = self._calls.ask(samples, after_s, self.machine.held_samples)
                    self._asking = self._spawn(group, ask, "ask lease")
                    self._asking.add_done_callback(self._calls.ask_ended)
                case flow.Prepare(tickets):
                    preparation.submit(self._hooks.prepare, tickets)
                case flow.Generate(batch, tickets):
                    if self._awaits:
                        task = self._spawn(group, self._hooks.generate_awaiting(batch, tickets), f"generate {batch}")
                        generating.add(task)
                        task.add_done_callback(generating.discard)
                    else:
                        engine.submit(self._hooks.generate, batch, tickets)
                case flow.Postprocess(tickets):
                    postprocessing.submit(self._hooks.postprocess, tickets)
                case flow.Deliver(tickets):
                    self._spawn(group, self._deliver(tickets), "deliver")
                case flow.ReturnLeases(tickets, samples):
                    for ticket in tickets:
                        if (work := self._works.pop(ticket, None)) is not None:
                            self._hooks.drop(work)
                    self._spawn(group, self._return(samples), "return leases")
                case flow.Finish(reason):
                    self._finished = reason

        async with asyncio.TaskGroup() as group:
            if self.settings.bounds.concurrency > 1:
                self._spawn(group, self._poll_engine(), "poll the engine")
            while self._finished is None:
                await self._wait_for_event()
                while self._inbox and self._finished is None:
                    for effect in self._decide(self._inbox.popleft()):
                        act(effect)
                self._tracing.sample(self.machine.branches, self._queue)
            if generating:  # abandoned: let each keep its unfinished episodes
                self._interrupt()
                await asyncio.wait(generating, timeout=self.settings.return_s)
            for task in self._tasks:
                task.cancel()
        if self._fatal is not None:
            raise self._fatal
        assert self._finished is not None
        return self._finished

    async def _poll_engine(self) -> None:
        """Posts the engine's load every second; cancelled at the end."""
        preempted = self._engine_figures().get("preemptions", 0.0)
        while True:
            await asyncio.sleep(POLL_EVERY_S)
            figures = self._engine_figures()
            if "requests_waiting" in figures:
                before, preempted = preempted, figures.get("preemptions", 0.0)
                decoding, waiting = int(figures["requests_decoding"]), int(figures["requests_waiting"])
                self._post(flow.EnginePolled(decoding, waiting, max(0, int(preempted - before))))

    async def _wait_for_event(self) -> None:
        """Unblocked by any hook's end, any answer of the controller, `stop`, or the deadline of a stop."""
        self._wake.clear()
        if self._inbox:  # posted before the flag was cleared
            return
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._wake.wait()
        except TimeoutError:
            self._on_deadline()

    def _on_deadline(self) -> None:
        if self._abandoned:
            logger.warning("returning leases took longer than %.1f s: %r", self.settings.return_s, self.machine)
            self._finished = self.machine.ending or "abandoned"
            return
        logger.warning("the drain took longer than %.1f s, abandoning it: %r", self.settings.drain_s, self.machine)
        self._inbox.append(flow.Abandoned(self.machine.ending or "the drain took too long"))
        self._interrupt()

    def _post(self, *events: flow.Event | BaseException) -> None:
        """Posts to the loop, from any thread; wakes it only if it may be asleep."""
        self._inbox.extend(events)
        if events and not self._wake.is_set() and self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake.set)

    def _postprocess_later(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._postprocessing is not None
        try:
            self._postprocessing.submit(function, *arguments)
        except LocalProtocolError:
            logger.debug("rewards arrived after the end of the loop; their lease was returned")

    def _decide(self, event: flow.Event | BaseException) -> list[flow.Effect]:
        assert self._loop is not None
        if isinstance(event, BaseException):
            if self._fatal is not None:
                return []
            self._fatal = event
            event = flow.Abandoned(f"{type(event).__name__}: {event}")
        if isinstance(event, flow.Abandoned):
            self._abandoned = True
            self._deadline = self._loop.time() + self.settings.return_s
        elif isinstance(event, flow.StopRequested) and self._deadline is None:
            self._deadline = self._loop.time() + self.settings.drain_s
        now = monotonic()
        first_ticket = self.machine.held.next_ticket
        effects = self.machine.handle(event, now)
        for ticket in range(first_ticket, self.machine.held.next_ticket):
            if ticket in self.machine.held:
                lease_s = event.waited_s if isinstance(event, flow.LeaseAnswered) else 0.0
                self._works[ticket] = Work(self.machine.held[ticket].lease, now, lease_s=lease_s)
        if self.machine.ending is not None and self._asking is not None:
            self._asking.cancel()
        return effects

    def _spawn(self, group: asyncio.TaskGroup, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _deliver(self, tickets: tuple[flow.Ticket, ...]) -> None:
        works = [self._works[ticket] for ticket in tickets]
        rollouts = [rollout for work in works for rollout in work.rollouts]
        failures = [failure for work in works for failure in work.failures]
        scores = [score for work in works for score in work.scores]
        if await self._calls.deliver(rollouts, failures, scores) is not None:
            for ticket in tickets:
                del self._works[ticket]
            self._hooks.deliver_s = self._calls.deliver_s
            self._post(flow.DeliverEnded())

    async def _return(self, samples: tuple[SampleId, ...]) -> None:
        await self._calls.return_samples(samples)
        self._post(flow.ReturnEnded())

    def _queue(self, now: float) -> trace.QueueSampled:
        held = self.machine
        return trace.QueueSampled(now, held.held.depths(), held.held_bytes, held.generating, held.prefetch)

    def statistics(self) -> dict[str, float]:
        """Counters since the start, and current queue depths."""
        held = self.machine
        depths = depth_gauges(held.held, held.generating)
        return {
            **self._tracing.counts(),
            **depths,
            "prefetch": float(held.prefetch),
            "concurrency": float(held.concurrency),
            "overlapping": float(held.prefetch and held.overlap.on),
            **branch_counts(held.branches),
        }

    def __repr__(self) -> str:
        return f"Runner({type(self.workload).__name__}, {self.machine!r})"
