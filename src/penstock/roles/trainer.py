"""The trainer process: fetch, step, acknowledge, publish, checkpoint. Wiring only."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time

import torch

from penstock.batch.advantage import resolve
from penstock.batch.pack import PackSettings
from penstock.config.devices import devices_of
from penstock.control.io.client import ControlClient
from penstock.errors import PeerLost
from penstock.payload.io.fetch import BatchFetcher
from penstock.records.ids import StepIndex, Version
from penstock.roles.emergencies import heed_checkpoints
from penstock.roles.feed import Feed, PreparedBatch
from penstock.roles.models import environment_of, loss_of, optimizer_of, policy_of
from penstock.roles.process import RoleProcess
from penstock.roles.publishing import Publishing
from penstock.roles.reporting import connected, heed_stop, report_gauges
from penstock.roles.turns import TrainingTurns
from penstock.runtime.lag import LagMonitor
from penstock.runtime.offload import Offload
from penstock.runtime.process import host_id
from penstock.runtime.tasks import Tasks
from penstock.train import checkpoint
from penstock.train.rollout_log import RolloutLog
from penstock.train.step import Learner
from penstock.weights.io.files import Publisher
from penstock.wire.messages import AckCheckpoint, AckStep

log = logging.getLogger(__name__)

FLUSH_S = 10.0


async def main(process: RoleProcess) -> None:
    """Trains until the controller says that training is complete, or until asked to stop."""
    pipeline = process.pipeline
    torch.set_num_threads(pipeline.train.threads)
    training, writing = Offload(1, "train"), Offload(1, "write")
    fetching = Offload(1 + len(os.sched_getaffinity(0)), "fetch")
    process.progress.moved("building the model")
    learner = await training.run(_build, process)
    step = StepIndex(learner.steps)
    lineage = secrets.token_hex(6)
    log.info("training %s from step %d, lineage %s", pipeline.name, step, lineage)
    rollouts = _rollout_log(process, learner)
    fetcher = BatchFetcher(
        host_id=host_id(), token=process.run.token(), label=process.name, carrier=process.config.payload.carrier
    )
    lag = LagMonitor(process.name)
    try:
        async with connected(process, "trainer", step=step, lineage=lineage) as client, Tasks() as tasks:
            publisher = Publisher(process.run.root, lineage, pipeline.weights.keep, pipeline=pipeline.name)
            publishing = Publishing(process, client, publisher, writing)
            await publishing.publish(Version(step), learner.policy.named_tensors())
            settings = PackSettings(micro_batch_tokens=pipeline.train.tokens_per_micro_batch)
            feed = Feed(process, client, fetcher, fetching, resolve(pipeline.train.advantage), settings)
            tasks.spawn("watch the loop", lag.run())
            tasks.spawn("publish weights", publishing.run())
            tasks.spawn("heed the stop", heed_stop(process, client))
            tasks.spawn("report gauges", report_gauges(process, client, lag))
            turns = TrainingTurns(process, client, devices_of(process.config).placements[pipeline.name])
            loop = TrainingLoop(process, client, learner, feed, publishing, turns, training, rollouts)
            tasks.spawn("save when asked to", heed_checkpoints(process, client, loop.save_afresh))
            await loop.run(step)
            await asyncio.wait_for(publishing.flush(), FLUSH_S)
            tasks.cancel()
    finally:
        fetcher.close()
        rollouts.close(timeout_s=2.0)
        for offload in (training, fetching, writing):
            offload.close(timeout_s=2.0)


def _build(process: RoleProcess) -> Learner:
    """The learner, restored from the latest good checkpoint if there is one."""
    config, pipeline = process.config, process.pipeline
    environment = environment_of(config, pipeline)
    policy = policy_of(config, pipeline, environment, pipeline.train.device)
    reference = None
    if pipeline.token_loss.kl_coefficient and pipeline.kind == "language":
        reference = policy_of(config, pipeline, environment, pipeline.train.device)
    learner = Learner(policy, loss_of(pipeline), optimizer_of(config, pipeline), reference=reference)  # type: ignore[arg-type]
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


class TrainingLoop:
    """One step after the other.

    Consumes: prepared batches. Produces: acknowledgements, weights, checkpoints. Waits for: the feed.
    Unblocked by: a batch, completion, shutdown.
    """

    def __init__(
        self,
        process: RoleProcess,
        client: ControlClient,
        learner: Learner,
        feed: Feed,
        publishing: Publishing,
        turns: TrainingTurns,
        training: Offload,
        rollouts: RolloutLog,
    ) -> None:
        self._process = process
        self._client = client
        self._learner = learner
        self._feed = feed
        self._publishing = publishing
        self._turns = turns
        self._training = training
        self._rollouts = rollouts
        self._saved_step = StepIndex(learner.steps)
        self._between_steps = asyncio.Lock()
        """Held while the learner and what the controller knows of it differ."""

    async def run(self, step: StepIndex) -> None:
        every = self._process.pipeline.checkpoint.every_steps
        async with asyncio.TaskGroup() as group:
            upcoming = group.create_task(self._feed.prepare(step))
            while (batch := await upcoming) is not None:
                upcoming = group.create_task(self._feed.prepare(StepIndex(step + 1)))
                if not await self._turns.take():
                    break
                async with self._between_steps:
                    await self._train(batch)
                await self._turns.give_back()
                step = StepIndex(step + 1)
                if step % every == 0:
                    async with self._between_steps:
                        await self._save(step)
        async with self._between_steps:
            if step > self._saved_step or step == 0:
                await self._save(step)

    async def save_afresh(self) -> None:
        """A checkpoint out of turn, and the weights published anew: whatever was wrong with their files is gone."""
        async with self._between_steps:
            step = StepIndex(self._learner.steps)
            await self._publishing.flush()
            await self._publishing.publish(Version(step), self._learner.policy.named_tensors(), durable=True)
            await self._save(step)

    async def _train(self, batch: PreparedBatch) -> None:
        began = time.monotonic()
        self._process.progress.moved(f"training step {batch.step}")
        metrics = await self._training.run(self._learner.step, batch.micro_batches)
        metrics |= {
            "step_s": time.monotonic() - began,
            "wait_s": batch.waited_s,
            "fetch_s": batch.prepared_s,
            "turn_s": self._turns.waited_s,
        }
        self._publishing.offer(Version(batch.step + 1), self._learner.policy.named_tensors())
        await self._client.call(
            AckStep(
                pipeline=self._client.pipeline,
                member=self._process.member,
                step=batch.step,
                metrics=metrics,
                missing_prompts=batch.missing_prompts,
                missing_reason=batch.missing_reason,
            )
        )
        if self._rollouts.wants(batch.step):
            self._rollouts.offer(batch.step, batch.trained())
        batch.done()
        self._process.progress.moved(f"trained step {batch.step}")

    async def _save(self, step: StepIndex) -> None:
        self._process.progress.moved(f"saving the checkpoint of step {step}")
        await self._training.run(self._write_checkpoint)
        self._saved_step = step
        async with asyncio.timeout(self._process.pipeline.weights.deadline_s):
            await self._publishing.make_durable(Version(step))
        section = self._process.pipeline.checkpoint
        directory = self._process.run.checkpoints(self._process.pipeline.name)
        saved = AckCheckpoint(
            pipeline=self._client.pipeline,
            member=self._process.member,
            step=step,
            last_resort=StepIndex(checkpoint.last_resort(directory, keep=section.keep)),
        )
        try:
            await self._client.call(saved)
        except PeerLost as error:
            if not self._process.stop.requested:
                raise
            log.info("the controller was gone before it heard of the checkpoint of step %d: %s", step, error)

    def _write_checkpoint(self) -> None:
        pipeline = self._process.pipeline
        directory = self._process.run.checkpoints(pipeline.name)
        checkpoint.save(directory, self._learner, keep=pipeline.checkpoint.keep)
