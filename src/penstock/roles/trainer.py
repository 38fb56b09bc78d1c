"""The trainer process: fetch, step, acknowledge, publish, checkpoint. Wiring only."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

import torch

from penstock.batch.advantage import resolve
from penstock.batch.pack import PackSettings
from penstock.config.devices import devices_of, weights_stay_on_device
from penstock.payload.io.fetch import BatchFetcher
from penstock.records.ids import StepIndex
from penstock.roles.environments import environment_of
from penstock.roles.models import objective_of
from penstock.roles.process import RoleProcess
from penstock.roles.reporting import connected, heed_stop, report_gauges
from penstock.runtime.offload import Offload, background
from penstock.runtime.process import host_id
from penstock.runtime.tasks import Tasks
from penstock.runtime.tensors import device_at
from penstock.train import checkpoint
from penstock.train.data import Feed
from penstock.train.emergencies import heed_checkpoints
from penstock.train.loop import TrainingLoop
from penstock.train.offering import Offering, offering
from penstock.train.publish import Publishing
from penstock.train.rollout_log import RolloutLog
from penstock.train.step import Learner
from penstock.train.turns import LearnerOnTurns, Turns

log = logging.getLogger(__name__)


async def main(process: RoleProcess, make: Callable[[RoleProcess], Learner] | None = None) -> None:
    """Trains until the controller says that training is complete, or until asked to stop."""
    pipeline = process.pipeline
    torch.set_num_threads(pipeline.train.threads)
    training, writing = background(1, "train"), background(1, "write")
    fetching = background(1 + len(os.sched_getaffinity(0)), "fetch")
    process.progress.moved("building the model")
    learner = await process.started(training.submit(make or _build, process))
    step = StepIndex(learner.steps)
    lineage = process.random.randbytes(6).hex()
    log.info("training %s from step %d, lineage %s", pipeline.name, step, lineage)
    rollouts = _rollout_log(process, learner)
    fetcher = BatchFetcher(
        host_id=host_id(),
        token=process.run.token(),
        label=process.name,
        directory=process.ring_directory,
        transport=process.config.payload.transport,
    )
    try:
        placement = {"workers": pipeline.rollout.workers, "on_device": weights_stay_on_device(process.config, pipeline)}
        with offering(process, lineage, pipeline.weights, process.config.payload, **placement) as offered:
            await _train(process, learner, lineage, offered, (training, fetching, writing), fetcher, rollouts)
    finally:
        fetcher.close()
        rollouts.close(timeout_s=2.0)
        for offload in (training, fetching, writing):
            offload.close(timeout_s=2.0)


async def _train(
    process: RoleProcess,
    learner: Learner,
    lineage: str,
    offered: Offering,
    offloads: tuple[Offload, Offload, Offload],
    fetcher: BatchFetcher,
    rollouts: RolloutLog,
) -> None:
    pipeline, step = process.pipeline, StepIndex(learner.steps)
    training, fetching, writing = offloads
    lag = process.lag_monitor()
    placement = devices_of(process.config).placements[pipeline.name]
    device = device_at(pipeline.train.device, placement.train, in_pool=bool(process.config.pool.devices))
    resident = LearnerOnTurns(learner, device, training, shared=placement.train_is_shared)
    connection = connected(process, "trainer", resident.move_out, step=step, lineage=lineage)
    async with connection as client, Tasks() as tasks:
        publishing = Publishing(process, client, offered, writing)
        settings = PackSettings(
            micro_batch_tokens=pipeline.train.tokens_per_micro_batch,
            micro_batches=pipeline.optimizer.minibatches,
            layout=learner.objective.packing,
        )
        feed = Feed(
            process,
            client,
            fetcher,
            fetching,
            resolve(pipeline.train.advantage),
            settings,
            pipeline.train,
            max_new_tokens=pipeline.rollout.max_new_tokens,
        )
        tasks.spawn("watch the loop", lag.run())
        tasks.spawn("publish weights", publishing.run())
        tasks.spawn("heed the stop", heed_stop(process, client))
        tasks.spawn("report gauges", report_gauges(process, client, lag))
        turns = Turns(process, client, placement, resident)
        loop = TrainingLoop(
            process,
            client,
            learner,
            feed,
            publishing,
            turns,
            training,
            rollouts,
            pipeline.checkpoint,
            publish_timeout_s=pipeline.weights.deadline_s,
        )
        tasks.spawn("save when asked to", heed_checkpoints(process, client, loop.save_afresh))
        await loop.run(step)
        async with asyncio.timeout(pipeline.weights.deadline_s):
            await publishing.flush()
        tasks.cancel()


def _build(process: RoleProcess) -> Learner:
    """The learner in host memory, restored from the latest good checkpoint if there is one."""
    config, pipeline = process.config, process.pipeline
    learner = Learner(
        objective_of(config, pipeline, environment_of(config, pipeline)),
        pipeline.optimizer,
        steps=pipeline.steps,
        seed=config.run.seed,
        progressed=process.progress.moved,
    )
    found = checkpoint.latest(process.run.checkpoints(pipeline.name))
    if found is not None:
        checkpoint.load(found, learner)
    return learner


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
