"""The rollout worker process: an engine, the five hooks, a ring, and weights kept up to date. Wiring only."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from penstock.config.devices import memory_share, weights_stay_on_device
from penstock.engines.build import build_engine
from penstock.engines.models import ActorCriticPolicy, LanguagePolicy
from penstock.engines.protocol import Engine, Site
from penstock.engines.ranks import EngineRanks
from penstock.envs.protocol import prompts_per_pass
from penstock.payload.io.shm import Ring
from penstock.pool.io.executor import OrderExecutor
from penstock.records.payload import RingAddress
from penstock.roles.environments import environment_of, sample_bytes_of
from penstock.roles.evaluating import evaluating
from penstock.roles.models import policy_of
from penstock.roles.preparing import PromptsByCpuTime, PromptsInOtherProcess, make_rubric
from penstock.roles.process import RoleProcess
from penstock.roles.reporting import LEAVE_S, connected, report_gauges, watch_for_stop
from penstock.rollout.io.generation import Generation, GenerationLoop
from penstock.rollout.io.hook_calls import Evaluating
from penstock.rollout.io.ranks import RankGroup
from penstock.rollout.io.runner import Runner, RunnerSettings
from penstock.rollout.io.worker_client import RingStore, WorkerClient, watch_ring
from penstock.rollout.io.workloads import close_workload, workload_of
from penstock.rollout.prefetch import Bounds
from penstock.runtime.offload import background
from penstock.runtime.seeds import next_seed
from penstock.runtime.tasks import Tasks
from penstock.runtime.tensors import device_at, device_of, gpu_count
from penstock.weights.io.transports import transport_of

log = logging.getLogger(__name__)

SWITCH_S = 0.0005
"""How long a thread may hold the GIL while another waits. The engine's thread needs the GIL after every decode step:
with Python's default it would wait 5 ms each time that prompts, rewards or payloads are being processed."""

Parts = tuple[Any, Any, Any, LanguagePolicy | ActorCriticPolicy]
"""Environment, engine, hooks and policy."""
Make = Callable[[RoleProcess], Parts]
Evaluate = Callable[[RoleProcess, Any, Any], AbstractContextManager[Evaluating | None]]


async def main(process: RoleProcess, make: Make | None = None, evaluate: Evaluate = evaluating) -> None:
    """Generates until the prompts are exhausted or training is complete, or until a stop is requested."""
    pipeline = process.pipeline
    rollout = pipeline.rollout
    torch.set_num_threads(rollout.threads)
    sys.setswitchinterval(SWITCH_S)
    async with EngineRanks(process, pipeline.engine.processes).started() as engine_ranks:
        await _work(process, engine_ranks, make or partial(build, engine_ranks=engine_ranks), evaluate)


async def _work(process: RoleProcess, engine_ranks: EngineRanks, make: Make, evaluate: Evaluate) -> None:
    pipeline = process.pipeline
    rollout = pipeline.rollout
    ranks = RankGroup(process, rollout.ranks)
    await ranks.start()
    building = background(1, "build")
    process.progress.moved("building the model")
    made = building.submit(make, process)
    if engine_ranks.count > 1:
        await engine_ranks.unless_lost(made)
    environment, engine, workload, policy = await process.started(made)
    building.close(timeout_s=1.0)
    ring = Ring.create(
        process.run.run_id,
        capacity_bytes=pipeline.ring_bytes(sample_bytes_of(pipeline, environment)),
        slots=pipeline.ring_slots,
        directory=process.ring_directory,
        random=process.random,
    )
    try:
        with (
            process.served(ring) as address,
            evaluate(process, engine, policy) as evaluation,
        ):
            try:
                async with ranks.joined():
                    await _generate(
                        process, environment, engine, workload, ring, address, ranks, engine_ranks, evaluation
                    )
            finally:
                await engine.close()
    finally:
        close_workload(workload)
        # A dead worker's ring is still read by the trainer; the supervisor removes it at the end of the run.
        ring.close(unlink=False)


