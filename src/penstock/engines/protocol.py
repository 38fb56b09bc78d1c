"""The interface of an engine to its worker: requests, weights, devices.

An engine for language models is also a `RequestEngine`; one for gymnasium policies acts on observations. The
`capabilities` of an engine list its optional parts: only code in the engine's own folder depends on its class.
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
    """Where an engine is built: its process, and the devices that it may use."""

    process: RunMember
    seed: int
    device: str
    """As configured: `cpu`, `cuda`, `cuda:1` or `auto`."""
    threads: int
    in_pool: bool
    """Whether the devices belong to a pool that several pipelines share."""
    device_at: Callable[[tuple[int, ...]], torch.device]
    """The torch device of these devices of the pool."""
    ranks: EngineRanks | None = None
    """The other processes of the engine, if it has any."""
    memory_share: float = 1.0
    """The share of a GPU's memory that the engine may use: below 1 where a trainer uses the same GPU."""

    def progressed(self) -> None:
        self.process.progress.moved("generating")


class BareEngine(Protocol):
    """The part that all engines implement. One with `capabilities.weights = "none"` implements only this: it can be
    evaluated, not trained."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def close(self) -> None:
        """Frees everything, processes included."""
        ...

    def interrupt(self) -> None:
        """Ends all generations, now and later, with the tokens drawn so far, until `resume`."""
        ...

    def resume(self) -> None:
        """Allows generation after an interruption."""
        ...

    def statistics(self) -> dict[str, float]:
        """Current depths, and counters since the start, by name. `requests_decoding`, `requests_waiting` (for cache
        space) and `preemptions` control the concurrency, if a request engine reports them."""
        ...


class Engine(BareEngine, Protocol):
    """The engine of a worker: the run updates its weights and assigns its devices."""

    @property
    def version(self) -> int: ...

    @property
    def digest(self) -> str:
        """Of the complete version that is served; empty if there is none."""
        ...

    def start(self, tasks: Tasks) -> None:
        """Spawns the background tasks. Called once, on the event loop, before any other method."""
        ...

    async def occupy(self, devices: tuple[int, ...], timeout_s: float) -> None:
        """Loads the engine onto these devices of the pool, at the start or after `vacate`; a no-op if it is there."""
        ...

    async def vacate(self, timeout_s: float) -> None:
        """Frees its devices. Requests in flight pause, and resume after `occupy`."""
        ...

    async def check_vacated(self, timeout_s: float) -> None:
        """Raises PeerLost unless the devices are free, as far as can be measured."""
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
        """The one task that changes its weights. `transport` builds the configured transport, if it is needed."""
        ...
