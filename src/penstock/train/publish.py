"""Publishing weights in the background: the newest version wins, so a fast trainer builds no backlog."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from penstock.control.io.client import ControlClient
from penstock.errors import Stale
from penstock.records.ids import Version
from penstock.records.weights import Manifest
from penstock.runtime.clock import monotonic
from penstock.runtime.member import RunMember
from penstock.runtime.offload import Offload
from penstock.train.ranks import TrainerRanks
from penstock.train.weight_publisher import WeightPublisher
from penstock.wire.messages import PublishWeights

log = logging.getLogger(__name__)


class Publishing:
    """Holds at most one version that waits to be written.

    Consumes: snapshots of the weights after each step. Produces: published manifests. Waits for: a snapshot.
    Unblocked by: `offer`.
    """

    def __init__(
        self,
        process: RunMember,
        client: ControlClient,
        publisher: WeightPublisher,
        offload: Offload,
        ranks: TrainerRanks,
    ) -> None:
        self._ranks = ranks
        self._writing: Version | None = None
        self._process = process
        self._client = client
        self._publisher = publisher
        self._offload = offload
        self._waiting: tuple[Version, Mapping[str, Tensor]] | None = None
        self._offered = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.last_s = 0.0
        """Seconds that writing the last version took."""
        self.skipped = 0
        """Versions that were replaced by a newer one before they could be written."""

    def offer(self, version: Version, tensors: Mapping[str, Tensor]) -> None:
        """Queues a snapshot; replaces one that is still waiting."""
        if self._waiting is not None:
            self.skipped += 1
        self._ranks.snapshot(version, self._writing)
        self._waiting = (version, tensors)
        self._idle.clear()
        self._offered.set()

    async def run(self) -> None:
        while True:
            await self._offered.wait()
            self._offered.clear()
            waiting, self._waiting = self._waiting, None
            if waiting is not None:
                await self._publish(*waiting)
            if self._waiting is None:
                self._idle.set()

    async def publish(self, version: Version, tensors: Mapping[str, Tensor], *, durable: bool = False) -> Manifest:
        """Publishing a version again rewrites its files, which repairs damaged ones."""
        self._ranks.snapshot(version, self._writing)
        return await self._publish(version, tensors, durable=durable)

    async def _publish(self, version: Version, tensors: Mapping[str, Tensor], *, durable: bool = False) -> Manifest:
        """With sharded weights, the other ranks write their parts from their own snapshots."""
        self._writing = version
        write = partial(self._publisher.publish, durable=durable, others=partial(self._ranks.write_parts, version))
        began = monotonic()
        manifest = await self._offload.run(write, version, tensors)
        self._writing = None
        self.last_s = monotonic() - began
        await self._client.call(
            PublishWeights(
                pipeline=self._client.pipeline, member=self._process.member, manifest=manifest, durable=durable
            )
        )
        return manifest

    async def make_durable(self, version: Version) -> None:
        """Keeps the weights of a checkpoint on disk, so that engines can be restarted from them."""
        await self.flush()
        try:
            await self._offload.run(self._publisher.make_durable, version)
        except Stale as error:  # it was replaced by a newer one before it was written
            log.info("%s", error)

    async def flush(self) -> None:
        """Waits until all queued versions are published."""
        await self._idle.wait()
