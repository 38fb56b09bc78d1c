"""Weights of ranks: rank 0 announces them with the fetch, and every rank loads them itself while it is awake."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from penstock.engines.protocol import Engine
from penstock.errors import PeerLost
from penstock.records.ids import Version
from penstock.records.weights import Held, Manifest
from penstock.rollout.io.group import GroupRunner
from penstock.runtime.rundir import write_atomically
from penstock.weights.io.updater import ManifestSource, ReplicaReport

log = logging.getLogger(__name__)

POLL_EVERY_S = 0.01
READ_EVERY_S = 1.0
ENGINE_S = 60.0
WEIGHTS_S = 600.0
"""How long a rank may take to load the version that its leases require."""


class RankWeights:
    """Connects the lockstep loop, which calls from its thread, with the updater, which runs on the event loop."""

    def __init__(self, engine: Engine, progressed: Callable[[str], None], newest: Path) -> None:
        """`newest`: file of rank 0's newest manifest, for a rank that waits for weights and therefore runs no fetch."""
        self._engine = engine
        self._newest_path = newest
        self._interrupted = threading.Event()
        self._progressed = progressed
        self._loop = asyncio.get_running_loop()
        self._newest: Manifest | None = None
        self._paused = False
        self._changed = asyncio.Event()
        self.updating: Callable[[], bool] = lambda: False
        """Whether an update of the engine is in progress; set by the creator of the updater."""

    # -- for the updater --------------------------------------------------------------------------------------------

    async def next_manifest(self, held: Held, wait_s: float) -> Manifest | None:
        """See `ManifestSource.next_manifest`. A paused rank loads nothing."""
        try:
            async with asyncio.timeout(wait_s):
                while self._paused or self._newest is None or self._newest.held == held:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return None
        return self._newest

    async def report(self, report: ReplicaReport) -> None:
        """Only logs: rank 0 reports for the group, and a rank that cannot load its weights fails the group."""
        log.info("%s at version %d %s", report.state.value, report.version, report.error)

    # -- for the lockstep loop -------------------------------------------------------------------------------------

    def announced(self, manifest: Manifest) -> None:
        self._loop.call_soon_threadsafe(self._announce, manifest)

    def rest(self) -> None:
        """Puts the engine to sleep; returns when it is measured to have left its devices."""
        self._await(self._sleep())

    def wake(self, devices: tuple[int, ...]) -> None:
        self._await(self._wake(devices))

    def wait_for(self, version: Version) -> bool:
        """Waits until the engine serves verified weights of at least this version; False if interrupted."""
        began = read_at = time.monotonic()
        while not self._engine.digest or self._engine.version < version:
            self._progressed(f"waiting for weights of version {version}")
            now = time.monotonic()
            if now - began > WEIGHTS_S:
                raise PeerLost(
                    f"weights of version {version} did not arrive within {WEIGHTS_S:.0f} s; version "
                    f"{self._engine.version} is loaded"
                )
            if now - read_at > READ_EVERY_S:
                # The announced version may have been superseded and removed before it could be loaded.
                read_at = now
                if self._newest_path.exists():
                    self.announced(msgspec.json.decode(self._newest_path.read_bytes(), type=Manifest))
            if self._interrupted.wait(POLL_EVERY_S):
                return False
        return True

    def interrupt(self) -> None:
        """Ends generation and waiting for weights early, until the next `wake`."""
        self._interrupted.set()
        self._engine.interrupt()

    def _await(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * ENGINE_S)

    def _announce(self, manifest: Manifest) -> None:
        self._newest = manifest
        self._changed.set()

    async def _sleep(self) -> None:
        self._paused = True
        while self.updating():  # noqa: ASYNC110 - the updater works in small steps, each with a deadline
            await asyncio.sleep(POLL_EVERY_S)
        await self._engine.vacate(ENGINE_S)
        await self._engine.check_vacated(ENGINE_S)
        self._progressed("paused")

    async def _wake(self, devices: tuple[int, ...]) -> None:
        self._interrupted.clear()
        self._engine.resume()
        await self._engine.occupy(devices, ENGINE_S)
        self._paused = False
        self._changed.set()


class Announcing:
    """Rank 0's source of manifests, which also announces each one to all ranks."""

    def __init__(self, source: ManifestSource, runner: GroupRunner, newest: Path) -> None:
        self._source = source
        self._runner = runner
        self._newest = newest

    async def next_manifest(self, held: Held, wait_s: float) -> Manifest | None:
        manifest = await self._source.next_manifest(held, wait_s)
        if manifest is not None:
            write_atomically(self._newest, msgspec.json.encode(manifest).decode())
            self._runner.announce(manifest)
        return manifest
