"""What a worker needs of an engine: requests to it, its weights, and its place on the devices.

An engine for language models is also a `RequestEngine`; one for gymnasium policies acts on observations. Which of its
optional parts an engine has is said by its `capabilities`: only code in an engine's own folder knows its class.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.engines.ranks import EngineRanks
from penstock.engines.section import Capabilities
from penstock.runtime.member import RunMember
from penstock.runtime.tasks import Tasks
from penstock.weights.io.neighbours import ManifestSource, WeightTransport
from penstock.weights.io.updater import ReplicaReport, ReplicaUpdater, Way


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where an engine is built: the process it belongs to and the devices it may be given."""

    process: RunMember
    seed: int
    device: str
    """As configured: `cpu`, `cuda`, `cuda:1` or `auto`."""
    threads: int
    in_pool: bool
    """Whether the devices belong to a pool that several pipelines share."""
    device_at: Callable[[tuple[int, ...]], torch.device]
    """Which device of torch these devices of the pool are."""
    ranks: EngineRanks | None = None
    """The other processes of the engine, if it has any."""
    memory_share: float = 1.0
    """Of a GPU's memory, what the engine may take for itself: less where a trainer works on the same one meanwhile."""

    def progressed(self) -> None:
        self.process.progress.moved("generating")


class BareEngine(Protocol):
    """What every engine has. One with `capabilities.weights = "none"` has no more: it can be evaluated, not trained."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def close(self) -> None:
        """Frees everything, processes included."""
        ...

    def interrupt(self) -> None:
        """Ends all generations, now and later, with what they have; `resume` undoes it."""
        ...

    def resume(self) -> None:
        """Allows generation after an interruption."""
        ...

    def statistics(self) -> dict[str, float]:
        """Depths now and counters since the start, by plain names. Of a request engine that knows them, also
        `requests_decoding`, `requests_waiting` (for room) and `preemptions`: concurrency follows them."""
        ...


class Engine(BareEngine, Protocol):
    """The engine of a worker: the run updates its weights, and gives it its devices."""

    @property
    def version(self) -> int: ...

    @property
    def digest(self) -> str:
        """Of the complete version it serves; empty when it holds none."""
        ...

    def start(self, tasks: Tasks) -> None:
        """Spawns what must run beside the requests. Called once, on the event loop, before anything else."""
        ...

    async def occupy(self, devices: tuple[int, ...], timeout_s: float) -> None:
        """On to these devices of the pool, for the first time or back; harmless when it is there."""
        ...

    async def vacate(self, timeout_s: float) -> None:
        """Off its devices. What is in flight stands still and goes on after `occupy`."""
        ...

    async def check_vacated(self, timeout_s: float) -> None:
        """PeerLost unless the devices are free, as far as can be measured."""
        ...

    def updater(
        self,
        source: ManifestSource,
        report: Callable[[ReplicaReport], Awaitable[None]],
        transport: Callable[[], WeightTransport],
        *,
        way: Way,
        deadline_s: float,
    ) -> ReplicaUpdater:
        """The one task that changes its weights. `transport` makes the configured transport, if the engine needs it."""
        ...
