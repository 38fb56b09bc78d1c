"""A rank of a trainer, other than rank 0: its shards of the model, its share of every batch. Wiring only."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import msgspec
import torch

from penstock.errors import PenstockError
from penstock.roles.learning import device_of_rank, fetcher_of, join, learner_of, loader_of
from penstock.roles.process import RoleProcess
from penstock.runtime.offload import background
from penstock.runtime.progress import ProgressCell
from penstock.runtime.ranks import FailureNotes, file_store
from penstock.runtime.tasks import Tasks
from penstock.train import checkpoint
from penstock.train.follower import Follower
from penstock.train.rank_calls import Frames, TrainerRankAssignment


async def main(process: RoleProcess) -> None:
    """Executes the orders of rank 0 until it ends the group. Rank 0 handles signals; this process dies with it."""
    seat = msgspec.json.decode(sys.stdin.buffer.readline(), type=TrainerRankAssignment)
    process.progress = ProgressCell(seat.cell_fd)
    frames = await Frames.over(socket.socket(fileno=seat.channel_fd))
    pipeline = process.pipeline
    torch.set_num_threads(pipeline.train.threads)
    training, writing = background(1, "train"), background(1, "write")
    fetching = background(1 + len(os.sched_getaffinity(0)), "fetch")
    process.progress.moved("building the model")
    notes = FailureNotes(file_store(Path(seat.store), seat.ranks), rank=seat.rank, ranks=seat.ranks)
    fetcher = fetcher_of(process)
    try:
        world = await training.run(join, process, seat.rank, seat.ranks, Path(seat.store))
        found = checkpoint.read(Path(seat.checkpoint)) if seat.checkpoint else None
        learner = await training.run(learner_of, process, world, found)
        loader = loader_of(process, learner, fetcher, fetching)
        follower = Follower(learner, device_of_rank(process, seat.rank), loader, training, writing, frames)
        async with Tasks() as tasks:
            tasks.spawn("watch the loop", process.lag_monitor().run())
            await follower.run()
            tasks.cancel()
    except RuntimeError as error:
        blamed = notes.find_cause()
        if blamed is None:
            raise
        raise blamed from error
    except PenstockError as error:
        notes.report(error)
        raise
    finally:
        fetcher.close()
