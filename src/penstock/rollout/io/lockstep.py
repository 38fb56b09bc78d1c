"""Loop of one rank of a worker of several ranks: executes its cadence's effects on threads, and runs the fetch.

One collective (the fetch) carries rank 0's orders to all ranks *and* each rank's outcomes to rank 0. There is no other
collective in the loop. Ranks cannot deadlock each other:

- a rank whose hook fails permanently writes its error to the group's store, leaves the group, and only then raises: the
  others' collectives fail at once, and they read that error and fail with it;
- a rank that dies also breaks the others' collectives; their error names the lost rank;
- with tensor parallelism a prompt that one rank cannot prepare or generate fails the group, since the others would wait
  for that rank inside the engine; with data parallelism only that prompt fails.

With tensor-parallel engines every rank generates every lease and rank 0 reports; with data-parallel ones (`share=True`)
each lease belongs to one rank.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from penstock.errors import PeerLost, PenstockError, RunFailed
from penstock.records.ids import Version
from penstock.records.payload import PayloadRef
from penstock.records.weights import Manifest
from penstock.rollout import cadence, flow, trace
from penstock.rollout.cadence import Cadence
from penstock.rollout.hooks import Workload
from penstock.rollout.io.hook_calls import HookCalls, Store, Work, is_infrastructure_error
from penstock.rollout.io.rank_fetch import Fetch, Orders, RankReport
from penstock.rollout.io.tracing import Tracing, branch_counts, depth_gauges
from penstock.rollout.settings import RolloutSection
from penstock.runtime.offload import Offload

CLOSE_S = 1.0


class Leader(Protocol):
    """Rank 0's controller side: supplies orders and handles the reports of all ranks. Called on the loop's thread."""

    def orders(self, *, idle: bool) -> Orders:
        """Returns rank 0's orders for the next fetch; may wait briefly for leases when the ranks are `idle`."""
        ...

    def handle_reports(self, reports: Sequence[RankReport]) -> None:
        """Handles the reports of all ranks, in rank order."""
        ...

    def dropped(self, effect: cadence.Drop) -> None:
        """All ranks dropped these leases."""
        ...


class RankCallbacks(msgspec.Struct):
    """Callbacks of a rank's loop into its process. All are called on the loop's thread and may block."""

    wait_for_weights: Callable[[Version], bool] = lambda version: True
    """Waits until the engine serves at least this version, verified; False if interrupted, PeerLost on timeout."""
    announced: Callable[[Manifest], None] = lambda manifest: None
    """Rank 0 received the manifest of newer weights."""
    discard: Callable[[Sequence[PayloadRef]], Any] = lambda refs: None
    rest: Callable[[], None] = lambda: None
    wake: Callable[[tuple[int, ...]], None] = lambda devices: None
    """Wakes the engine on these devices of the pool, one for each rank."""
    progressed: Callable[[str], None] = lambda doing: None
    traced: Callable[[trace.Trace], None] = lambda event: None


