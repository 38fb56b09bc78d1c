"""Which devices each pipeline may use. Without a pool every process has devices of its own, as far as there are any."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import cycle, islice

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
        workers = one.rollout.workers * one.worker_devices
        ranks = one.train_ranks
        train, rollout = tuple(range(count, count + ranks)), tuple(range(count + ranks, count + ranks + workers))
        placements[one.name] = Placement(train, rollout, train_is_shared=False)
        count += ranks + workers
    return Devices(count, placements)


SHARE_BESIDE_TRAINER = 0.4
"""Of a GPU's memory, for all engines on a trainer's own: gradients, optimiser and activations need more."""
SHARE_OF_ENGINES = 0.9
"""For several engines on a GPU without a trainer."""


def trains_on(config: Config, pipeline: PipelineSection, gpus: int) -> tuple[int | str, ...]:
    """The GPU of each rank, by its number among those of the machine; another device by its name."""
    return _dealt(config, gpus)[pipeline.name][0]


def generates_on(
    config: Config, pipeline: PipelineSection, gpus: int, worker: int | None = None
) -> tuple[int | str, ...]:
    """Of all workers or of one, in the same way. In a pool it is the controller that says so, while the run goes on."""
    found = _dealt(config, gpus)[pipeline.name][1]
    return found if worker is None else found[worker * pipeline.worker_devices :][: pipeline.worker_devices]


def _dealt(config: Config, gpus: int) -> dict[str, tuple[tuple[int | str, ...], tuple[int | str, ...]]]:
    """For each pipeline what its ranks and its workers have: the GPU that the configuration names for them, else one
    after the other, of which those that it names for someone come last."""
    names = [name for one in config.pipeline for name in (one.train.device, one.rollout.device)]
    turn = cycle(sorted(range(max(gpus, 1)), key=lambda gpu: f"cuda:{gpu}" in names))

    def deal(name: str, devices: int) -> tuple[int | str, ...]:
        kind, _, number = name.partition(":")
        if kind not in ("auto", "cuda"):
            return (name,) * devices
        return (int(number),) * devices if number else tuple(islice(turn, devices))

    return {
        one.name: (
            deal(one.train.device, one.train_ranks),
            deal(one.rollout.device, one.rollout.workers * one.worker_devices),
        )
        for one in config.pipeline
    }


def memory_share(config: Config, pipeline: PipelineSection, gpus: int) -> float:
    """Of a GPU's memory, for each worker's engine: all of it, unless others of this run have the same GPU at the same
    time. A pool gives it to one after the other, and Ray to one alone."""
    if config.pool.devices or config.launch.kind != "local":
        return 1.0
    trainers = {gpu for one in config.pipeline for gpu in trains_on(config, one, gpus)}
    engines = Counter(gpu for one in config.pipeline for gpu in generates_on(config, one, gpus))

    def share(gpu: int | str) -> float:
        if gpu in trainers:
            return SHARE_BESIDE_TRAINER / engines[gpu]
        return SHARE_OF_ENGINES / engines[gpu] if engines[gpu] > 1 else 1.0

    return min(share(gpu) for gpu in generates_on(config, pipeline, gpus))


def weights_stay_on_device(config: Config, pipeline: PipelineSection, gpus: int) -> bool:
    """Whether versions lie in the trainer's device memory: where an engine is on its only GPU. The devices of a pool
    are given back empty, and those of Ray are of one process alone."""
    if config.pool.devices or config.launch.kind != "local" or pipeline.train_ranks > 1:
        return False
    trainer = trains_on(config, pipeline, gpus)[0]
    may = pipeline.weights.transport == "auto" and pipeline.engine.capabilities.device_weights
    return may and trainer in generates_on(config, pipeline, gpus)
