"""A worker's engine and generation loop under the orders of the device pool: sleep and wake.

Generation runs only between a wake and a sleep, each time in a new runner. Asleep, the worker holds no lease and no
device memory, and loads no weights. Before it generates again, it loads and verifies the newest weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from penstock.engines.protocol import Engine
from penstock.records.ids import Version
from penstock.records.pool import DeviceId
from penstock.records.weights import Held, Manifest
from penstock.rollout.io.worker_client import WorkerClient
from penstock.runtime.tasks import Tasks
from penstock.weights.io.updater import ReplicaReport
from penstock.weights.replica import ReplicaState

log = logging.getLogger(__name__)

POLL_EVERY_S = 0.01
ENGINE_S = 60.0


class GenerationLoop(Protocol):
    """The loop that generates between a wake and a sleep: one process, or several ranks."""

    async def run(self) -> str: ...

    def stop(self, reason: str) -> None: ...

    def abandon(self, reason: str) -> None: ...

    def statistics(self) -> dict[str, float]: ...


class Generation:
    """Executes the orders of the order executor; `over` waits for the permanent end of generation."""

    def __init__(
        self,
        engine: Engine,
        controller: WorkerClient,
        make_runner: Callable[[], GenerationLoop],
        tasks: Tasks,
        progressed: Callable[[str], None],
        set_devices: Callable[[tuple[DeviceId, ...]], None] = lambda devices: None,
    ) -> None:
        """`set_devices` is called with the worker's devices before the engine occupies them."""
        self._set_devices = set_devices
        self._engine = engine
        self._controller = controller
        self._make_runner = make_runner
        self._tasks = tasks
        self._progressed = progressed
        self._runner: GenerationLoop | None = None
        self._running: asyncio.Task[Any] | None = None
        self._stopping = False
        self._awake = asyncio.Event()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.updating: Callable[[], bool] = lambda: False
        """Whether an update of the engine is in progress; set by the creator of the updater."""
        self.may_serve: Callable[[], bool] = lambda: True
        """Whether the engine's memory was verified; set by the creator of the updater. After a failed write in place,
        the engine does not hold the version that it reports."""

    async def over(self) -> str:
        """Waits for the end of generation: prompts exhausted, training complete, or `stop`."""
        return await self._ended

    def stop(self, reason: str) -> None:
        """Ends generation permanently, within the runner's time limits."""
        self._stopping = True
        if self._runner is not None:
            self._runner.stop(reason)
        elif not self._ended.done():
            self._ended.set_result(reason)

    def statistics(self) -> dict[str, float]:
        return self._runner.statistics() if self._runner is not None else {}

    # -- weights: only while awake ----------------------------------------------------------------------------------

    async def next_manifest(self, held: Held, wait_s: float) -> Manifest | None:
        try:
            async with asyncio.timeout(wait_s):
                await self._awake.wait()
        except TimeoutError:
            self._progressed("asleep by order of the pool")
            return None
        manifest = await self._controller.next_manifest(held, wait_s)
        return manifest if self._awake.is_set() else None  # an order may have put the engine to sleep meanwhile

    # -- orders -----------------------------------------------------------------------------------------------------

    async def wake(self, devices: tuple[DeviceId, ...]) -> None:
        self._progressed(f"waking on devices {list(devices)}")
        self._set_devices(devices)
        await self._engine.occupy(devices, ENGINE_S)
        self._awake.set()

    async def sync_weights(self) -> Version:
        while True:
            held = Held(Version(self._engine.version), self._engine.digest)
            newest = await self._controller.next_manifest(held, 0.0)
            if self._engine.digest and newest is None and self.may_serve():
                return Version(self._engine.version)
            self._progressed("waiting for weights")
            await asyncio.sleep(POLL_EVERY_S)

    async def publish(self, version: Version) -> None:
        await self._controller.report(ReplicaReport(ReplicaState.SERVING, version, self._engine.digest))

    async def route(self) -> None:
        if self._stopping or (self._running is not None and not self._running.done()):
            return
        self._engine.resume()
        self._runner = self._make_runner()
        self._running = self._tasks.spawn("generate", self._generate(self._runner))

    async def close_admission(self) -> None:
        self._awake.clear()
        if self._runner is not None:
            self._runner.stop("asleep by order of the pool")

    async def drain(self) -> None:
        if self._running is not None:
            await asyncio.wait([self._running])

    async def abort(self) -> None:
        if self._runner is not None:
            self._runner.abandon("asleep by order of the pool")
        await self.drain()

    async def release(self) -> None:
        while self.updating():  # noqa: ASYNC110 - the updater works in small steps, each with a deadline
            await asyncio.sleep(POLL_EVERY_S)
        await self._engine.vacate(ENGINE_S)

    async def verify_released(self) -> None:
        await self._engine.check_vacated(ENGINE_S)

    async def _generate(self, runner: GenerationLoop) -> None:
        reason = await runner.run()
        self._runner = None
        log.info("generation ended: %s", reason)
        if (self._awake.is_set() or self._stopping) and not self._ended.done():
            self._ended.set_result(reason)