async def _generate(
    process: RoleProcess,
    environment: Any,
    engine: Engine,
    workload: Any,
    ring: Ring,
    address: RingAddress,
    ranks: RankGroup,
    engine_ranks: EngineRanks,
    evaluation: Evaluating | None,
) -> None:
    pipeline = process.pipeline
    lag = process.lag_monitor()
    settings = _settings(process, environment)
    details = {"ring": address, "more_rings": ranks.rings, "prompt_count": prompts_per_pass(environment)}

    async with (
        connected(process, "rollout", lambda: engine.vacate(LEAVE_S / 2), **details) as client,
        Tasks() as tasks,
    ):
        controller = WorkerClient(process, client, tasks, engine, ring, call=settings.bounds.batch_samples)
        moved = process.progress.moved

        group = ranks.lead(tasks, workload, engine, ring, controller, settings) if ranks.others else None

        def make_runner() -> GenerationLoop:
            if group is not None:
                return group
            return Runner(
                workload,
                controller,
                RingStore(ring, moved),
                settings,
                progressed=moved,
                interrupt=engine.interrupt,
                evaluating=evaluation,
                engine_figures=engine.statistics,
            )

        generation = Generation(engine, controller, make_runner, tasks, moved, ranks.set_devices)
        engine.start(tasks)
        engine_ranks.watch(tasks)
        updater = engine.updater(
            ranks.announcing(generation),
            controller.report,
            lambda: transport_of(
                process,
                pipeline.weights,
                process.config.payload.transport,
                device_of(pipeline.rollout.device),
                on_device=engine.capabilities.weights == "memory"
                and weights_stay_on_device(process.config, pipeline, gpu_count()),
            ),
            way=pipeline.weights.way,
            deadline_s=pipeline.weights.deadline_s,
        )

        def figures() -> dict[str, float]:
            return generation.statistics() | updater.figures() | engine.statistics()

        generation.updating = lambda: updater.updating
        generation.may_serve = lambda: updater.may_serve
        executor = OrderExecutor(generation, client.call, client.pipeline, client.member)
        tasks.spawn("watch the loop", lag.run())
        tasks.spawn("watch the ring", watch_ring(ring))
        tasks.spawn("update weights", updater.run())
        tasks.spawn("execute orders of the pool", executor.run())
        tasks.spawn("report gauges", report_gauges(process, client, lag, figures))
        tasks.spawn("watch for a stop", watch_for_stop(process, client, generation.stop))
        await generation.over()
        tasks.cancel()


def build(process: RoleProcess, rank: int = 0, engine_ranks: EngineRanks | None = None) -> Parts:
    """Environment, engine, hooks and policy, in host memory: the pool grants the devices."""
    config, pipeline = process.config, process.pipeline
    rollout, in_pool = pipeline.rollout, bool(config.pool.devices)
    environment = environment_of(config, pipeline)
    if processes := rollout.preparation_processes:
        environment = PromptsInOtherProcess(environment, process.run.config_path, pipeline.name, processes)
    elif processes is None and pipeline.kind == "language":
        here = environment
        environment = PromptsByCpuTime(
            here, lambda: PromptsInOtherProcess(here, process.run.config_path, pipeline.name, processes=1)
        )
    policy = policy_of(config, pipeline, environment)
    site = Site(
        process=process,
        seed=next_seed(process.run.root / "starts", f"{process.name}.{rank}", config.run.seed),
        device=rollout.device,
        threads=rollout.threads,
        in_pool=in_pool,
        device_at=partial(device_at, rollout.device, in_pool=in_pool, rank=rank),
        ranks=engine_ranks if engine_ranks is not None and engine_ranks.count > 1 else None,
        memory_share=memory_share(config, pipeline, gpu_count()),
    )
    engine: Any = build_engine(pipeline.engine, policy, site)
    workload = workload_of(
        pipeline.env,
        rollout,
        environment,
        policy,
        engine,
        process.run.rollouts(pipeline.name) / "unfinished",
        rubric_elsewhere=(make_rubric, (process.run.config_path, pipeline.name)),
        progressed=process.progress.moved,
    )
    return environment, engine, workload, policy


def _settings(process: RoleProcess, environment: Any) -> RunnerSettings:
    rollout = process.pipeline.rollout
    bounds = Bounds(
        batch_samples=rollout.batch_samples,
        queue_samples=rollout.waiting_samples,
        queue_bytes=rollout.queue_mb << 20,
        scoring_samples=process.pipeline.env.reward_concurrency * rollout.group_size,
        concurrency=rollout.concurrency,
        preparations=max(rollout.preparations, rollout.preparation_processes or 0),
    )
    if hasattr(environment, "play") and rollout.ranks == 1:  # episodes of agents take seconds or minutes
        bounds = bounds.in_calls_of(rollout.group_size)
    return RunnerSettings(bounds=bounds, prefetch=rollout.prefetch, drain_s=process.config.run.grace_s / 2)
