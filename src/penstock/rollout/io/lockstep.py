"""Several ranks, one worker: one rank's loop. Does what its cadence decides, on threads, and meets the others.

One collective (the fetch) carries rank 0's orders to all ranks *and* each rank's outcomes to rank 0. There is no other
collective in the loop. What keeps ranks from deadlocking each other:

- a rank whose hook fails for good writes its error to the group's store, leaves the group, and only then raises: the
  others' collectives break at once, they read whose error it was, and fail with it;
- a rank that dies without a word breaks the others' collectives too; they say which rank is gone;
- with tensor parallelism a prompt that one rank cannot prepare or generate fails the group, since the others would wait
  for that rank inside the engine; with data parallelism it costs the prompt.

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
from penstock.rollout.io.rank_fetch import Fetch, News, Orders
from penstock.rollout.io.tracing import Tracing, branch_counts, depth_gauges
from penstock.rollout.settings import RolloutSection
from penstock.runtime.offload import Offload

CLOSE_S = 1.0


class Leader(Protocol):
    """Rank 0's other half: what to order, and what becomes of what the ranks bring. Called on the loop's thread."""

    def orders(self, *, idle: bool) -> Orders:
        """Rank 0's word for the fetch that follows; may wait a little for leases when the ranks are `idle`."""
        ...

    def heard(self, all_news: Sequence[News]) -> None:
        """What all ranks brought."""
        ...

    def dropped(self, effect: cadence.Drop) -> None:
        """These leases were dropped by all ranks."""
        ...


class Surroundings(msgspec.Struct):
    """What a rank's loop asks of the process around it. All calls come from the loop's thread and may block."""

    wait_for_weights: Callable[[Version], bool] = lambda version: True
    """Returns once the engine serves at least this version, proven; False when interrupted, PeerLost when too late."""
    announced: Callable[[Manifest], None] = lambda manifest: None
    """Rank 0 heard of newer weights."""
    discard: Callable[[Sequence[PayloadRef]], Any] = lambda refs: None
    rest: Callable[[], None] = lambda: None
    wake: Callable[[tuple[int, ...]], None] = lambda devices: None
    """On these devices of the pool, one for each rank."""
    progressed: Callable[[str], None] = lambda doing: None
    traced: Callable[[trace.Trace], None] = lambda told: None


