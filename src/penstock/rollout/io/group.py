"""Rank 0's side of a worker of several ranks, with the same interface as a runner of one process.

Rank 0's lockstep loop runs in a thread; the code here runs on the event loop, which calls the controller. The thread
calls `orders`, `handle_reports` and `dropped`; each of them runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from msgspec import structs

from penstock.errors import LocalProtocolError, PeerLost
from penstock.records.ids import SampleId
from penstock.records.payload import PayloadRef
from penstock.records.rollout import FailedRollout, Rollout
from penstock.records.weights import Manifest
from penstock.rollout import cadence, flow, lead, trace
from penstock.rollout.io.controller_calls import ControllerApi, ControllerCalls
from penstock.rollout.io.rank_fetch import Orders, RankReport
from penstock.rollout.io.runner import RunnerSettings
from penstock.rollout.io.tracing import Tracing, branch_counts
from penstock.rollout.lead import Lead

logger = logging.getLogger(__name__)

T = TypeVar("T")
Outcomes = dict[SampleId, Rollout | FailedRollout]

WORKING_TICK_S = 0.02
"""How long idle ranks wait for leases before the next fetch."""
PAUSED_TICK_S = 0.2
ANSWER_S = 60.0
"""Longest wait of the lockstep thread for the event loop; a loop that does not answer in time is wedged."""


class GroupRunner:
    """One worker's generation by all of its ranks. Can be run again after it ended."""

    def __init__(
        self,
        controller: ControllerApi,
        settings: RunnerSettings,
        *,
        progressed: Callable[[str], None] = lambda doing: None,
        interrupt: Callable[[], None] = lambda: None,
        traced: Callable[[trace.Trace], None] = lambda event: None,
    ) -> None:
        """Create it on the event loop. `interrupt` should make a blocking `generate` of every rank return early."""
        self.settings = settings
        self.devices: tuple[int, ...] = ()
        """Devices of the pool, one for each rank; sent to every rank with each fetch."""
        self.machine = Lead(settings.bounds.batch_samples, prefetch=settings.prefetch)
        self._interrupt = interrupt
        self._tracing = Tracing(traced)
        self._calls = ControllerCalls(
            controller,
            self._tracing,
            self._post,
            lease_wait_s=settings.lease_wait_s,
            prefetch=settings.prefetch,
            progressed=progressed,
        )
        self._loop = asyncio.get_running_loop()
        self._tasks: asyncio.TaskGroup | None = None
        self._spawned: set[asyncio.Task[Any]] = set()
        self._asking: asyncio.Task[Any] | None = None
        self._changed = asyncio.Event()
        self._outcomes: Outcomes = {}
        self._lease_s: dict[SampleId, float] = {}
        """Duration of the lease request that granted each sample."""
        self._discards: list[PayloadRef] = []
        self._manifest: Manifest | None = None
        self._counts: dict[int, dict[str, float]] = {}
        self._command: lead.Command | None = None
        self._finished: str | None = None
        self._fatal: BaseException | None = None
        self._deadline: float | None = None
        self._abandoned = False

    # -- for the caller ---------------------------------------------------------------------------------------------

    @property
    def prefetch(self) -> bool:
        """The live setting: every rank receives it with the next fetch. A setting sent with a lease overrides it."""
        return self.machine.prefetch

    @prefetch.setter
    def prefetch(self, on: bool) -> None:
        self._calls.prefetch = on
        self._loop.call_soon_threadsafe(self._decide, flow.PrefetchSet(on))

    def announce(self, manifest: Manifest) -> None:
        """Sends this manifest to every rank with the next fetch."""
        self._manifest = manifest

    def discard(self, payloads: Sequence[PayloadRef]) -> None:
        """Sends the payloads to discard to all ranks with the next fetch; each frees those in its own ring."""
        self._discards += payloads

    async def run(self) -> str:
        """Generates until no work is left and every rank is paused; returns the reason."""
        self._finished = self._deadline = None
        self._abandoned = False
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._decide(lead.WorkBegan())
                while self._finished is None:
                    await self._wait_for_change()
                for task in self._spawned:
                    task.cancel()
        finally:
            self._tasks = self._asking = None
        if self._fatal is not None:
            raise self._fatal
        return self._finished

    def stop(self, reason: str = "stop was requested") -> None:
        """Ends within `drain_s`: batches in the engines finish, batches held ahead are returned at the next fetch."""
        if self._deadline is None:
            self._deadline = self._loop.time() + self.settings.drain_s
        self._decide(flow.StopRequested(reason))

    def abandon(self, reason: str) -> None:
        """Ends now: every lease is returned at once, and the engines are interrupted."""
        self._abandoned = True
        self._deadline = self._loop.time() + self.settings.return_s
        self._decide(flow.Abandoned(reason))
        self._interrupt()

    def end(self) -> None:
        """Shuts down every rank with the next fetch."""
        self._decide(lead.ShutdownRequested())

    def broke(self, error: BaseException) -> None:
        """The ranks or the controller failed: leases are returned at once, and `run` raises this error."""
        if self._fatal is None:
            self._fatal = error
            self.abandon(f"{type(error).__name__}: {error}")

    def statistics(self) -> dict[str, float]:
        """The sum of the ranks' counters, with the counters of rank 0's calls to the controller."""
        total = self._tracing.counts()
        for counts in self._counts.values():
            for name, value in counts.items():
                total[name] = total.get(name, 0.0) + value
        machine = self.machine
        state = {"outstanding_samples": float(len(machine.outstanding)), "prefetch": float(machine.prefetch)}
        return {**total, **state, **branch_counts(machine.branches)}

    # -- for the lockstep thread -------------------------------------------------------------------------------------

    def orders(self, *, idle: bool) -> Orders:
        """See `Leader.orders`."""
        return self._on_loop(self._orders(idle))

    def handle_reports(self, reports: Sequence[RankReport]) -> None:
        """See `Leader.handle_reports`."""
        self._on_loop(self._handle_reports(reports))

    def dropped(self, effect: cadence.Drop) -> None:
        """See `Leader.dropped`."""
        self._loop.call_soon_threadsafe(self._decide, lead.Dropped(effect.samples))

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(ANSWER_S)
        except TimeoutError:
            raise PeerLost(f"rank 0's event loop did not answer its lockstep thread within {ANSWER_S:.0f} s") from None

    async def _orders(self, idle: bool) -> Orders:
        """Unblocked by leases, by any other change of state, or by the tick."""
        self._decide(lead.FetchDue())
        machine = self.machine
        if idle and not machine.ready and machine.order != "end":
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WORKING_TICK_S if machine.working else PAUSED_TICK_S):
                    await self._changed.wait()
        self._decide(lead.CommandRequested())
        command, self._command = self._command, None
        assert command is not None
        manifest, self._manifest = self._manifest, None
        discards, self._discards = tuple(self._discards), []
        return Orders(command.order, command.leases, command.prefetch, manifest, discards, self.devices)

    async def _handle_reports(self, reports: Sequence[RankReport]) -> None:
        self._counts.update({rank: report.counts for rank, report in enumerate(reports) if report.counts is not None})
        self._outcomes = {
            outcome.sample: outcome for report in reports for outcome in (*report.rollouts, *report.failures)
        }
        self._decide(lead.OutcomesReceived(tuple(self._outcomes)))
        if all(report.paused for report in reports):
            self._decide(lead.RanksPaused())

    # -- acting -----------------------------------------------------------------------------------------------------

    def _decide(self, event: lead.Event) -> None:
        for effect in self.machine.handle(event, time.monotonic()):
            self._act(effect)
        if self.machine.ending is not None and self.machine.asking and self._asking is not None:
            self._asking.cancel()
        if not isinstance(event, lead.FetchDue | lead.CommandRequested | flow.PrefetchSet):
            self._changed.set()

    def _post(self, *events: flow.Event | BaseException) -> None:
        for event in events:
            match event:
                case flow.Abandoned(reason):
                    self.abandon(reason)
                case flow.LeaseAnswered(leases, _, waited_s):
                    self._lease_s |= {sample: waited_s for lease in leases for sample in lease.samples}
                    self._decide(event)
                case flow.PrefetchSet():
                    self._decide(event)
                case BaseException():
                    self.broke(event)
                case _:
                    raise LocalProtocolError(f"unexpected event of a controller call: {event!r}")

    def _act(self, effect: lead.Effect) -> None:
        match effect:
            case lead.Command():
                self._command = effect
            case flow.AskLease(samples, after_s):
                ask = self._calls.ask(samples, after_s, len(self.machine.outstanding))
                self._asking = self._spawn(ask, "ask lease")
                self._asking.add_done_callback(self._calls.ask_ended)
            case lead.Deliver(samples):
                self._spawn(self._deliver(samples, self._outcomes), "deliver")
            case lead.Discard(samples):
                self._discard(samples, self._outcomes)
            case lead.ReturnSamples(samples):
                self._spawn(self._return_samples(samples), "return leases")
            case flow.Finish(reason):
                self._finished = reason

    def _spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        if self._tasks is None:
            work.close()
            raise LocalProtocolError(f"cannot {name}: generation is not running")
        task = self._tasks.create_task(work, name=name)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    async def _deliver(self, samples: frozenset[SampleId], outcomes: Outcomes) -> None:
        rollouts = [self._timed(one) for one in outcomes.values() if one.sample in samples and isinstance(one, Rollout)]
        failures = [one for one in outcomes.values() if one.sample in samples and isinstance(one, FailedRollout)]
        self._forget(samples)
        answer = await self._calls.deliver(rollouts, failures)
        if answer is not None:
            self._discard(frozenset(answer.refused), outcomes)
        self._decide(lead.ControllerAnswered())

    def _timed(self, rollout: Rollout) -> Rollout:
        """Adds the times of the controller calls, which rank 0 makes for all ranks."""
        times = structs.replace(
            rollout.times, lease_s=self._lease_s.get(rollout.sample, 0.0), deliver_s=self._calls.deliver_s
        )
        return structs.replace(rollout, times=times)

    def _forget(self, samples: Iterable[SampleId]) -> None:
        for sample in samples:
            self._lease_s.pop(sample, None)

    def _discard(self, samples: frozenset[SampleId], outcomes: Outcomes) -> None:
        self.discard([one.payload for one in outcomes.values() if one.sample in samples and isinstance(one, Rollout)])

    async def _return_samples(self, samples: tuple[SampleId, ...]) -> None:
        self._forget(samples)
        await self._calls.return_samples(samples)
        self._decide(lead.ControllerAnswered())

    async def _wait_for_change(self) -> None:
        """Unblocked by any event, or by the deadline of a stop."""
        self._changed.clear()
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._changed.wait()
        except TimeoutError:
            self._on_deadline()
        if self._fatal is not None and self.machine.drained:  # failed ranks never report a pause
            self._finished = self.machine.ending or "broken"

    def _on_deadline(self) -> None:
        if not self._abandoned:
            logger.warning("the drain took longer than %.1f s, abandoning it: %r", self.settings.drain_s, self.machine)
            self.abandon(self.machine.ending or "the drain took too long")
            return
        late = PeerLost(f"the ranks did not pause within {self.settings.return_s:.1f} s: {self.machine!r}")
        self._fatal = self._fatal or late
        self._finished = self.machine.ending or "abandoned"

    def __repr__(self) -> str:
        return f"GroupRunner({self.machine!r})"
