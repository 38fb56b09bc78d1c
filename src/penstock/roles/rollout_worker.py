"""The rollout worker process: an engine, the five hooks, a ring, and weights kept up to date. Wiring only."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from typing import Any

import torch

from penstock.config.devices import weights_stay_on_device
from penstock.engines.models import ActorCriticPolicy, LanguagePolicy
from penstock.engines.settings import VllmEngineSection
from penstock.engines.vllm.service import VllmService, closing
from penstock.envs.protocol import prompts_per_pass
from penstock.errors import ConfigError
from penstock.payload.io.served import served
from penstock.payload.io.shm import Ring
from penstock.pool.io.executor import OrderExecutor
from penstock.records.payload import RingAddress
from penstock.roles.engines import engine_of, workload_of
from penstock.roles.environments import environment_of
from penstock.roles.evaluating import evaluating
from penstock.roles.models import policy_of
from penstock.roles.preparing import PromptsElsewhere
from penstock.roles.process import RoleProcess
from penstock.roles.reporting import LEAVE_S, connected, heed_stop, report_gauges
from penstock.rollout.io.generation import Generation, GenerationLoop, OwnEngine, Resident
from penstock.rollout.io.hook_calls import Evaluating
from penstock.rollout.io.ranks import RankGroup
from penstock.rollout.io.runner import Runner, RunnerSettings
from penstock.rollout.io.worker_desk import RingStore, WorkerDesk
from penstock.rollout.prefetch import Bounds
from penstock.runtime.offload import background
from penstock.runtime.tasks import Tasks
from penstock.runtime.tensors import device_at, device_of
from penstock.weights.io.transports import transport_of
from penstock.weights.io.updater import ReplicaUpdater

log = logging.getLogger(__name__)

Parts = tuple[Any, Any, Any, LanguagePolicy | ActorCriticPolicy]
"""Environment, engine, hooks and policy."""
Make = Callable[[RoleProcess], Parts]


async def main(process: RoleProcess, make: Make | None = None) -> None:
    """Generates until the prompts are exhausted or training is complete, or until asked to stop."""
    pipeline = process.pipeline
    rollout = pipeline.rollout
    torch.set_num_threads(rollout.threads)
    ranks = RankGroup(process, rollout.ranks)
    await ranks.start()
    building = background(1, "build")
    process.progress.moved("building the model")
    environment, engine, workload, policy = await process.started(building.submit(make or build, process))
    building.close(timeout_s=1.0)
    ring = Ring.create(
        process.run.run_id,
        capacity_bytes=rollout.ring_mb << 20,
        slots=rollout.ring_slots,
        directory=process.ring_directory,
        random=process.random,
    )
    try:
        with (
            served(ring, process.config.payload, process.run.token()) as address,
            evaluating(process, engine, policy) as evaluation,
        ):
            async with closing(engine), ranks.joined():
                await _generate(process, environment, engine, workload, ring, address, ranks, evaluation)
    finally:
        # A dead worker's ring is still read by the trainer; the supervisor removes it at the end of the run.
        ring.close(unlink=False)


async def _generate(
    process: RoleProcess,
    environment: Any,
    engine: Any,
    workload: Any,
    ring: Ring,
    address: RingAddress,
    ranks: RankGroup,
    evaluation: Evaluating | None,
) -> None:
    pipeline = process.pipeline
    lag = process.lag_monitor()
    settings = _settings(process)
    details = {"ring": address, "more_rings": ranks.rings, "prompt_count": prompts_per_pass(environment)}

    def place(devices: tuple[int, ...]) -> torch.device:
        ranks.stand_on(devices)
        return device_at(pipeline.rollout.device, devices, in_pool=bool(process.config.pool.devices))

    resident: Resident = engine if isinstance(engine, VllmService) else OwnEngine(engine, place)
    async with (
        connected(process, "rollout", lambda: resident.vacate(LEAVE_S / 2), **details) as client,
        Tasks() as tasks,
    ):
        desk = WorkerDesk(process, client, tasks, resident, ring)
        moved = process.progress.moved

        group = ranks.lead(tasks, workload, engine, ring, desk, settings) if ranks.others else None

        def make_runner() -> GenerationLoop:
            if group is not None:
                return group
            interrupt = getattr(engine, "interrupt", lambda: None)
            store = RingStore(ring)
            return Runner(workload, desk, store, settings, progressed=moved, interrupt=interrupt, evaluating=evaluation)

        generation = Generation(resident, desk, make_runner, tasks, moved)
        deadline_s = pipeline.weights.deadline_s
        if isinstance(engine, VllmService):
            engine.watch(tasks)
            updater = engine.updater(generation, desk.report, deadline_s)
        else:
            way = pipeline.weights.way
            transport = transport_of(
                process,
                pipeline.weights,
                process.config.payload.transport,
                device_of(pipeline.rollout.device),
                on_device=weights_stay_on_device(process.config, pipeline),
            )
            source = ranks.announcing(generation)
            updater = ReplicaUpdater(engine, source, desk.report, transport, way=way, change_timeout_s=deadline_s)

        def figures() -> dict[str, float]:
            return generation.statistics() | updater.statistics.values() | getattr(engine, "statistics", dict)()

        generation.updating = lambda: updater.updating
        executor = OrderExecutor(generation, client.call, client.pipeline, client.member)
        tasks.spawn("watch the loop", lag.run())
        tasks.spawn("update weights", updater.run())
        tasks.spawn("obey the pool", executor.run())
        tasks.spawn("report gauges", report_gauges(process, client, lag, figures))
        tasks.spawn("heed the stop", heed_stop(process, client, generation.stop))
        await generation.over()
        tasks.cancel()


def build(process: RoleProcess) -> Parts:
    """Environment, engine, hooks and policy, in host memory: devices are the pool's to give."""
    config, pipeline = process.config, process.pipeline
    environment = environment_of(config, pipeline)
    if processes := pipeline.rollout.preparation_processes:
        environment = PromptsElsewhere(environment, process.run.config_path, pipeline.name, processes)
    policy = policy_of(config, pipeline, environment)
    # Every incarnation draws other samples: a restarted worker must not repeat what it drew before.
    seed = zlib.crc32(process.member.encode()) ^ config.run.seed
    kept = process.run.rollouts(pipeline.name) / "unfinished"
    if isinstance(pipeline.engine, VllmEngineSection):
        if not isinstance(policy, LanguagePolicy):
            raise ConfigError(f"pipeline {pipeline.name!r}: vLLM serves language models only")
        service = VllmService(
            process,
            pipeline.engine,
            policy,
            seed=seed,
            device=pipeline.rollout.device,
            threads=pipeline.rollout.threads,
            in_pool=bool(config.pool.devices),
        )
        return environment, service, workload_of(pipeline, environment, policy, service.requests, kept), policy
    engine = engine_of(policy, seed, lambda: process.progress.moved("generating"), pipeline.engine)
    return environment, engine, workload_of(pipeline, environment, policy, engine, kept), policy


def _settings(process: RoleProcess) -> RunnerSettings:
    rollout = process.pipeline.rollout
    bounds = Bounds(
        batch_samples=rollout.batch_samples,
        queue_samples=rollout.queue_samples,
        queue_bytes=rollout.queue_mb << 20,
        concurrency=rollout.concurrency,
        preparations=max(rollout.preparations, rollout.preparation_processes),
    )
    return RunnerSettings(bounds=bounds, prefetch=rollout.prefetch, drain_s=process.config.run.grace_s / 2)
