"""The neighbours of a worker's generation loop, made from the controller's client and the worker's ring."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from penstock.batch.codec import encode
from penstock.control.io.client import ControlClient
from penstock.errors import PeerLost, RemoteProtocolError
from penstock.payload.io.shm import Ring
from penstock.records.ids import SampleId, Version
from penstock.records.payload import PayloadRef
from penstock.records.rollout import FailedRollout, Rollout
from penstock.records.weights import Manifest
from penstock.roles.process import RoleProcess
from penstock.rollout.io.serving import Serving
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


class WorkerDesk:
    """Leases, deliveries and weights, as the runner and the updater ask for them."""

    def __init__(self, process: RoleProcess, client: ControlClient, serving: Serving, ring: Ring) -> None:
        self._process = process
        self._client = client
        self._serving = serving
        self._ring = ring
        self._requests = itertools.count()

    async def lease(self, samples: int, wait_s: float) -> Leased:
        ask = AskLease(
            pipeline=self._client.pipeline,
            member=self._client.member,
            request=next(self._requests),
            samples=samples,
            version=Version(self._serving.version),
            wait_s=wait_s,
        )
        try:
            reply = await self._client.call(ask)
        except PeerLost:
            if self._process.stop.requested:  # the call was cut short by the shutdown
                return Leased((), "throttled", "stopped")
            raise
        if not isinstance(reply, Leased):
            raise RemoteProtocolError(f"the controller answered a request for a lease with {reply!r}")
        if reply.discard:
            self._ring.discard(reply.discard)
        return reply

    async def deliver(
        self, rollouts: Sequence[Rollout], failures: Sequence[FailedRollout], returned: Sequence[SampleId]
    ) -> Delivered:
        reply = await self._client.call(
            Deliver(
                pipeline=self._client.pipeline,
                member=self._client.member,
                rollouts=tuple(rollouts),
                failures=tuple(failures),
                returned=tuple(returned),
            )
        )
        if not isinstance(reply, Delivered):
            raise RemoteProtocolError(f"the controller answered a delivery with {reply!r}")
        if reply.refused:
            refused = set(reply.refused)
            self._ring.discard(rollout.payload for rollout in rollouts if rollout.sample in refused)
        return reply

    async def next_manifest(self, held_digest: str, wait_s: float) -> Manifest | None:
        reply = await self._client.call(
            AskWeights(
                pipeline=self._client.pipeline, member=self._client.member, held_digest=held_digest, wait_s=wait_s
            )
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
            )
        )


class RingStore:
    """Writes a sample's arrays into the ring. Waiting for room is the backpressure on generation."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def write(self, arrays: Mapping[str, np.ndarray]) -> PayloadRef:
        return self._ring.write(encode(arrays), timeout_s=WRITE_S)
