"""A generation loop's calls to the controller: request leases, deliver outcomes, return leases."""

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
    """The controller's API for a worker. The implementation retries and reconnects."""

    async def lease(self, samples: int, wait_s: float) -> Leased: ...

    async def deliver(
        self,
        rollouts: Sequence[Rollout],
        failures: Sequence[FailedRollout],
        returned: Sequence[SampleId],
        scores: Sequence[Score] = (),
    ) -> Delivered: ...


class ControllerCalls:
    """Each call posts its result: the events of the answer, or the error that ends the run."""

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
        """The setting of this worker; a setting sent with a lease overrides it."""
        self.deliver_s = 0.0
        """Duration of the last delivery."""
        self._controller = controller
        self._tracing = tracing
        self._post = post
        self._lease_wait_s = lease_wait_s
        self._progressed = progressed

    async def ask(self, samples: int, after_s: float, held_samples: int) -> Leased | None:
        """Requests leases and posts the answer. Waits at most `after_s + lease_wait_s`, plus retries."""
        try:
            if after_s:
                await asyncio.sleep(after_s)
            asked_at = monotonic()
            answer = await self._controller.lease(samples, self._lease_wait_s)
        except Exception as error:  # noqa: BLE001 - raised by the loop, once the held leases are returned
            self._post(error)
            return None
        now = monotonic()
        granted = sum(len(lease.samples) for lease in answer.leases)
        self._tracing.record(
            trace.LeaseAnswered(now, samples, granted, answer.verdict, now - asked_at, held_samples, answer.phase)
        )
        self._tracing.count(f"asks_{answer.verdict}", 1)
        self._tracing.count("lease_s", now - asked_at)
        if granted or not held_samples:  # a refused request while a hook hangs is no progress
            self._progressed(f"lease {answer.verdict}")
        self._post(
            flow.PrefetchSet(self.prefetch if answer.prefetch is None else answer.prefetch),
            flow.LeaseAnswered(answer.leases, answer.verdict, now - asked_at),
        )
        if answer.phase in ("complete", "stopped"):
            self._post(flow.Abandoned(f"the run is {answer.phase}"))
        return answer

    def ask_ended(self, asking: asyncio.Task[Leased | None]) -> None:
        """Posts an answer for a cancelled request too, even one that had not begun. Its grant is returned."""
        if asking.cancelled():
            self._post(flow.LeaseAnswered((), "throttled"))

    async def deliver(
        self, rollouts: Sequence[Rollout], failures: Sequence[FailedRollout], scores: Sequence[Score] = ()
    ) -> Delivered | None:
        """Returns the controller's answer; None if the call failed, which ends the run."""
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

    async def return_samples(self, samples: Sequence[SampleId]) -> None:
        try:
            await self._controller.deliver((), (), samples)
        except Exception as error:  # noqa: BLE001 - they expire with this worker in any case
            logger.warning("%d samples could not be returned: %s", len(samples), error)
        self._tracing.count("returned_samples", len(samples))
