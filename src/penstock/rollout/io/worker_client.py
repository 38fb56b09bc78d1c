"""The neighbours of a worker's generation loop, made from the controller's client and the worker's ring."""

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
"""How long a full ring may hold up post-processing before it is an error that names the slow consumer."""


TELL_EVERY_S = 2.0
LOOK_AT_RING_S = 2.0


class WorkerClient:
    """Leases, deliveries and weights, as the runner and the updater ask for them."""

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
        """Goes up with every grant that arrived. Whatever was granted unseen, because an answer was lost or a repeated
        call was answered twice, is answered again to the same number."""
        self._unread = Unread()
        self._giving_back: asyncio.Task[None] | None = None

    async def lease(self, samples: int, wait_s: float) -> Leased:
        # One request at a time: what this one is granted is given back first.
        if self._giving_back is not None and not self._giving_back.done():
            await asyncio.wait([self._giving_back], timeout=wait_s)
            if not self._giving_back.done():
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
            # The controller may grant it all the same: those leases would be lost.
            self._giving_back = self._tasks.spawn("give back a lease", self._give_back(asking))
            raise
        if isinstance(answer, PenstockError):
            raise answer
        return answer

    async def _ask(self, ask: AskLease) -> Leased | PenstockError:
        """The answer, or the error to be raised to a caller that still waits."""
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
            self._ring.discard((*reply.discard, *expired))
        return reply

    async def _give_back(self, asking: asyncio.Task[Leased | PenstockError]) -> None:
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
            # The loop ended before the answer, as in a drain that took too long. This worker goes on: without a second
            # delivery it would hold those leases for ever.
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
            self._ring.discard(rollout.payload for rollout in message.rollouts if rollout.sample in refused)
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
    """Raises `PeerLost` once the ring's file is gone: a trainer that starts could read nothing that is delivered.

    Waits for: nothing. Unblocked by: cancellation.
    """
    while True:
        await asyncio.sleep(LOOK_AT_RING_S)
        if not ring.in_place():
            break
    raise PeerLost(f"the file of payload ring {ring.name} was deleted or moved; this worker must be replaced")


class RingStore:
    """Writes a sample's arrays into the ring. Waiting for room is the backpressure on generation."""

    def __init__(self, ring: Ring, progressed: Callable[[str], None] = lambda doing: None) -> None:
        self._ring = ring
        self._progressed = progressed

    def write(self, arrays: Mapping[str, np.ndarray | Sequence[np.ndarray]]) -> PayloadRef:
        """While it waits, that is what the worker is doing: a stall is then not blamed on generation."""
        body, deadline = encode(arrays), monotonic() + WRITE_S
        while True:
            left_s = deadline - monotonic()
            try:
                return self._ring.fill(body, timeout_s=max(0.0, min(left_s, TELL_EVERY_S)))
            except Transient as error:
                if left_s <= TELL_EVERY_S:
                    raise
                self._progressed(f"ring full: {error}")

    def discard(self, payloads: Sequence[PayloadRef]) -> object:
        return self._ring.discard(payloads)
