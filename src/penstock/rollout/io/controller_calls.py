"""A generation loop's calls to the controller: leases asked for, outcomes delivered, leases given back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.records.ids import SampleId
from penstock.records.rollout import FailedRollout, Rollout, Score
from penstock.rollout import flow, trace
from penstock.rollout.io.hook_calls import Post
from penstock.rollout.io.tracing import Tracing
from penstock.runtime.clock import monotonic
from penstock.wire.messages import Delivered, Leased

logger = logging.getLogger(__name__)


class ControllerApi(Protocol):
    """The control plane, as a worker sees it. Retries and reconnects are its own affair."""

    async def lease(self, samples: int, wait_s: float) -> Leased: ...

    async def deliver(
        self,
        rollouts: Sequence[Rollout],
        failures: Sequence[FailedRollout],
        returned: Sequence[SampleId],
        scores: Sequence[Score] = (),
    ) -> Delivered: ...


class ControllerCalls:
    """Each call ends with what follows from it being posted: an answer's events, or the error that ends the run."""

    def __init__(
        self,
        controller: ControllerApi,
        tracing: Tracing,
        post: Post,
        *,
        lease_wait_s: float,
        prefetch: bool,
        progressed: Callable[[str], None] = lambda doing: None,
    ) -> None:
        self.prefetch = prefetch
        """The setting of this worker: holds unless a lease brings another."""
        self.deliver_s = 0.0
        """What the last delivery took."""
        self._controller = controller
        self._tracing = tracing
        self._post = post
        self._lease_wait_s = lease_wait_s
        self._progressed = progressed

    async def ask(self, samples: int, after_s: float, held_samples: int) -> Leased | None:
        """Consumes one answer of the controller. Waits at most `after_s + lease_wait_s` and its retries."""
        try:
            if after_s:
                await asyncio.sleep(after_s)
            asked = monotonic()
            answer = await self._controller.lease(samples, self._lease_wait_s)
        except Exception as error:  # noqa: BLE001 - raised by the loop, once the leases in hand are given back
            self._post(error)
            return None
        now = monotonic()
        granted = sum(len(lease.samples) for lease in answer.leases)
        self._tracing.tell(
            trace.LeaseAnswered(now, samples, granted, answer.verdict, now - asked, held_samples, answer.phase)
        )
        self._tracing.count(f"asks_{answer.verdict}", 1)
        self._tracing.count("lease_s", now - asked)
        if granted or not held_samples:  # asking in vain while a hook hangs is no progress
            self._progressed(f"lease {answer.verdict}")
        self._post(
            flow.PrefetchSet(self.prefetch if answer.prefetch is None else answer.prefetch),
            flow.LeaseAnswered(answer.leases, answer.verdict, now - asked),
        )
        if answer.phase in ("complete", "stopped"):
            self._post(flow.Abandoned(f"the run is {answer.phase}"))
        return answer

    def ask_ended(self, asking: asyncio.Task[Leased | None]) -> None:
        """A cancelled ask is an answer too, even if cancelled before it began. What was granted is given back."""
        if asking.cancelled():
            self._post(flow.LeaseAnswered((), "throttled"))

    async def deliver(
        self, rollouts: Sequence[Rollout], failures: Sequence[FailedRollout], scores: Sequence[Score] = ()
    ) -> Delivered | None:
        """The answer of the controller; None when it could not be reached, which ends the run."""
        began = monotonic()
        try:
            answer = await self._controller.deliver(rollouts, failures, (), scores)
        except Exception as error:  # noqa: BLE001 - raised by the loop
            self._post(error)
            return None
        self.deliver_s = monotonic() - began
        self._tracing.count("deliver_s", self.deliver_s)
        self._tracing.count("delivered_samples", len(rollouts))
        self._tracing.count("failed_samples", len(failures))
        self._tracing.count("refused_samples", len(answer.refused))
        self._tracing.count("deliveries", 1)
        return answer

    async def give_back(self, samples: Sequence[SampleId]) -> None:
        try:
            await self._controller.deliver((), (), samples)
        except Exception as error:  # noqa: BLE001 - they expire with this worker anyway
            logger.warning("%d leases could not be given back: %s", len(samples), error)
        self._tracing.count("returned_samples", len(samples))
