"""Which devices each pipeline may use. Without a pool of its own every process gets a device for itself."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.run import Config


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of one pipeline."""

    train: tuple[int, ...]
    rollout: tuple[int, ...]
    train_is_shared: bool
    """Somebody else may want the training devices: hold them only while training."""


@dataclass(frozen=True, slots=True)
class Devices:
    count: int
    placements: dict[str, Placement]


def devices_of(config: Config) -> Devices:
    """The whole picture. A pipeline that names no devices may use all of the pool for generation, and one to train."""
    if config.pool.devices == 0:
        return _one_each(config)
    everything = tuple(range(config.pool.devices))
    train = {one.name: tuple(one.train_devices) or everything[:1] for one in config.pipeline}
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
        train, rollout = (count,), tuple(range(count + 1, count + 1 + workers))
        placements[one.name] = Placement(train, rollout, train_is_shared=False)
        count += 1 + workers
    return Devices(count, placements)
