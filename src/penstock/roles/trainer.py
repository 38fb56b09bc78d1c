"""The trainer process: fetch, step, acknowledge, publish, checkpoint. Wiring only."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial

import torch

from penstock.config.devices import devices_of, weights_stay_on_device
from penstock.records.ids import StepIndex
from penstock.roles.learning import device_of_rank, fetcher_of, join, learner_of, loader_of
from penstock.roles.process import RoleProcess
from penstock.roles.reporting import connected, report_gauges, watch_for_stop
from penstock.runtime.offload import Offload, background
from penstock.runtime.tasks import Tasks
from penstock.runtime.tensors import gpu_count
from penstock.train import checkpoint
from penstock.train.data import BatchLoader, DataLoader
from penstock.train.emergencies import save_on_request
from penstock.train.loop import TrainingLoop
from penstock.train.publish import Publishing
from penstock.train.ranks import TrainerRanks
from penstock.train.rollout_log import RolloutLog
from penstock.train.step import Learner
from penstock.train.turns import MovableLearner, Turns
from penstock.train.weight_publisher import WeightPublisher, weight_publisher

log = logging.getLogger(__name__)


async def main(process: RoleProcess, make: Callable[[RoleProcess], Learner] | None = None) -> None:
    """Trains until the controller reports that training is complete, or until a stop is requested."""
    pipeline = process.pipeline
    torch.set_num_threads(pipeline.train.threads)
    training, writing = background(1, "train"), background(1, "write")
    fetching = background(1 + len(os.sched_getaffinity(0)), "fetch")
    ranks = TrainerRanks(process, training, pipeline.train_ranks)
    process.progress.moved("looking for a checkpoint")
    found = await process.started(training.submit(checkpoint.latest, process.run.checkpoints(pipeline.name)))
    try:
        async with ranks.started("" if found is None else str(found.directory)):
            process.progress.moved("building the model")
            build = partial(make, process) if make is not None else partial(_build, process, ranks, found)
            learner = await process.started(training.submit(build))
            step = StepIndex(learner.steps)
            lineage = process.random.randbytes(6).hex()
            log.info("training %s from step %d, lineage %s, ranks %d", pipeline.name, step, lineage, ranks.count)
            rollouts = _rollout_log(process, learner)
            fetcher = fetcher_of(process)
            try:
                on_device = weights_stay_on_device(process.config, pipeline, gpu_count())
                placement = {"workers": pipeline.rollout.workers, "on_device": on_device}
                with weight_publisher(
                    process, lineage, pipeline.weights, process.config.payload, **placement
                ) as publisher:
                    loader = loader_of(process, learner, fetcher, fetching)
                    await _train(process, learner, lineage, publisher, ranks, writing, loader, rollouts)
            finally:
                fetcher.close()
                rollouts.close(timeout_s=2.0)
    finally:
        for offload in (training, fetching, writing):
            offload.close(timeout_s=2.0)


async def _train(
    process: RoleProcess,
    learner: Learner,
    lineage: str,
    publisher: WeightPublisher,
    ranks: TrainerRanks,
    writing: Offload,
    loader: BatchLoader,
    rollouts: RolloutLog,
) -> None:
    pipeline, step = process.pipeline, StepIndex(learner.steps)
    lag = process.lag_monitor()
    placement = devices_of(process.config).placements[pipeline.name]
    resident = MovableLearner(learner, device_of_rank(process, 0), ranks, shared=placement.train_is_shared)
    connection = connected(process, "trainer", resident.move_out, step=step, lineage=lineage)
    async with connection as client, Tasks() as tasks:
        publishing = Publishing(process, client, publisher, writing, ranks)
        data = DataLoader(process, client, loader, ranks)
        tasks.spawn("watch the loop", lag.run())
        tasks.spawn("publish weights", publishing.run())
        tasks.spawn("watch for a stop", watch_for_stop(process, client))
        tasks.spawn("report gauges", report_gauges(process, client, lag))
        turns = Turns(process, client, placement, resident)
        loop = TrainingLoop(
            process,
            client,
            learner,
            data,
            publishing,
            turns,
            ranks,
            rollouts,
            pipeline.checkpoint,
            publish_timeout_s=pipeline.weights.deadline_s,
        )
        tasks.spawn("save on request", save_on_request(process, client, loop.save_emergency))
        await loop.run(step)
        async with asyncio.timeout(pipeline.weights.deadline_s):
            await publishing.flush()
        tasks.cancel()


def _build(process: RoleProcess, ranks: TrainerRanks, found: checkpoint.Checkpoint | None) -> Learner:
    """Rank 0's part of the learner."""
    world = join(process, 0, ranks.count, ranks.store)
    ranks.joined()
    return learner_of(process, world, found)


def _rollout_log(process: RoleProcess, learner: Learner) -> RolloutLog:
    """Samples that people can read; tokens become text if the policy has a tokenizer."""
    samples = process.pipeline.samples
    tokenizer = getattr(learner.policy, "tokenizer", None)
    return RolloutLog(
        process.run.rollouts(process.pipeline.name) / "samples.jsonl",
        decode=tokenizer.decode if tokenizer is not None else None,
        every_steps=max(1, samples.save_every_steps),
        samples_per_step=samples.save_count if samples.save_every_steps else 0,
    )