class Lockstep:
    """The loop. All ranks run it with the same settings; only rank 0 has a leader."""

    def __init__(
        self,
        workload: Workload[Any, Any, Any],
        store: Store,
        fetch: Fetch,
        *,
        leader: Leader | None = None,
        share: bool = False,
        preparations: int = RolloutSection().preparations,
        surroundings: RankCallbacks = RankCallbacks(),
    ) -> None:
        self.workload = workload
        self.fetch = fetch
        self.cadence = Cadence(rank=fetch.rank, ranks=fetch.ranks, share=share)
        self.tracing = Tracing(surroundings.traced)
        self._surroundings = surroundings
        self._leader = leader
        self._preparations = preparations
        self._counts_due = False
        self._devices: tuple[int, ...] = ()
        self._loop = asyncio.Runner()
        """For `async def generate`: one batch at a time, on this thread."""
        self._works: dict[flow.Ticket, Work] = {}
        self._inbox: queue.SimpleQueue[flow.Event | BaseException] = queue.SimpleQueue()
        self._hooks = HookCalls(
            workload,
            store,
            works=self._works,
            post=self._post,
            count=self.tracing.count,
            record=self.tracing.record,
            progressed=surroundings.progressed,
            # In a tensor-parallel group a rank that skips a prompt leaves the others waiting inside the engine.
            ends_the_run=is_infrastructure_error if share or fetch.ranks == 1 else lambda error: True,
        )

    def run(self) -> None:
        """Blocks until rank 0 ends the group. If any rank fails, every rank raises the same cause.

        Consumes rank 0's orders; produces outcomes; waits for the slowest rank, unblocked by its fetch or its death.
        """
        preparation = Offload(self._preparations, f"prepare-rank-{self.fetch.rank}")
        postprocessing = Offload(1, f"postprocess-rank-{self.fetch.rank}")
        try:
            self._preflight()
            while not self.cadence.left:
                self._step(preparation, postprocessing)
            self.fetch.leave()
        except BaseException as error:
            cause = self._cause(error)
            self.fetch.fail(cause)
            raise cause from error
        finally:
            self._loop.close()
            preparation.close(CLOSE_S)
            postprocessing.close(CLOSE_S)

    def statistics(self) -> dict[str, float]:
        """Counters since the start and current queue depths, by the same names as `Runner.statistics`."""
        depths = depth_gauges(self.cadence.held, self.cadence.generating)
        return {**self.tracing.counts(), **depths, **branch_counts(self.cadence.branches)}

    def _preflight(self) -> None:
        self._surroundings.progressed("preflight")
        self.workload.preflight()

    def _cause(self, error: BaseException) -> PenstockError:
        if isinstance(error, PenstockError):
            return error
        # The engine's collectives raise RuntimeError when another rank is lost: report that rank's error.
        blamed = self.fetch.find_cause() if isinstance(error, RuntimeError) else None
        if blamed is not None:
            return blamed
        return RunFailed(f"rank {self.fetch.rank}: {''.join(traceback.format_exception_only(error)).strip()}")

    def _step(self, preparation: Offload, postprocessing: Offload) -> None:
        """One fetch and the effects of its command. Every rank runs the same number of steps, in the same order."""
        reports = self.fetch.gather_reports(self._report())
        self._surroundings.progressed("fetch")
        if self._leader is not None:
            self._leader.handle_reports(reports)
        orders = reports[0].orders
        assert orders is not None
        if orders.manifest is not None:
            self._surroundings.announced(orders.manifest)
        if orders.discard:
            self._surroundings.discard(orders.discard)
        self._devices = orders.devices
        first_ticket = self.cadence.held.next_ticket
        effects = deque(self._decide(cadence.CommandReceived(orders.order, orders.leases, orders.prefetch)))
        for ticket in range(first_ticket, self.cadence.held.next_ticket):
            self._works[ticket] = Work(self.cadence.held[ticket].lease, time.monotonic())
        while effects:
            effects.extendleft(reversed(self._act(effects.popleft(), preparation, postprocessing)))
        for ticket in [ticket for ticket in self._works if ticket not in self.cadence.held]:
            del self._works[ticket]
        self._counts_due = self.tracing.sample(self.cadence.branches, self._queue)

    def _report(self) -> RankReport:
        """The finished outcomes, and rank 0's orders."""
        idle = self.cadence.idle
        orders = self._leader.orders(idle=idle) if self._leader is not None else None
        self._read_inbox()
        finished = [self._works.pop(ticket) for ticket in self.cadence.held.at(flow.Stage.FINISHED)]
        self._decide(cadence.ResultsSent())
        return RankReport(
            orders=orders,
            rollouts=tuple(rollout for work in finished for rollout in work.rollouts),
            failures=tuple(failure for work in finished for failure in work.failures),
            paused=self.cadence.paused,
            counts=self.statistics() if self._counts_due else None,
        )

    def _act(self, effect: cadence.Effect, preparation: Offload, postprocessing: Offload) -> Sequence[cadence.Effect]:
        match effect:
            case flow.Prepare(tickets):
                for ticket in tickets:
                    preparation.submit(self._hooks.prepare, (ticket,))
            case cadence.AwaitPrepared(batch, tickets):
                self._wait_until(lambda: not self._any(flow.Stage.PREPARING, tickets), "preparation")
                return self._decide(cadence.BatchPrepared(batch))
            case flow.Generate(batch, tickets):
                floor = max(self._works[ticket].lease.min_version for ticket in tickets)
                if not self._surroundings.wait_for_weights(floor):  # interrupted: the leases were returned
                    return self._decide(flow.GenerateEnded(batch, failed=True))
                if inspect.iscoroutinefunction(self.workload.generate):
                    self._loop.run(self._hooks.generate_awaiting(batch, tickets))
                else:
                    self._hooks.generate(batch, tickets)
                return self._read_inbox()
            case flow.Postprocess(tickets):
                postprocessing.submit(self._hooks.postprocess, tickets)
            case cadence.AwaitPostprocessed(tickets):
                awaited = tuple(self.cadence.held.at(flow.Stage.POSTPROCESSING)) if tickets is None else tickets
                self._wait_until(lambda: not self._any(flow.Stage.POSTPROCESSING, awaited), "post-processing")
            case cadence.Drop():
                if self._leader is not None:
                    self._leader.dropped(effect)
            case cadence.Sleep():
                self._surroundings.rest()
            case cadence.Wake():
                self._surroundings.wake(self._devices)
            case cadence.Leave():
                pass
        return ()

    def _any(self, stage: flow.Stage, tickets: Sequence[flow.Ticket]) -> bool:
        return any(ticket in self.cadence.held.at(stage) for ticket in tickets)

    def _wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Unblocked by the end of a hook; raises PeerLost after the timeout of the fetch."""
        deadline = time.monotonic() + self.fetch.timeout_s
        self._read_inbox()
        while not done():
            try:
                self._handle(self._inbox.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                raise PeerLost(
                    f"rank {self.fetch.rank}: {what} did not end within {self.fetch.timeout_s:.0f} s; {self.cadence!r}"
                ) from None

    def _read_inbox(self) -> list[cadence.Effect]:
        effects: list[cadence.Effect] = []
        while not self._inbox.empty():
            effects += self._handle(self._inbox.get())
        return effects

    def _handle(self, event: flow.Event | BaseException) -> list[cadence.Effect]:
        if isinstance(event, BaseException):
            raise event
        assert isinstance(event, flow.PrepareEnded | flow.GenerateEnded | flow.PostprocessEnded)
        return self._decide(event)

    def _decide(self, event: cadence.Event) -> list[cadence.Effect]:
        return self.cadence.handle(event, time.monotonic())

    def _post(self, *events: flow.Event | BaseException) -> None:
        for event in events:
            self._inbox.put(event)

    def _queue(self, now: float) -> trace.QueueSampled:
        held = self.cadence.held
        return trace.QueueSampled(now, held.depths(), held.size_bytes, self.cadence.generating, self.cadence.prefetch)

    def __repr__(self) -> str:
        return f"Lockstep({type(self.workload).__name__}, {self.cadence!r})"
