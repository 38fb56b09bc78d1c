"""A vLLM server as a worker's engine: wires its process, its requests and its weights together."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import logging
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.engines.architecture import text_config
from penstock.engines.models import AdaptedPolicy, LanguagePolicy
from penstock.engines.protocol import Site
from penstock.engines.requests import Completion, Sampling
from penstock.engines.vllm.adapters import VllmAdapters, export_base, rank_of
from penstock.engines.vllm.requests import VllmRequests, label
from penstock.engines.vllm.server import ServerSettings, VllmServer, check_interpreter
from penstock.engines.vllm.settings import VllmEngineSection
from penstock.engines.vllm.weights import VllmEngine
from penstock.errors import ConfigError
from penstock.runtime.tasks import Tasks
from penstock.runtime.tensors import device_of
from penstock.weights.io.neighbours import ManifestSource, WeightTransport
from penstock.weights.io.updater import ReplicaReport, ReplicaUpdater, Way

log = logging.getLogger(__name__)

STOP_S = 4.0
PAUSE_S = 60.0
HEAD_SIZES_ON_CPU = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Supported by vLLM's attention on CPU. With another size the server crashes at the first request."""


class VllmService:
    """One server for one worker. Completions come from `requests`, versions go in through `weights`."""

    def __init__(self, site: Site, section: VllmEngineSection, policy: LanguagePolicy) -> None:
        self._section = section
        self.capabilities = section.capabilities
        self._site = site
        self._process = process = site.process
        check_interpreter(section.python or sys.executable)
        settings = server_settings(site, section, policy)
        self.max_positions: int | None = settings.max_length
        self.server = VllmServer(settings)
        address = self.server.address()
        state: dict[str, Any] = {"exit_reason": self.server.exit_reason, "runs": lambda: self._answers}
        places = (address, process.run.root, settings.home / "versions")
        self._adapters = VllmAdapters(*places, policy, **state) if isinstance(policy, AdaptedPolicy) else None
        self.weights: VllmEngine = self._adapters or VllmEngine(*places, label=label, **state)
        self.requests = VllmRequests(
            address,
            max_positions=settings.max_length,
            held=lambda: (self.weights.version, self.weights.digest),
            published_as=self.weights.published_as,
            in_use=self._adapters.in_use if self._adapters is not None else None,
            exit_reason=self.server.exit_reason,
            deadline_s=section.request_s,
            progressed=lambda: process.progress.moved("generating"),
        )
        self._gpus: tuple[str, ...] = ()
        self._starting: asyncio.Task[None] | None = None
        """The task that starts, or has started, the server; None without a server."""
        self._answers = False

    @property
    def version(self) -> int:
        return self.weights.version

    @property
    def digest(self) -> str:
        return self.weights.digest

    def start(self, tasks: Tasks) -> None:
        """Spawns the background tasks. A server that is lost ends the worker, which is then replaced."""
        self._tasks = tasks
        tasks.spawn("carry out interruptions", self.requests.run())

    def updater(
        self,
        source: ManifestSource,
        report: Callable[[ReplicaReport], Awaitable[None]],
        transport: Callable[[], WeightTransport],
        *,
        way: Way,
        deadline_s: float,
    ) -> ReplicaUpdater:
        """Whole weights are updated in place, adapters are staged; the server verifies its weights itself."""
        self.weights.elsewhere = transport()
        self._updater = ReplicaUpdater(
            self.weights,
            source,
            report,
            self.weights,
            way="in_place" if self._adapters is None else "staged",
            change_timeout_s=deadline_s,
            verify=self.weights.served_digest,
        )
        return self._updater

    async def close(self) -> None:
        await self.requests.close()
        self.weights.close()
        await asyncio.to_thread(self.server.close, STOP_S)

    def statistics(self) -> dict[str, float]:
        return {"requests_decoding": float(self.requests.in_flight)} | self.server.figures

    # As the workload sees it

    async def complete(self, context: Sequence[int], sampling: Sampling, *, cache_key: object = None) -> Completion:
        """See `RequestEngine.complete`."""
        return await self.requests.complete(context, sampling, cache_key=cache_key)

    def forget(self, cache_key: object) -> None:
        """See `RequestEngine.forget`."""
        self.requests.forget(cache_key)

    # As the runner and the pool see it

    def interrupt(self) -> None:
        self.requests.interrupt()

    def resume(self) -> None:
        self.requests.resume()

    async def occupy(self, devices: tuple[int, ...], timeout_s: float) -> None:
        """Starts the server at the first call, which may take `start_s`; later calls only wake it.

        A server cannot move to other GPUs: it is restarted there.
        """
        gpus = self._gpus_at(devices)
        if gpus != self._gpus:
            await self._stop(STOP_S)
        if self._starting is None:
            self._gpus = gpus
            self._starting = self._tasks.spawn("start the vLLM server", self._start())
        await asyncio.wait([self._starting])
        self._starting.result()
        await asyncio.to_thread(self.weights.occupy, timeout_s)

    async def vacate(self, timeout_s: float) -> None:
        """A server that does not answer yet cannot sleep: it is stopped, and restarted by the next `occupy`."""
        if not self._answers:
            await self._stop(min(timeout_s, STOP_S))
        else:
            await asyncio.to_thread(self.weights.vacate, timeout_s)

    async def check_vacated(self, timeout_s: float) -> None:
        if self._answers:
            await asyncio.to_thread(self.weights.check_vacated, timeout_s)

    async def _start(self) -> None:
        self.server.launch(self._gpus)
        await self.server.ready(self._section.start_s, self._process.progress.moved)
        self._answers = True
        await asyncio.to_thread(self.weights.sleep, PAUSE_S)  # until a published version is loaded
        self._tasks.spawn("watch the vLLM server", self.server.watch())
        probing = self.server.probe(stall_s=self._section.stall_s, resumed=lambda: self.weights.resumed_at)
        self._tasks.spawn("probe the vLLM server", probing)

    async def _stop(self, timeout_s: float) -> None:
        starting, self._starting, self._answers = self._starting, None, False
        if starting is None:
            return
        starting.cancel()
        await asyncio.wait([starting])
        self.weights.forget()
        self._updater.reset()
        await asyncio.to_thread(self.server.stop, timeout_s)

    def _gpus_at(self, devices: tuple[int, ...]) -> tuple[str, ...]:
        """GPUs for the server's CUDA_VISIBLE_DEVICES; empty: inherited from the worker."""
        if not self.server.settings.accelerator or not (self._site.in_pool or ":" in self._site.device):
            return ()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
        return gpus_at(devices, self._site.device, names)


