"""Resources that each process needs, and nodes that can run it. Pure: takes a configuration and nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.config.pipeline import PipelineSection
from penstock.config.run import Config
from penstock.errors import ConfigError
from penstock.launch.processes import ProcessSpec, processes_of

SINK_CPUS = 0.1
"""A process that sends metrics uses little CPU."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources that a process needs on its node."""

    cpus: float
    gpus: int = 0
    directory: bool = False
    """It reads or writes files of the run directory that cannot be sent to it."""

    def __str__(self) -> str:
        return _amount(self.cpus, self.gpus) + (" with access to the run directory" if self.directory else "")


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster, with the properties that matter to a run."""

    id: str
    address: str
    cpus: float
    gpus: int
    sees_directory: bool = True
    is_head: bool = False
    trouble: str = ""
    """Why no process of the run can be placed there."""


@dataclass(frozen=True, slots=True)
class Group:
    """Processes whose resources are reserved together: all of them or none."""

    name: str
    members: tuple[str, ...]
    needs: Needs
    """Of each process."""
    strategy: Literal["PACK", "SPREAD"]


def groups_of(config: Config, *, with_gpus: bool) -> list[Group]:
    """The groups of all processes. The workers of a pipeline are spread, so that each node has few of them."""
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
    """`with_gpus`: the cluster has GPUs, so the device `auto` means a GPU."""
    pipeline = next((one for one in config.pipeline if one.name == spec.pipeline), None)
    if pipeline is None:
        return Needs(SINK_CPUS if spec.role == "metrics_sink" else spec.threads, directory=True)
    if spec.role == "trainer":
        ranks = pipeline.train_ranks  # on one node, below rank 0
        gpus = ranks * _needs_gpu(pipeline.train.device, with_gpus, f"pipeline.{pipeline.name}.train.device")
        return Needs(spec.threads * ranks, gpus, directory=True)
    rollout = pipeline.rollout
    device = _needs_gpu(rollout.device, with_gpus, f"pipeline.{pipeline.name}.rollout.device")
    gpus = pipeline.worker_devices if device else 0
    cpus = spec.threads * rollout.ranks + (rollout.preparation_processes or 0)
    return Needs(cpus, gpus, directory=_reads_weights_files(pipeline))


def check_pool(config: Config, groups: Iterable[Group]) -> None:
    """Raises `ConfigError` for a pool with GPUs: processes share its devices, but Ray assigns a GPU to one process."""
    if config.pool.devices and any(group.needs.gpus for group in groups):
        raise ConfigError(
            f"pool.devices = {config.pool.devices} shares GPUs between processes, which the Ray launcher does not "
            "support: use launch.kind = 'local', or pool.devices = 0 so that every process has its own GPUs"
        )


def listens_outside(nodes: Iterable[Node]) -> bool:
    """Whether processes must be reachable from other machines: only if the nodes are several machines."""
    return len({node.address for node in nodes if not node.trouble}) > 1


def usable_nodes(group: Group, nodes: Iterable[Node]) -> list[Node]:
    """The nodes on which processes of the group can run, if they have free resources."""
    return [node for node in nodes if not node.trouble and (node.sees_directory or not group.needs.directory)]


def shortage(waiting: Sequence[Group], nodes: Sequence[Node], free: Mapping[str, float], waited_s: float) -> str:
    """The error message: what was requested, what the nodes have, what to change."""
    requested = ", ".join(f"{len(group.members)} x {group.name} of {group.needs}" for group in waiting)
    available = "; ".join(_describe(node) for node in nodes) or "none"
    unused = _amount(free.get("CPU", 0.0), int(free.get("GPU", 0)))
    if not all(usable_nodes(group, nodes) for group in waiting):
        advice = "put run.dir on a file system that the nodes share, and repair those that are not usable"
    elif not all(any(_fits(group.needs, node) for node in usable_nodes(group, nodes)) for group in waiting):
        advice = "add a node that is large enough, or request fewer threads, ranks or devices"
    else:
        advice = "wait for other work to end, request fewer workers or threads, or add nodes"
    return (
        f"there was no place within {waited_s:g} s for {requested}. The nodes are: {available}; free: {unused}. "
        f"What to do: {advice}"
    )


def _fits(needs: Needs, node: Node) -> bool:
    return node.cpus >= needs.cpus and node.gpus >= needs.gpus


def _describe(node: Node) -> str:
    extra = f" (not usable: {node.trouble})" if node.trouble else ""
    if not node.trouble and not node.sees_directory:
        extra = " (no access to the run directory)"
    return f"{node.address} with {_amount(node.cpus, node.gpus)}{extra}"


def _amount(cpus: float, gpus: int) -> str:
    amount = f"{cpus:g} CPU" + ("s" if cpus != 1 else "")
    return amount + (f" and {gpus} GPU" + ("s" if gpus != 1 else "") if gpus else "")


def _reads_weights_files(pipeline: PipelineSection) -> bool:
    """Some engines, and workers that are configured to, read weights from files."""
    return pipeline.engine.capabilities.weights == "files" or pipeline.weights.transport == "files"


def _needs_gpu(device: str, with_gpus: bool, key: str) -> bool:
    if ":" in device:
        raise ConfigError(
            f"{key} = {device!r} names one GPU of one machine, but Ray chooses the GPUs: use 'cuda' or 'auto'"
        )
    return device != "cpu" and (with_gpus or device != "auto")