class Lockstep:
    """All ranks run it with the same settings; rank 0 also has the leader."""

    def __init__(
        self,
        workload: Workload[Any, Any, Any],
        store: Store,
        fetch: Fetch,
        *,
        leader: Leader | None = None,
        share: bool = False,
        preparations: int = RolloutSection().preparations,
        surroundings: Surroundings = Surroundings(),
    ) -> None:
        self.workload = workload
        self.fetch = fetch
        self.cadence = Cadence(rank=fetch.rank, ranks=fetch.ranks, share=share)
        self.tracing = Tracing(surroundings.traced)
        self._around = surroundings
        self._leader = leader
        self._preparations = preparations
        self._counts_due = False
        self._devices: tuple[int, ...] = ()
        self._loop = asyncio.Runner()
        """For a workload that awaits: batch by batch, on this thread."""
        self._works: dict[flow.Ticket, Work] = {}
        self._inbox: queue.SimpleQueue[flow.Event | BaseException] = queue.SimpleQueue()
        self._hooks = HookCalls(
            workload,
            store,
            works=self._works,
            post=self._post,
            count=self.tracing.count,
            tell=self.tracing.tell,
            progressed=surroundings.progressed,
            # In a tensor-parallel group a rank that skips a prompt leaves the others waiting inside the engine.
            ends_the_run=is_infrastructure_error if share or fetch.ranks == 1 else lambda error: True,
        )

    def run(self) -> None:
        """Blocks until rank 0 ends the group. If any rank cannot go on, every rank raises with the same cause.

        Consumes rank 0's orders; produces outcomes; waits for the slowest rank, unblocked by its arrival or its death.
        """
        preparation = Offload(self._preparations, f"prepare-rank-{self.fetch.rank}")
        postprocessing = Offload(1, f"postprocess-rank-{self.fetch.rank}")
        try:
            self._preflight()
            while not self.cadence.left:
                self._meet(preparation, postprocessing)
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
        """Counters since the start and depths now, by the names that a single runner has for them."""
        depths = depth_gauges(self.cadence.held, self.cadence.generating)
        return {**self.tracing.counts(), **depths, **branch_counts(self.cadence.branches)}

    def _preflight(self) -> None:
        self._around.progressed("preflight")
        self.workload.preflight()

    def _cause(self, error: BaseException) -> PenstockError:
        if isinstance(error, PenstockError):
            return error
        # The engine's own collectives break with a RuntimeError when another rank is gone: that rank is to blame.
        blamed = self.fetch.blame() if isinstance(error, RuntimeError) else None
        if blamed is not None:
            return blamed
        return RunFailed(f"rank {self.fetch.rank}: {''.join(traceback.format_exception_only(error)).strip()}")

    def _meet(self, preparation: Offload, postprocessing: Offload) -> None:
        """One fetch and what follows from it. Every rank comes here equally often, in the same order."""
        all_news = self.fetch.all_news(self._news())
        self._around.progressed("fetch")
        if self._leader is not None:
            self._leader.heard(all_news)
        orders = all_news[0].orders
        assert orders is not None
        if orders.manifest is not None:
            self._around.announced(orders.manifest)
        if orders.discard:
            self._around.discard(orders.discard)
        self._devices = orders.devices
        first_ticket = self.cadence.held.next_ticket
        effects = deque(self._decide(cadence.Heard(orders.order, orders.leases, orders.prefetch)))
        for ticket in range(first_ticket, self.cadence.held.next_ticket):
            self._works[ticket] = Work(self.cadence.held[ticket].lease, time.monotonic())
        while effects:
            effects.extendleft(reversed(self._act(effects.popleft(), preparation, postprocessing)))
        for ticket in [ticket for ticket in self._works if ticket not in self.cadence.held]:
            del self._works[ticket]
        self._counts_due = self.tracing.sample(self.cadence.branches, self._queue)

    def _news(self) -> News:
        """What is finished by now, and whatever rank 0 has to say."""
        idle = self.cadence.idle
        orders = self._leader.orders(idle=idle) if self._leader is not None else None
        self._read_inbox()
        told = [self._works.pop(ticket) for ticket in self.cadence.held.at(flow.Stage.FINISHED)]
        self._decide(cadence.Told())
        return News(
            orders=orders,
            rollouts=tuple(rollout for work in told for rollout in work.rollouts),
            failures=tuple(failure for work in told for failure in work.failures),
            resting=self.cadence.resting,
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
                if not self._around.wait_for_weights(floor):  # then the leases were given back
                    return self._decide(flow.GenerateEnded(batch, failed=True))
                if inspect.iscoroutinefunction(self.workload.generate):
                    self._loop.run(self._hooks.generate_awaiting(batch, tickets))
                else:
                    self._hooks.generate(batch, tickets)
                return self._read_inbox()
            case flow.Postprocess(tickets):
                postprocessing.submit(self._hooks.postprocess, tickets)
            case cadence.Settle(tickets):
                settling = tuple(self.cadence.held.at(flow.Stage.POSTPROCESSING)) if tickets is None else tickets
                self._wait_until(lambda: not self._any(flow.Stage.POSTPROCESSING, settling), "post-processing")
            case cadence.Drop():
                if self._leader is not None:
                    self._leader.dropped(effect)
            case cadence.Rest():
                self._around.rest()
            case cadence.Wake():
                self._around.wake(self._devices)
            case cadence.Leave():
                pass
        return ()

    def _any(self, stage: flow.Stage, tickets: Sequence[flow.Ticket]) -> bool:
        return any(ticket in self.cadence.held.at(stage) for ticket in tickets)

    def _wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Unblocked by the ends of hooks; a hook that does not end is a rank that is lost."""
        deadline = time.monotonic() + self.fetch.timeout_s
        self._read_inbox()
        while not done():
            try:
                self._take(self._inbox.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                raise PeerLost(
                    f"rank {self.fetch.rank}: {what} did not end within {self.fetch.timeout_s:.0f} s; {self.cadence!r}"
                ) from None

    def _read_inbox(self) -> list[cadence.Effect]:
        effects: list[cadence.Effect] = []
        while not self._inbox.empty():
            effects += self._take(self._inbox.get())
        return effects

    def _take(self, event: flow.Event | BaseException) -> list[cadence.Effect]:
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
