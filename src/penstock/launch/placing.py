"""Which process needs what, and which node may have it. Pure: a configuration and nodes in, needs and sentences out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.config.pipeline import PipelineSection
from penstock.config.run import Config
from penstock.errors import ConfigError
from penstock.launch.processes import ProcessSpec, processes_of

SINK_CPUS = 0.1
"""A process that sends metrics hardly computes."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a process must find on its node."""

    cpus: float
    gpus: int = 0
    directory: bool = False
    """It reads or writes files of the run directory that cannot be sent to it."""

    def __str__(self) -> str:
        return _amount(self.cpus, self.gpus) + (" where the run directory is seen" if self.directory else "")


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster, as far as a run is concerned."""

    id: str
    address: str
    cpus: float
    gpus: int
    sees_directory: bool = True
    is_head: bool = False
    trouble: str = ""
    """Why no process of the run can live there."""


@dataclass(frozen=True, slots=True)
class Group:
    """Processes whose places are asked for together: all of them or none."""

    name: str
    members: tuple[str, ...]
    needs: Needs
    """Of each."""
    strategy: Literal["PACK", "SPREAD"]


def groups_of(config: Config, *, with_gpus: bool) -> list[Group]:
    """Every process of the run in its group. The workers of a pipeline are spread, so that a node takes few of them."""
    alone: list[Group] = []
    workers: dict[str, list[ProcessSpec]] = {}
    for spec in processes_of(config):
        if spec.role == "rollout_worker" and spec.pipeline is not None:
            workers.setdefault(spec.pipeline, []).append(spec)
        else:
            alone.append(Group(spec.name, (spec.name,), needs_of(spec, config, with_gpus=with_gpus), "PACK"))
    spread = [
        Group(
            f"{name}.rollout",
            tuple(one.name for one in specs),
            needs_of(specs[0], config, with_gpus=with_gpus),
            "SPREAD",
        )
        for name, specs in workers.items()
    ]
    return alone + spread


def needs_of(spec: ProcessSpec, config: Config, *, with_gpus: bool) -> Needs:
    """`with_gpus`: the cluster has some, so that the device `auto` means one."""
    pipeline = next((one for one in config.pipeline if one.name == spec.pipeline), None)
    if pipeline is None:
        return Needs(SINK_CPUS if spec.role == "metrics_sink" else spec.threads, directory=True)
    if spec.role == "trainer":
        ranks = pipeline.train_ranks  # on one node, below rank 0
        gpus = ranks * _wants_gpu(pipeline.train.device, with_gpus, f"pipeline.{pipeline.name}.train.device")
        return Needs(spec.threads * ranks, gpus, directory=True)
    rollout = pipeline.rollout
    device = _wants_gpu(rollout.device, with_gpus, f"pipeline.{pipeline.name}.rollout.device")
    gpus = pipeline.worker_devices if device else 0
    cpus = spec.threads * rollout.ranks + (rollout.preparation_processes or 0)
    return Needs(cpus, gpus, directory=_reads_weights_files(pipeline))


def check_pool(config: Config, groups: Iterable[Group]) -> None:
    """Devices of a pool are shared by processes that take turns; a GPU of Ray belongs to one process."""
    if config.pool.devices and any(group.needs.gpus for group in groups):
        raise ConfigError(
            f"pool.devices = {config.pool.devices} shares GPUs between processes, which the Ray launcher does not do: "
            "use launch.kind = 'local', or pool.devices = 0 so that every process has GPUs of its own"
        )


def listens_outside(nodes: Iterable[Node]) -> bool:
    """Whether processes must be reachable from other machines: not as long as all nodes are one machine."""
    return len({node.address for node in nodes if not node.trouble}) > 1


def homes_of(group: Group, nodes: Iterable[Node]) -> list[Node]:
    """The nodes on which processes of the group can live, if there is room."""
    return [node for node in nodes if not node.trouble and (node.sees_directory or not group.needs.directory)]


def shortage(waiting: Sequence[Group], nodes: Sequence[Node], free: Mapping[str, float], waited_s: float) -> str:
    """One sentence: what was asked for, what there is, what to change."""
    asked = ", ".join(f"{len(group.members)} x {group.name} of {group.needs}" for group in waiting)
    there = "; ".join(_describe(node) for node in nodes) or "none"
    unused = _amount(free.get("CPU", 0.0), int(free.get("GPU", 0)))
    if not all(homes_of(group, nodes) for group in waiting):
        advice = "put run.dir on a file system that the nodes share, and mend those that are not usable"
    elif not all(any(_fits(group.needs, node) for node in homes_of(group, nodes)) for group in waiting):
        advice = "add a node that is large enough, or ask for fewer threads, ranks or devices"
    else:
        advice = "wait for other work to end, ask for fewer workers or threads, or add nodes"
    return (
        f"there was no place within {waited_s:g} s for {asked}. The nodes are: {there}; free of all that: {unused}. "
        f"What to do: {advice}"
    )


def _fits(needs: Needs, node: Node) -> bool:
    return node.cpus >= needs.cpus and node.gpus >= needs.gpus


def _describe(node: Node) -> str:
    extra = f" (not usable: {node.trouble})" if node.trouble else ""
    if not node.trouble and not node.sees_directory:
        extra = " (does not see the run directory)"
    return f"{node.address} with {_amount(node.cpus, node.gpus)}{extra}"


def _amount(cpus: float, gpus: int) -> str:
    amount = f"{cpus:g} CPU" + ("s" if cpus != 1 else "")
    return amount + (f" and {gpus} GPU" + ("s" if gpus != 1 else "") if gpus else "")


def _reads_weights_files(pipeline: PipelineSection) -> bool:
    """An engine of its own reads its weights from files, and so does a worker that is configured to."""
    return pipeline.engine.capabilities.weights == "files" or pipeline.weights.transport == "files"


def _wants_gpu(device: str, with_gpus: bool, key: str) -> bool:
    if ":" in device:
        raise ConfigError(
            f"{key} = {device!r} names one GPU of one machine, but Ray chooses the GPUs: say 'cuda' or 'auto'"
        )
    return device != "cpu" and (with_gpus or device != "auto")
