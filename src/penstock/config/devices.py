"""Which devices each pipeline may use. Without a pool of its own every process gets a device for itself."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.pipeline import PipelineSection
from penstock.config.run import Config
from penstock.records.pool import Placement


@dataclass(frozen=True, slots=True)
class Devices:
    count: int
    placements: dict[str, Placement]


def devices_of(config: Config) -> Devices:
    """The whole picture. A pipeline that names no devices may use all of the pool for generation, and one to train."""
    if config.pool.devices == 0:
        return _one_each(config)
    everything = tuple(range(config.pool.devices))
    train = {one.name: tuple(one.train_devices) or everything[: one.train_ranks] for one in config.pipeline}
    rollout = {one.name: tuple(one.rollout_devices) or everything for one in config.pipeline}
    placements = {}
    for one in config.pipeline:
        others = {device for devices in rollout.values() for device in devices}
        others |= {device for name, devices in train.items() if name != one.name for device in devices}
        placements[one.name] = Placement(train[one.name], rollout[one.name], bool(others & set(train[one.name])))
    return Devices(config.pool.devices, placements)


def _one_each(config: Config) -> Devices:
    placements: dict[str, Placement] = {}
    count = 0
    for one in config.pipeline:
        workers = one.rollout.workers * one.rollout.devices_per_worker
        ranks = one.train_ranks
        train, rollout = tuple(range(count, count + ranks)), tuple(range(count + ranks, count + ranks + workers))
        placements[one.name] = Placement(train, rollout, train_is_shared=False)
        count += ranks + workers
    return Devices(count, placements)


def weights_stay_on_device(config: Config, pipeline: PipelineSection) -> bool:
    """Whether versions may lie in the trainer's device memory. The devices of a pool are given back empty, and with
    several ranks no device holds a whole version."""
    whole = pipeline.train_ranks == 1 and pipeline.engine.capabilities.device_weights
    return pipeline.weights.transport == "auto" and not config.pool.devices and whole
