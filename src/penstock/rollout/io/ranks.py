"""The ranks of a worker, on rank 0, which is the worker process itself. See `runtime.ranks`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from penstock.engines.protocol import Engine
from penstock.errors import PenstockError
from penstock.payload.io.shm import Ring
from penstock.records.payload import RingAddress
from penstock.rollout.io.group import GroupRunner
from penstock.rollout.io.lockstep import Lockstep, RankCallbacks
from penstock.rollout.io.rank_fetch import Fetch, join
from penstock.rollout.io.rank_weights import Announcing
from penstock.rollout.io.runner import RunnerSettings
from penstock.rollout.io.worker_client import RingStore, WorkerClient
from penstock.runtime.member import RunMember
from penstock.runtime.offload import background
from penstock.runtime.ranks import RankChildren, file_store
from penstock.runtime.tasks import Tasks
from penstock.weights.io.updater import ManifestSource

log = logging.getLogger(__name__)

INTERRUPT = signal.SIGUSR2
"""Signal to a rank to end its generation early: its leases were returned."""
LEAVE_S = 3.0
FETCH_S = 1800.0
"""Longest wait for the slowest rank. A dead rank is noticed at once; the controller detects a wedged one."""


class RankAssignment(msgspec.Struct):
    """Settings that rank 0 sends to another rank, on standard input."""

    rank: int
    ranks: int
    store: str
    newest: str
    """File of the newest manifest that rank 0 has received."""
    timeout_s: float
    guardian_pid: int
    """The process that started the worker: the rank's ring is needed until it ends."""
    cell_fd: int


def ring_key(rank: int) -> str:
    """Key in the group's store of a rank's ring address."""
    return f"penstock/ring/{rank}"


class RankGroup:
    """The other ranks of this worker. Start it from the main thread: children die with the thread that started them."""

    def __init__(self, process: RunMember, ranks: int) -> None:
        self.ranks = ranks
        self.rings: tuple[RingAddress, ...] = ()
        self._process = process
        self._children = RankChildren(process, "rollout_rank", ranks)
        self._working = background(1, "ranks")
        self._fetch: Fetch | None = None
        self._runner: GroupRunner | None = None
        self._stepping: asyncio.Future[None] | None = None
        self._newest = process.run.root / f".ranks-{process.member}.newest"

    @property
    def others(self) -> bool:
        """Whether there are ranks besides this process."""
        return self.ranks > 1

    # -- start and end ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts the other ranks, if any; they build their models while this process builds its own."""
        if not self.others:
            return
        await self._children.start(self._seat)

    def _seat(self, rank: int, cell_fd: int) -> RankAssignment:
        store = str(self._children.store)
        return RankAssignment(rank, self.ranks, store, str(self._newest), FETCH_S, os.getppid(), cell_fd)

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[RankGroup]:
        """Waits until every rank has joined. On exit all ranks leave together; late ones are killed."""
        if not self.others:
            yield self
            return
        try:
            joining = asyncio.wrap_future(self._working.submit(self._join))
            await self._children.first_of(joining)
            self._fetch, self.rings = joining.result()
            log.info("all %d ranks joined the group", self.ranks)
            yield self
            await self._leave()
        finally:
            await self._children.close()
            self._newest.unlink(missing_ok=True)

    def _join(self) -> tuple[Fetch, tuple[RingAddress, ...]]:
        store = file_store(self._children.store, self.ranks)
        fetch = join(store, rank=0, ranks=self.ranks, timeout_s=FETCH_S)
        addresses = [store.get(ring_key(rank)) for rank in range(1, self.ranks)]
        return fetch, tuple(msgspec.json.decode(address, type=RingAddress) for address in addresses)

    async def _leave(self) -> None:
        assert self._runner is not None
        assert self._stepping is not None
        self._runner.end()
        with suppress(TimeoutError):  # late ones are killed
            async with asyncio.timeout(LEAVE_S):
                await asyncio.wait([self._stepping])
                await self._children.wait()

    # -- generation -------------------------------------------------------------------------------------------------

    def lead(
        self,
        tasks: Tasks,
        workload: Any,
        engine: Engine,
        ring: Ring,
        controller: WorkerClient,
        settings: RunnerSettings,
    ) -> GroupRunner:
        """Starts the loop of rank 0; it is paused until the runner is run."""
        assert self._fetch is not None
        moved = self._process.progress.moved

        def interrupt() -> None:
            engine.interrupt()
            self._children.signal(INTERRUPT)

        self._runner = GroupRunner(controller, settings, progressed=moved, interrupt=interrupt)
        controller.discard_elsewhere = self._runner.discard
        lockstep = Lockstep(
            workload,
            RingStore(ring, moved),
            self._fetch,
            leader=self._runner,
            share=True,
            preparations=settings.bounds.preparations,
            surroundings=RankCallbacks(discard=ring.discard, progressed=moved),
        )
        self._stepping = asyncio.wrap_future(self._working.submit(lockstep.run))
        tasks.spawn("watch the ranks", self._watch(self._stepping))
        return self._runner

    def set_devices(self, devices: tuple[int, ...]) -> None:
        """Sets the devices of the ranks, one for each."""
        if self._runner is not None:
            self._runner.devices = devices

    def announcing(self, source: ManifestSource) -> ManifestSource:
        """The same source, which also announces each manifest to every rank."""
        return source if self._runner is None else Announcing(source, self._runner, self._newest)

    async def _watch(self, stepping: asyncio.Future[None]) -> None:
        """Raises the cause as soon as a rank is lost."""
        assert self._runner is not None
        try:
            await self._children.first_of(stepping)
        except PenstockError as error:
            self._runner.broke(error)
            raise
