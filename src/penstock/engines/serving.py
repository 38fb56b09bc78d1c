"""The weights that an engine serves, and the gate through which they change.

Any number of generating threads take *steps*; a *change* (swap, load in place, sleep) waits for the steps in flight,
blocks new ones, and lets them resume afterwards. A waiting change has priority over waiting steps, so it starts
after at most one step. Two steps of the same generation may therefore use different versions; each step receives
the version and digest of its weights.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from penstock.engines.section import Capabilities
from penstock.errors import LocalProtocolError, PeerLost
from penstock.runtime.clock import monotonic
from penstock.runtime.tasks import Tasks
from penstock.runtime.tensors import RESIDUE_BYTES, OwnedTensors, device_bytes, free_device_caches, module_tensors
from penstock.weights.io.neighbours import ManifestSource, WeightTransport
from penstock.weights.io.updater import ReplicaReport, ReplicaUpdater, Way


class Serving:
    """The live tensors of a module with their version and digest. Safe to call from any thread."""

    def __init__(self, module: nn.Module, *, version: int = 0, digest: str = "", blocked_timeout_s: float = 600.0):
        self.module = module
        self.version = version
        self.digest = digest
        self._blocked_timeout_s = blocked_timeout_s
        self._gate = threading.Condition()
        self._steps = 0
        self._changes_waiting = 0
        self._changing = False
        self._asleep = False
        self._torn = False
        self._droppable: dict[int, Callable[[], None]] = {}
        self._staged: dict[str, Tensor] | None = None
        self._spare: dict[str, Tensor] = {}
        """Memory that the last swap replaced: the next version is staged there."""
        self.device = next(module.parameters()).device
        """Where it serves, or will serve after `wake`."""

    @property
    def state(self) -> str:
        """`serving`, `asleep`, or `torn`: partly overwritten, not served before a complete version is loaded."""
        return "torn" if self._torn else "asleep" if self._asleep else "serving"

    def served_tensors(self) -> dict[str, Tensor]:
        """The live weights by name. Not copies."""
        return module_tensors(self.module)

    @contextmanager
    def step(self) -> Iterator[tuple[int, str]]:
        """Runs one step of generation, during which the weights do not change; yields their version and digest.

        Waits while the engine is asleep or torn; raises PeerLost after `blocked_timeout_s`.
        """
        with self._gate:
            ready = self._gate.wait_for(self._may_step, timeout=self._blocked_timeout_s)
            if not ready:
                raise PeerLost(f"the engine was {self.state} for {self._blocked_timeout_s:.0f} s: no step could run")
            self._steps += 1
        try:
            yield self.version, self.digest
        finally:
            with self._gate:
                self._steps -= 1
                if self._steps == 0:
                    self._gate.notify_all()

    @contextmanager
    def generation(self, drop_cache: Callable[[], None]) -> Iterator[None]:
        """Encloses the steps of one generation. A sleep calls `drop_cache`, between two steps, to free memory."""
        with self._gate:
            self._droppable[id(drop_cache)] = drop_cache
        try:
            yield
        finally:
            with self._gate:
                del self._droppable[id(drop_cache)]

    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies a complete version next to the live one; a second call replaces the first. Blocks no step.

        `OwnedTensors` on the right device are used without a copy.
        """
        live = self.served_tensors()
        self._check(tensors, live)
        if isinstance(tensors, OwnedTensors) and all(tensors[name].device == live[name].device for name in live):
            self._staged, self._spare = {name: tensors[name] for name in live}, {}
            return
        spare, self._spare, self._staged = self._spare, {}, None
        staged: dict[str, Tensor] = {}
        for name, tensor in live.items():
            kept = spare.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            staged[name] = kept.requires_grad_(False).copy_(tensors[name])
        self._staged = staged

    def staged_tensors(self) -> dict[str, Tensor]:
        """The tensors that the next swap will serve, not copies: they are verified before they are served."""
        if self._staged is None:
            raise LocalProtocolError("no weights are staged, so there is nothing to verify")
        return dict(self._staged)

    def swap(self, version: int, digest: str, timeout_s: float = 60.0) -> float:
        """Serves the staged version from the next step on. Returns the seconds in which no step could run."""
        staged = self._staged
        if staged is None:
            raise LocalProtocolError(f"no weights are staged, so version {version} cannot be swapped in")
        with self._change(timeout_s) as started:
            parameters: dict[str, Tensor] = dict(self.module.named_parameters())
            parameters |= dict(self.module.named_buffers())
            retired = {name: parameters[name].data for name in staged}
            self._torn = True  # until the last tensor is replaced
            in_place = self.device.type != "cpu"
            with torch.no_grad():
                for name, tensor in staged.items():
                    # Staged and live tensors are on different devices if the engine slept or woke in between.
                    if in_place:
                        parameters[name].data.copy_(tensor)  # captured graphs hold the addresses of the weights
                    else:
                        parameters[name].data = tensor.to(parameters[name].device)
            # New host memory is slow (each page is zeroed); device memory comes from a pool.
            self._spare = {} if in_place else retired
            self._staged = None
            self._torn = False
            self.version, self.digest = version, digest
            return monotonic() - started

    def load_in_place(self, tensors: Mapping[str, Tensor], version: int, digest: str, timeout_s: float = 60.0) -> float:
        """Overwrites the live tensors while generation is paused. If it fails part-way the engine is torn.

        Returns the seconds in which no step could run.
        """
        live = self.served_tensors()
        self._check(tensors, live)
        with self._change(timeout_s) as started, torch.no_grad():
            self._torn = True
            for name, tensor in live.items():
                tensor.copy_(tensors[name])
            self._torn = False
            self.version, self.digest = version, digest
            return monotonic() - started

    def relabel(self, version: int, timeout_s: float = 60.0) -> None:
        """Gives the served weights this version, for all steps that begin afterwards. Does not wait."""
        with self._gate:
            self.version = version

    def sleep(self, timeout_s: float = 60.0) -> None:
        """Blocks steps and frees device memory. Generations in flight keep their tokens and resume after `wake`."""
        with self._change(timeout_s):
            self._asleep = True
            for drop_cache in list(self._droppable.values()):
                drop_cache()
            if self.device.type != "cpu":
                self.module.to("cpu")
                if self._staged is not None:  # by an update that has not reached its swap
                    self._staged = {name: tensor.cpu() for name, tensor in self._staged.items()}
                free_device_caches()

    def wake(self, timeout_s: float = 60.0, device: torch.device | None = None) -> None:
        """Resumes after `sleep`, on the same or another device; a no-op when awake there."""
        with self._change(timeout_s):
            self.module.to(device or self.device)
            self.device = next(self.module.parameters()).device
            self._asleep = False

    def _await_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _may_step(self) -> bool:
        return not (self._changing or self._changes_waiting or self._asleep or self._torn)

    @contextmanager
    def _change(self, timeout_s: float) -> Iterator[float]:
        deadline = monotonic() + timeout_s
        with self._gate:
            self._changes_waiting += 1
            try:
                free = self._gate.wait_for(
                    lambda: not self._changing and not self._steps, timeout=max(0.0, deadline - monotonic())
                )
                if not free:
                    raise PeerLost(f"a generation step did not end within {timeout_s:.0f} s: the engine is blocked")
                self._changing = True
                self._await_device()  # a step that ended on the host may still run on the device
            finally:
                self._changes_waiting -= 1
                self._gate.notify_all()
        try:
            yield monotonic()
        finally:
            self._await_device()
            with self._gate:
                self._changing = False
                self._gate.notify_all()

    @staticmethod
    def _check(tensors: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> None:
        missing = sorted(live.keys() - tensors.keys())
        if missing:
            raise LocalProtocolError(
                f"weights lack {len(missing)} of the {len(live)} tensors the engine serves, first {missing[0]!r}; "
                "they belong to another model"
            )
        for name, tensor in live.items():
            given = tensors[name]
            if given.shape != tensor.shape or given.dtype != tensor.dtype:
                raise LocalProtocolError(
                    f"tensor {name!r}: the engine serves {tuple(tensor.shape)} {tensor.dtype}, "
                    f"the weights have {tuple(given.shape)} {given.dtype}; they belong to another model"
                )

    def __repr__(self) -> str:
        return (
            f"Serving(version={self.version}, digest={self.digest[:12]!r}, {self.state}, steps={self._steps}, "
            f"changes_waiting={self._changes_waiting}, staged={self._staged is not None})"
        )


class ServingEngine:
    """An engine in this process: its weights change through `serving` only.

    It is built in host memory, and is on a device only between `occupy` and `vacate`.
    """

    def __init__(self, serving: Serving, seed: int) -> None:
        self.serving = serving
        self.capabilities = Capabilities(device_weights=True)
        self.device_at: Callable[[tuple[int, ...]], torch.device] = lambda devices: self.device
        """The torch device of these devices of the pool; set by the builder."""
        self._generator = torch.Generator(device=serving.device).manual_seed(seed)

    @property
    def device(self) -> torch.device:
        """See `Serving.device`."""
        return self.serving.device

    @property
    def generator(self) -> torch.Generator:
        """The random generator on the device; another device gets another seed, so that no draw is repeated."""
        if self._generator.device != self.device:
            seed = self._generator.initial_seed() + 1
            self._generator = torch.Generator(device=self.device).manual_seed(seed)
        return self._generator

    @property
    def version(self) -> int:
        return self.serving.version

    @property
    def digest(self) -> str:
        return self.serving.digest

    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Serving.stage`."""
        self.serving.stage(tensors)

    def staged_tensors(self) -> dict[str, Tensor]:
        """See `Serving.staged_tensors`."""
        return self.serving.staged_tensors()

    def swap(self, version: int, digest: str, timeout_s: float = 60.0) -> float:
        """See `Serving.swap`."""
        return self.serving.swap(version, digest, timeout_s)

    def load_in_place(self, tensors: Mapping[str, Tensor], version: int, digest: str, timeout_s: float = 60.0) -> float:
        """See `Serving.load_in_place`."""
        return self.serving.load_in_place(tensors, version, digest, timeout_s)

    def relabel(self, version: int, timeout_s: float = 60.0) -> None:
        """See `Serving.relabel`."""
        self.serving.relabel(version, timeout_s)

    def served_tensors(self) -> dict[str, Tensor]:
        """See `Serving.served_tensors`."""
        return self.serving.served_tensors()

    def sleep(self, timeout_s: float = 60.0) -> None:
        """See `Serving.sleep`: requests in flight pause, and resume from their tokens after `wake`."""
        self.serving.sleep(timeout_s)

    def wake(self, timeout_s: float = 60.0, device: torch.device | None = None) -> None:
        """See `Serving.wake`."""
        self.serving.wake(timeout_s, device)

    # The interface to the worker: see `protocol.Engine`

    def start(self, tasks: Tasks) -> None: ...

    async def close(self) -> None: ...

    def interrupt(self) -> None: ...

    def resume(self) -> None: ...

    def statistics(self) -> dict[str, float]:
        return {}

    async def occupy(self, devices: tuple[int, ...], timeout_s: float) -> None:
        await asyncio.to_thread(self.wake, timeout_s, self.device_at(devices))

    async def vacate(self, timeout_s: float) -> None:
        await asyncio.to_thread(self.sleep, timeout_s)

    async def check_vacated(self, timeout_s: float) -> None:
        if self.serving.state != "asleep":
            raise PeerLost(f"the engine is {self.serving.state} instead of asleep")
        if (left_bytes := device_bytes()) > RESIDUE_BYTES:
            raise PeerLost(f"{left_bytes >> 20} MiB of device memory are still allocated")

    def updater(
        self,
        source: ManifestSource,
        report: Callable[[ReplicaReport], Awaitable[None]],
        transport: Callable[[], WeightTransport],
        *,
        way: Way,
        deadline_s: float,
    ) -> ReplicaUpdater:
        return ReplicaUpdater(self, source, report, transport(), way=way, change_timeout_s=deadline_s)
