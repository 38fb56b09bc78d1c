"""The parts of every rank of a trainer: the learner, with its part of the model, and its batch loader."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from penstock.batch.advantage import resolve
from penstock.batch.pack import PackSettings
from penstock.config.devices import devices_of
from penstock.engines.models import LanguagePolicy
from penstock.errors import ConfigError
from penstock.payload.io.fetch import BatchFetcher
from penstock.roles.environments import environment_of
from penstock.roles.models import micro_batch_tokens, objective_of
from penstock.roles.process import RoleProcess
from penstock.runtime.offload import Offload, offloads
from penstock.runtime.process import host_id
from penstock.runtime.ranks import file_store
from penstock.runtime.tensors import device_at
from penstock.train import checkpoint
from penstock.train.data import BatchLoader
from penstock.train.ranks import COLLECTIVE_S
from penstock.train.sharding import join_world, shard
from penstock.train.step import Learner
from penstock.train.world import ALONE, World


def device_of_rank(process: RoleProcess, rank: int) -> torch.device:
    """The training device of a rank."""
    pipeline, pooled = process.pipeline, bool(process.config.pool.devices)
    devices = devices_of(process.config).placements[pipeline.name].train
    device = device_at(pipeline.train.device, devices, in_pool=pooled, rank=rank)
    if device.type == "cuda" and len(devices) > torch.cuda.device_count():
        raise ConfigError(
            f"pipeline {pipeline.name!r} trains on {len(devices)} ranks, but this machine has "
            f"{torch.cuda.device_count()} GPUs: set train.ranks to at most that"
        )
    return device


def join(process: RoleProcess, rank: int, ranks: int, store: Path) -> World:
    """Joins the ranks of this trainer; waits for all of them."""
    if ranks == 1 and not process.pipeline.train.fsdp:
        return ALONE
    meeting = file_store(store, ranks) if ranks > 1 else dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    device = device_of_rank(process, rank)
    return join_world(meeting, rank=rank, ranks=ranks, device=device, timeout_s=COLLECTIVE_S)


def learner_of(process: RoleProcess, world: World, found: checkpoint.Checkpoint | None) -> Learner:
    """The learner in host memory, restored from a checkpoint if there is one."""
    config, pipeline = process.config, process.pipeline

    def sharded(policy: LanguagePolicy, trained: bool) -> LanguagePolicy:
        return shard(policy, world, device_of_rank(process, world.rank), masters=trained)

    learner = Learner(
        objective_of(config, pipeline, environment_of(config, pipeline), None if world.alone else sharded),
        pipeline.optimizer,
        steps=pipeline.steps,
        seed=config.run.seed,
        progressed=process.progress.moved,
        world=world,
        check_logprobs=pipeline.train.check_logprobs,
    )
    if found is not None:
        checkpoint.load(found, learner)
    return learner


def fetcher_of(process: RoleProcess) -> BatchFetcher:
    return BatchFetcher(
        host_id=host_id(),
        token=process.run.token(),
        label=process.name,
        directory=process.ring_directory,
        transport=process.config.payload.transport,
        wires=process.wires(),
        threads=offloads(),
    )


def loader_of(process: RoleProcess, learner: Learner, fetcher: BatchFetcher, fetching: Offload) -> BatchLoader:
    pipeline = process.pipeline
    settings = PackSettings(
        micro_batch_tokens=micro_batch_tokens(pipeline),
        micro_batches=pipeline.optimizer.minibatches,
        layout=learner.objective.packing,
    )
    return BatchLoader(
        fetcher,
        fetching,
        resolve(pipeline.train.advantage),
        settings,
        pipeline.train,
        max_new_tokens=pipeline.rollout.max_new_tokens,
    )
