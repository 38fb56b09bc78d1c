"""A rank of a worker's engine: holds a shard of the model and executes the orders of rank 0, which is the worker."""

from __future__ import annotations

import sys

import msgspec
import torch

from penstock.engines.ranks import EngineRankAssignment
from penstock.engines.torch.build import follow
from penstock.roles.environments import environment_of
from penstock.roles.models import policy_of
from penstock.roles.process import RoleProcess
from penstock.runtime.offload import Offload
from penstock.runtime.progress import ProgressCell


async def main(process: RoleProcess) -> None:
    """Runs until the worker's engine closes. The worker handles signals; this process dies with it."""
    seat = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineRankAssignment)
    process.progress = ProgressCell(seat.cell_fd)
    torch.set_num_threads(process.pipeline.rollout.threads)
    working = Offload(1, "shard")
    await working.run(_work, process, seat)


def _work(process: RoleProcess, seat: EngineRankAssignment) -> None:
    config, pipeline = process.config, process.pipeline
    process.progress.moved("building the model")
    policy = policy_of(config, pipeline, environment_of(config, pipeline))
    follow(pipeline.engine, policy, seat, pipeline.rollout.device, process.index)
