"""The training loop: steps, scheduled checkpoints, and emergency checkpoints that the controller requests."""

from __future__ import annotations

import asyncio
import logging

from penstock.control.io.client import ControlClient
from penstock.errors import PeerLost, Stale
from penstock.records.ids import StepIndex, Version
from penstock.records.pool import Priority
from penstock.runtime.clock import monotonic
from penstock.runtime.member import RunMember
from penstock.runtime.tensors import device_figures
from penstock.train import checkpoint
from penstock.train.best import keep_best
from penstock.train.data import DataLoader, PreparedBatch
from penstock.train.objectives import PriorLogprobs
from penstock.train.publish import Publishing
from penstock.train.rank_calls import Consume, Save, Score, Train
from penstock.train.ranks import TrainerRanks
from penstock.train.rollout_log import RolloutLog
from penstock.train.settings import CheckpointSection
from penstock.train.step import Learner
from penstock.train.turns import Turns
from penstock.wire.messages import AckCheckpoint, AckStep, FlushJournal

log = logging.getLogger(__name__)


class TrainingLoop:
    """Trains the steps in order.

    Consumes: prepared batches. Produces: acknowledgements, weights, checkpoints. Waits for: the data.
    Unblocked by: a batch, completion, shutdown.
    """

    def __init__(
        self,
        process: RunMember,
        client: ControlClient,
        learner: Learner,
        data: DataLoader,
        publishing: Publishing,
        turns: Turns,
        ranks: TrainerRanks,
        rollouts: RolloutLog,
        checkpoints: CheckpointSection,
        publish_timeout_s: float,
    ) -> None:
        self._process = process
        self._client = client
        self._learner = learner
        self._data = data
        self._publishing = publishing
        self._turns = turns
        self._ranks = ranks
        self._rollouts = rollouts
        self._checkpoints = checkpoints
        self._publish_timeout_s = publish_timeout_s
        self._directory = process.run.checkpoints(process.pipeline_name)
        self._saved_step = StepIndex(learner.steps)
        self._last_ended = monotonic()
        self._waited_s = 0.0
        """For the last batch, after the step before it had ended."""
        self._between_steps = asyncio.Lock()
        """Held while the learner and the controller's record of it differ."""

    async def run(self, step: StepIndex) -> None:
        every = self._checkpoints.every_steps
        async with asyncio.TaskGroup() as group:
            upcoming = group.create_task(self._data.prepare(step))
            if await self._start(upcoming):
                while (batch := await self._await(upcoming, step)) is not None:
                    if self._process.stop.requested:  # its prompts are issued again
                        break
                    upcoming = group.create_task(self._data.prepare(StepIndex(step + 1)))
                    if not await self._train(batch):
                        break
                    step = StepIndex(step + 1)
                    if step % every == 0:
                        async with self._between_steps:
                            await self._save(step)
        async with self._between_steps:
            if step > self._saved_step or step == 0:
                await self._save(step)

    async def _await(self, upcoming: asyncio.Task[PreparedBatch | None], step: StepIndex) -> PreparedBatch | None:
        if not upcoming.done():
            self._process.progress.moved(f"waiting for the batch of step {step}")
        began = monotonic()
        self._data.awaited = True
        try:
            return await upcoming
        finally:
            self._data.awaited = False
            self._waited_s = monotonic() - began

    async def _start(self, first_batch: asyncio.Task[PreparedBatch | None]) -> bool:
        """Moves to the devices for the first time and publishes the initial weights; False if stopped before.

        If a batch is ready, after a restart, the devices are kept until training requests them.
        """
        try:
            if not await self._turns.take(Priority.INITIALISATION):
                return False
        except Stale as error:
            log.info("training is complete, so the learner stays in host memory: %s", error)
        async with self._between_steps:
            self._process.progress.moved("publishing the first weights")
            await self._publishing.publish(Version(self._learner.steps), self._learner.policy.named_tensors())
        if not first_batch.done():
            await self._turns.release()
        return True

    async def save_emergency(self) -> None:
        """Saves an emergency checkpoint and publishes the weights again, which replaces damaged files."""
        async with self._between_steps:
            step = StepIndex(self._learner.steps)
            await self._publishing.flush()
            await self._publishing.publish(Version(step), self._learner.policy.named_tensors(), durable=True)
            await self._save(step)

    async def _train(self, batch: PreparedBatch) -> bool:
        """One step, with the device turns it needs; False if stopped before it began."""
        began, waited_before_s = monotonic(), self._turns.waited_s
        scores = [PriorLogprobs()] * len(batch.micro_batches)
        if self._learner.scored_by:
            if not await self._turns.take(Priority.SCORING):
                return False
            self._process.progress.moved(f"scoring step {batch.step}")
            scores, _ = await self._ranks.together(Score(batch.step), self._learner.score, batch.micro_batches)
        if not await self._turns.take(Priority.TRAINING):
            return False
        turn_s = self._turns.waited_s - waited_before_s
        async with self._between_steps:
            self._process.progress.moved(f"training step {batch.step}")
            work = (self._learner.step, batch.micro_batches, scores, batch.drawn_now)
            metrics, _ = await self._ranks.together(Train(batch.step), *work)
            step_s = monotonic() - began - turn_s
            await self._turns.release()  # before publishing: the published weights are in host memory then
            metrics |= {"wait_s": self._waited_s, "batch_s": batch.answered_s, "fetch_s": batch.prepared_s}
            metrics |= {"step_s": step_s, "turn_s": turn_s, "publish_s": self._publishing.last_s}
            metrics |= batch.figures | device_figures()
            ended = monotonic()
            metrics["tokens_per_s"] = batch.figures.get("tokens", 0.0) / max(1e-9, ended - self._last_ended)
            self._last_ended = ended
            await self._complete(batch, metrics)
        return True

    async def _complete(self, batch: PreparedBatch, metrics: dict[str, float]) -> None:
        self._publishing.offer(Version(batch.step + 1), self._learner.policy.snapshot())
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
        if self._rollouts.writes(batch.step):
            self._rollouts.offer(batch.step, batch.trained())
        batch.done()
        self._ranks.send_all(Consume(batch.step))
        self._process.progress.moved(f"trained step {batch.step}")

    async def _save(self, step: StepIndex) -> None:
        self._process.progress.moved(f"saving the checkpoint of step {step}")
        await self._flush_journal(step)
        await self._ranks.together(Save(str(self._directory)), self._write_checkpoint)
        self._saved_step = step
        async with asyncio.timeout(self._publish_timeout_s):
            await self._publishing.make_durable(Version(step))
        saved = AckCheckpoint(
            pipeline=self._client.pipeline,
            member=self._process.member,
            step=step,
            last_resort=StepIndex(checkpoint.last_resort(self._directory, keep=self._checkpoints.keep)),
        )
        try:
            await self._client.call(saved)
        except PeerLost as error:
            if not self._process.stop.requested:
                raise
            log.info("the controller ended before the checkpoint of step %d was reported: %s", step, error)

    async def _flush_journal(self, step: StepIndex) -> None:
        """Flushes the controller's records of all steps before the checkpoint: a power failure loses none of them."""
        try:
            await self._client.call(FlushJournal(pipeline=self._client.pipeline, member=self._process.member))
        except PeerLost as error:
            if not self._process.stop.requested:
                raise
            log.info("the controller ended before the checkpoint of step %d: %s", step, error)

    def _write_checkpoint(self) -> None:
        if self._checkpoints.keep_best:  # before older ones are removed
            keep_best(self._directory, self._process.run.metrics_path, self._process.pipeline_name)
        checkpoint.save(self._directory, self._learner, keep=self._checkpoints.keep, world=self._learner.world)
