"""A worker on a pooled GPU: its engine is built in host memory, and on the device only between a wake and a sleep."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build
from penstock.engines.requests import Completion, Sampling
from penstock.engines.torch.engine import TorchEngine
from penstock.records.ids import Version
from penstock.records.pool import DeviceId
from penstock.records.weights import Held, Manifest
from penstock.rollout.io.generation import Generation
from penstock.runtime.tasks import Tasks
from penstock.runtime.tensors import RESIDUE_BYTES, device_bytes, free_device_caches
from penstock.weights.io.files import FileTransport, Publisher
from penstock.weights.io.updater import ReplicaReport, ReplicaUpdater

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

CUDA = torch.device("cuda", 0)
GREEDY = Sampling(max_new_tokens=12, greedy=True)
PROMPT = [5, 6, 7, 8, 9]


def policy(seed: int) -> LanguagePolicy:
    """About 100 MB of weights."""
    built = build(TinyLanguageModel(hidden_size=1024, layers=2, heads=8, seed=seed))
    assert isinstance(built, LanguagePolicy)
    return built


class ControllerApi:
    """The controller's side of weights: the newest version, and what the worker reported."""

    def __init__(self, run_dir: Path) -> None:
        self._publisher = Publisher(run_dir, "lineage")
        self.newest: Manifest | None = None
        self.reports: list[ReplicaReport] = []

    def publish(self, version: int, source: LanguagePolicy) -> None:
        self.newest = self._publisher.publish(Version(version), source.named_tensors())

    async def next_manifest(self, held: Held, wait_s: float) -> Manifest | None:
        if self.newest is None or self.newest.held == held:
            await asyncio.sleep(min(wait_s, 0.02))
            return None
        return self.newest

    async def report(self, report: ReplicaReport) -> None:
        self.reports.append(report)


class Standing:
    """A generation loop that does nothing until it is stopped: the test generates itself."""

    def __init__(self) -> None:
        self._stopped = asyncio.Event()

    async def run(self) -> str:
        await self._stopped.wait()
        return "stopped"

    def stop(self, reason: str) -> None:
        self._stopped.set()

    abandon = stop

    def statistics(self) -> dict[str, float]:
        return {}


async def completed(engine: TorchEngine | TorchEngine) -> Completion:
    if isinstance(engine, TorchEngine):
        return await engine.complete(PROMPT, GREEDY)
    return (await asyncio.to_thread(engine.generate, [PROMPT], GREEDY))[0]


def expected(source: LanguagePolicy) -> list[int]:
    """What the same weights say in an engine of their own, which never slept."""
    engine = TorchEngine(source.module.to(CUDA), pad_id=0)
    tokens = engine.generate([PROMPT], GREEDY)[0].token_ids.tolist()
    source.module.to("cpu")
    return tokens


@pytest.mark.parametrize("way", ["staged", "in_place"])
async def test_on_the_device_only_between_a_wake_and_a_sleep(way: Any, tmp_path: Path) -> None:
    old, new = policy(1), policy(2)
    wanted = {0: expected(old), 1: expected(new)}
    assert wanted[0] != wanted[1]
    gc.collect()
    free_device_caches()
    engine = TorchEngine(policy(3).module, pad_id=0)
    controller: Any = ControllerApi(tmp_path)
    controller.publish(0, old)
    assert device_bytes() <= RESIDUE_BYTES
    assert engine.device.type == "cpu"
    async with Tasks() as tasks:
        engine.device_at = lambda devices: torch.device("cuda", devices[0])
        generation = Generation(engine, controller, Standing, tasks, lambda doing: None)
        updater = ReplicaUpdater(engine, generation, controller.report, FileTransport(tmp_path), way=way, poll_s=0.1)
        generation.updating = lambda: updater.updating
        tasks.spawn("update weights", updater.run())
        for version in (0, 1, 1):
            async with asyncio.timeout(60):
                await generation.wake((DeviceId(0),))
                assert await generation.sync_weights() == version
                await generation.publish(Version(version))
                await generation.route()
                assert controller.reports[-1].version == version
                assert engine.digest == controller.newest.digest, "it serves nothing before the newest weights are in"
                assert engine.device == CUDA
                completion = await completed(engine)
                assert (completion.version, completion.token_ids.tolist()) == (version, wanted[version])
                assert device_bytes() > RESIDUE_BYTES
                await generation.close_admission()
                await generation.abort()
                await generation.release()
                await generation.verify_released()
            gc.collect()
            assert device_bytes() <= RESIDUE_BYTES
            assert torch.cuda.memory_reserved() <= RESIDUE_BYTES
            controller.publish(1, new)
        tasks.cancel()
