"""Executes the orders of rank 0, on another rank of a trainer."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from penstock.records.ids import StepIndex, Version
from penstock.runtime.offload import Offload
from penstock.runtime.tasks import Tasks
from penstock.runtime.tensors import device_bytes
from penstock.train import checkpoint
from penstock.train.data import BatchLoader, FetchedShare, PreparedBatch
from penstock.train.objectives import PriorLogprobs
from penstock.train.rank_calls import (
    Answer,
    Consume,
    Done,
    End,
    Fetch,
    Fetched,
    Frames,
    MovedOut,
    MoveIn,
    MoveOut,
    NumberedAnswer,
    NumberedOrder,
    Order,
    Pack,
    Save,
    Score,
    Snapshot,
    Train,
    WriteParts,
)
from penstock.train.step import Learner
from penstock.weights.io.files import write_version_parts


class Follower:
    """Executes orders in sequence and answers each when it is done.

    Consumes: orders. Produces: its part of steps, versions and checkpoints. Waits for: rank 0. Unblocked by: an order,
    the end of the stream.
    """

    def __init__(
        self,
        learner: Learner,
        device: torch.device,
        loader: BatchLoader,
        training: Offload,
        writing: Offload,
        frames: Frames,
    ) -> None:
        self._learner = learner
        self._device = device
        self._loader = loader
        self._training = training
        self._writing = writing
        self._frames = frames
        self._shares: dict[StepIndex, FetchedShare] = {}
        """Fetched and not packed."""
        self._batches: dict[StepIndex, PreparedBatch] = {}
        self._scores: dict[StepIndex, list[PriorLogprobs]] = {}
        self._snapshots: dict[Version, Future[dict[str, Tensor]]] = {}

    async def run(self) -> None:
        """Runs until rank 0 sends `End`."""
        async with Tasks() as tasks:
            while True:
                numbered = cast("NumberedOrder", await self._frames.receive(NumberedOrder))
                if isinstance(numbered.order, End):
                    break
                tasks.spawn(type(numbered.order).__name__, self._answer(numbered.number, numbered.order))

    async def _answer(self, number: int, order: Order) -> None:
        # Tasks start in the order of their creation, and each queues its work before it waits for anything.
        self._frames.send(NumberedAnswer(number, await self._done(order)))

    async def _done(self, order: Order) -> Answer:
        learner, training = self._learner, self._training
        match order:
            case Fetch(batch=batch, rings=rings):
                share = await self._loader.fetch(batch, rings)
                self._shares[batch.step] = share
                return Fetched(share.prompts, share.missing_prompts, share.missing_reason, share.facts)
            case Pack(step=step, advantages=advantages):
                packed = await self._loader.pack(self._shares.pop(step), np.array(advantages, np.float32))
                self._batches[step] = packed
            case Score(step=step):
                self._scores[step] = await training.run(learner.score, self._batches[step].micro_batches)
            case Train(step=step):
                await training.run(self._step, step)
            case Consume(step=step):
                self._batches.pop(step).done()
            case Snapshot(version=version, writing=writing):
                taken = training.submit(learner.policy.snapshot)
                kept = {one: tensors for one, tensors in self._snapshots.items() if one == writing}
                self._snapshots = kept | {version: taken}
            case WriteParts(version=version, directory=directory):
                tensors = await asyncio.wrap_future(self._snapshots[version])
                await self._writing.run(self._write, Path(directory), tensors)
            case Save(directory=directory):
                await training.run(checkpoint.save_part, Path(directory), learner, learner.world)
            case MoveIn(parts=parts):
                await training.run(learner.onload, self._device, parts)
            case MoveOut():
                await training.run(learner.offload)
                return MovedOut(device_bytes())
            case End():
                pass
        return Done()

    def _step(self, step: StepIndex) -> None:
        batch = self._batches[step]
        scores = self._scores.pop(step, [PriorLogprobs()] * len(batch.micro_batches))
        self._learner.step(batch.micro_batches, scores, batch.drawn_now)

    def _write(self, directory: Path, tensors: dict[str, Tensor]) -> None:
        write_version_parts(directory, tensors, rank=self._learner.world.rank)
