"""Adapters of a worker's generation loop to the controller's client and to the worker's ring."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.batch.codec import encode
from penstock.control.io.client import ControlClient
from penstock.errors import PeerLost, PenstockError, RemoteProtocolError, Transient
from penstock.payload.io.shm import Ring
from penstock.payload.unread import Unread
from penstock.records.ids import SampleId, Version
from penstock.records.payload import PayloadRef
from penstock.records.rollout import FailedRollout, Rollout, Score
from penstock.records.weights import Held, Manifest
from penstock.rollout.io.hook_calls import Versioned
from penstock.runtime.clock import monotonic
from penstock.runtime.member import RunMember
from penstock.runtime.tasks import Tasks
from penstock.weights.io.updater import ReplicaReport
from penstock.wire.messages import (
    AskLease,
    AskWeights,
    Deliver,
    Delivered,
    Leased,
    NotYet,
    ReportReplica,
    Weights,
)

WRITE_S = 120.0
"""How long a full ring may block post-processing before it is an error that names the slow consumer."""


REPORT_EVERY_S = 2.0
CHECK_RING_EVERY_S = 2.0


class WorkerClient:
    """Calls to the controller for leases, deliveries and weights."""

    def __init__(
        self, process: RunMember, client: ControlClient, tasks: Tasks, serving: Versioned, ring: Ring, *, call: int = 0
    ) -> None:
        """`call`: samples of one generate call."""
        self._call = call
        self._process = process
        self._tasks = tasks
        self._client = client
        self._serving = serving
        self._ring = ring
        self._request = 0
        """Incremented with every grant that arrived. If the answer was lost, or a repeated call was answered twice, the
        controller returns the same grant again for the same number."""
        self._unread = Unread()
        self.discard_elsewhere: Callable[[Sequence[PayloadRef]], object] = lambda payloads: None
        """Receives every payload to discard: it may be in the ring of another rank of this worker."""
        self._returning: asyncio.Task[None] | None = None

    async def lease(self, samples: int, wait_s: float) -> Leased:
        # One request at a time: the grant of a cancelled request is returned first.
        if self._returning is not None and not self._returning.done():
            await asyncio.wait([self._returning], timeout=wait_s)
            if not self._returning.done():
                return Leased((), "throttled", "running")
        ask = AskLease(
            pipeline=self._client.pipeline,
            member=self._client.member,
            request=self._request,
            samples=samples,
            version=Version(self._serving.version),
            wait_s=wait_s,
            call=self._call,
        )
        asking = self._tasks.spawn("ask for a lease", self._ask(ask))
        try:
            answer = await asyncio.shield(asking)
        except asyncio.CancelledError:
            # The controller may still grant it: those leases would be lost.
            self._returning = self._tasks.spawn("return a lease", self._return_granted(asking))
            raise
        if isinstance(answer, PenstockError):
            raise answer
        return answer

    async def _ask(self, ask: AskLease) -> Leased | PenstockError:
        """Returns the answer, or the error to raise to a caller that still waits."""
        try:
            reply = await self._client.call(ask)
        except PenstockError as error:
            if isinstance(error, PeerLost) and self._process.stop.requested:  # cut short by the shutdown
                return Leased((), "throttled", "stopped")
            return error
        if not isinstance(reply, Leased):
            return RemoteProtocolError(f"the controller answered a request for a lease with {reply!r}")
        if reply.leases:
            self._request = ask.request + 1
        expired = self._unread.expire(reply.oldest, monotonic()) if reply.oldest is not None else []
        if reply.discard or expired:
            self._discard((*reply.discard, *expired))
        return reply

    def _discard(self, payloads: Sequence[PayloadRef]) -> None:
        self._ring.discard(payloads)
        self.discard_elsewhere(payloads)

    async def _return_granted(self, asking: asyncio.Task[Leased | PenstockError]) -> None:
        answer = await asking
        if isinstance(answer, Leased) and answer.leases:
            await self.deliver((), (), [sample for lease in answer.leases for sample in lease.samples])

    async def deliver(
        self,
        rollouts: Sequence[Rollout],
        failures: Sequence[FailedRollout],
        returned: Sequence[SampleId],
        scores: Sequence[Score] = (),
    ) -> Delivered:
        message = Deliver(
            pipeline=self._client.pipeline,
            member=self._client.member,
            rollouts=tuple(rollouts),
            failures=tuple(failures),
            returned=tuple(returned),
            scores=tuple(scores),
        )
        try:
            reply = await self._client.call(message)
        except asyncio.CancelledError:
            # The loop ended before the answer, for example because a drain took too long. This worker continues:
            # without a second delivery it would hold those leases indefinitely.
            if not self._process.stop.requested:
                self._tasks.spawn("deliver again", self._deliver_again(message))
            raise
        return self._delivered(message, reply)

    async def _deliver_again(self, message: Deliver) -> None:
        self._delivered(message, await self._client.call(message))

    def _delivered(self, message: Deliver, reply: Any) -> Delivered:
        if not isinstance(reply, Delivered):
            raise RemoteProtocolError(f"the controller answered a delivery with {reply!r}")
        refused = set(reply.refused)
        for rollout in message.rollouts:
            if rollout.sample not in refused:
                self._unread.delivered(rollout.version, rollout.payload)
        if reply.refused:
            self._discard([rollout.payload for rollout in message.rollouts if rollout.sample in refused])
        return reply

    async def next_manifest(self, held: Held, wait_s: float) -> Manifest | None:
        reply = await self._client.call(
            AskWeights(pipeline=self._client.pipeline, member=self._client.member, held=held, wait_s=wait_s)
        )
        match reply:
            case Weights(manifest=manifest):
                return manifest
            case NotYet():
                return None
            case _:
                raise RemoteProtocolError(f"the controller answered a request for weights with {reply!r}")

    async def report(self, report: ReplicaReport) -> None:
        await self._client.call(
            ReportReplica(
                pipeline=self._client.pipeline,
                member=self._client.member,
                state=report.state.value,  # type: ignore[arg-type]
                version=report.version,
                digest=report.digest,
                pause_s=report.pause_s,
                skipped_versions=report.skipped_versions,
                error=report.error,
                damaged=report.damaged,
            )
        )


async def watch_ring(ring: Ring) -> None:
    """Raises `PeerLost` once the ring's file is deleted: a trainer that starts later could read no payload.

    Waits for: nothing. Unblocked by: cancellation.
    """
    while True:
        await asyncio.sleep(CHECK_RING_EVERY_S)
        if not ring.in_place():
            break
    raise PeerLost(f"the file of payload ring {ring.name} was deleted or moved; this worker must be replaced")


class RingStore:
    """Writes a sample's arrays into the ring. The wait for room is the backpressure on generation."""

    def __init__(self, ring: Ring, progressed: Callable[[str], None] = lambda doing: None) -> None:
        self._ring = ring
        self._progressed = progressed

    def write(self, arrays: Mapping[str, np.ndarray | Sequence[np.ndarray]]) -> PayloadRef:
        """Reports the wait as the worker's activity, so that a stall is not attributed to generation."""
        body, deadline = encode(arrays), monotonic() + WRITE_S
        while True:
            left_s = deadline - monotonic()
            try:
                return self._ring.fill(body, timeout_s=max(0.0, min(left_s, REPORT_EVERY_S)))
            except Transient as error:
                if left_s <= REPORT_EVERY_S:
                    raise
                self._progressed(f"ring full: {error}")

    def discard(self, payloads: Sequence[PayloadRef]) -> object:
        return self._ring.discard(payloads)