def gpus_at(devices: Sequence[int], configured: str, visible: Sequence[str]) -> tuple[str, ...]:
    """Maps devices of the pool to names of `visible` GPUs for CUDA_VISIBLE_DEVICES of a child process.

    Device numbers wrap around if the GPUs are fewer. A `configured` GPU like `cuda:1` overrides the devices.
    """
    _, _, number = configured.partition(":")
    numbers = [int(number)] if number else devices
    return tuple(visible[one % len(visible)] if visible else str(one) for one in numbers)


def server_settings(site: Site, section: VllmEngineSection, policy: LanguagePolicy) -> ServerSettings:
    config = text_config(policy.module)
    process, accelerator = site.process, device_of(site.device).type != "cpu"
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if not accelerator and head_size not in HEAD_SIZES_ON_CPU:
        raise ConfigError(
            f"the model's attention heads have size {head_size}; vLLM on CPU supports {HEAD_SIZES_ON_CPU}: for a tiny "
            "model choose model.hidden and model.heads so that hidden / heads is one of them"
        )
    folder = process.run.root / "engines" / process.pipeline_name
    home = folder / process.name
    home.mkdir(parents=True, exist_ok=True)
    adapted = isinstance(policy, AdaptedPolicy)
    return ServerSettings(
        model=export_base(policy, folder / "base") if adapted else export_config(policy, folder),
        lora_rank=rank_of(policy) if adapted else 0,
        home=home,
        log=process.run.log_path(f"{process.name}.vllm"),
        engine=section,
        python=section.python or sys.executable,
        dtype=str(next(policy.module.parameters()).dtype).removeprefix("torch."),
        max_length=section.max_length or config.max_position_embeddings,
        threads=site.threads,
        accelerator=accelerator,
        memory_share=site.memory_share,
        seed=site.seed % 2**32,
    )


def export_config(policy: LanguagePolicy, folder: Path) -> Path:
    """Writes the model's configuration for the server. Its weights come as published versions.

    The path of the model is part of the key of vLLM's compile cache. So equal models have equal paths, in the user's
    cache directory; if that cannot be written, the path is in `folder`.
    """
    config: Any = copy.deepcopy(policy.module.config)
    config.architectures = [type(policy.module).__name__]
    name = hashlib.blake2b(config.to_json_string(use_diff=False).encode(), digest_size=12).hexdigest()
    try:
        return _written(config, cache_home() / "models" / name)
    except OSError as error:
        log.info("the user's cache cannot be written (%s): the server compiles again for every run", error)
        return _written(config, folder / name)


def _written(config: Any, directory: Path) -> Path:
    if directory.exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    writing = directory.with_name(f".{directory.name}.{os.getpid()}")
    config.save_pretrained(writing)
    try:
        writing.rename(directory)
    except OSError:  # another worker was first
        shutil.rmtree(writing)
    return directory


def cache_home() -> Path:
    """For files that outlive a run and can be recreated."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
