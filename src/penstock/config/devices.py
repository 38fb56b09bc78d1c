"""The devices of each pipeline. Without a pool every process has its own devices, while there are enough."""

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
    """Placements of all pipelines. One that names no devices generates on the whole pool and trains on its first."""
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
"""Share of a GPU's memory for all engines beside a trainer: gradients, optimiser and activations need more."""
SHARE_OF_ENGINES = 0.9
"""The same for several engines on a GPU without a trainer."""


def trains_on(config: Config, pipeline: PipelineSection, gpus: int) -> tuple[int | str, ...]:
    """The device of each rank: a GPU by its index on the machine, another device by its name."""
    return _assigned(config, gpus)[pipeline.name][0]


def generates_on(
    config: Config, pipeline: PipelineSection, gpus: int, worker: int | None = None
) -> tuple[int | str, ...]:
    """The devices of all workers or of one, as `trains_on`. In a pool the controller assigns them during the run."""
    found = _assigned(config, gpus)[pipeline.name][1]
    return found if worker is None else found[worker * pipeline.worker_devices :][: pipeline.worker_devices]


def _assigned(config: Config, gpus: int) -> dict[str, tuple[tuple[int | str, ...], tuple[int | str, ...]]]:
    """The devices of each pipeline's ranks and of its workers: the GPU that the configuration names for them, else GPUs
    in turn. GPUs that the configuration names for any process come last."""
    names = [name for one in config.pipeline for name in (one.train.device, one.rollout.device)]
    turn = cycle(sorted(range(max(gpus, 1)), key=lambda gpu: f"cuda:{gpu}" in names))

    def assign(name: str, devices: int) -> tuple[int | str, ...]:
        kind, _, number = name.partition(":")
        if kind not in ("auto", "cuda"):
            return (name,) * devices
        return (int(number),) * devices if number else tuple(islice(turn, devices))

    return {
        one.name: (
            assign(one.train.device, one.train_ranks),
            assign(one.rollout.device, one.rollout.workers * one.worker_devices),
        )
        for one in config.pipeline
    }


def memory_share(config: Config, pipeline: PipelineSection, gpus: int) -> float:
    """Share of a GPU's memory for each worker's engine: 1, unless other processes of this run use the same GPU at the
    same time. A pool assigns a GPU to one process at a time, and Ray to one process only."""
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
    """Whether versions stay in the trainer's device memory: if an engine uses the trainer's only GPU. Devices of a pool
    are released empty, and Ray assigns a device to one process only."""
    if config.pool.devices or config.launch.kind != "local" or pipeline.train_ranks > 1:
        return False
    trainer = trains_on(config, pipeline, gpus)[0]
    may = pipeline.weights.transport == "auto" and pipeline.engine.capabilities.device_weights
    return may and trainer in generates_on(config, pipeline, gpus)
