"""How a version's bytes reach a worker."""

from __future__ import annotations

from typing import cast

from penstock.config.run import PayloadSection
from penstock.errors import ConfigError
from penstock.roles.models import device_of
from penstock.roles.process import RoleProcess
from penstock.runtime.process import host_id
from penstock.weights.io.device import DeviceMover
from penstock.weights.io.files import FileMover
from penstock.weights.io.meeting import BroadcastMover
from penstock.weights.io.neighbours import Mover
from penstock.weights.io.pull import NearestMover, PullMover
from penstock.weights.io.pull_ucxx import Ucx, UcxxCarrier


def ucx_for(section: PayloadSection) -> Ucx | None:
    """The binding to UCX that the payloads use, if they are carried by it: then weights are pulled by it too."""
    if section.carrier != "ucxx":
        return None
    try:
        from penstock.payload.io import ucxx_core
    except ImportError as error:
        raise ConfigError(f"payload.carrier is 'ucxx', which needs the extra penstock[ucxx]: {error}") from error
    return cast("Ucx", ucxx_core)


def mover_of(process: RoleProcess) -> Mover:
    """The configured way; `roles.offering` is its other end, in the trainer."""
    weights = process.pipeline.weights
    files = FileMover(process.run.root)
    token = process.run.token().encode()
    ucx = ucx_for(process.config.payload)
    pull = PullMover(token, streams=weights.streams, ucxx=UcxxCarrier(token, ucx) if ucx is not None else None)
    nearest = NearestMover(host_id(), files, pull)
    match weights.mover:
        case "files":
            return files
        case "pull":
            return pull
        case "broadcast":
            return BroadcastMover(process.member, nearest)
        case "auto":
            device = device_of(process.pipeline.rollout.device)
            by_device = device.type == "cuda" and stay_on_device(process)
            return DeviceMover(process.run.root, device, nearest) if by_device else nearest


def stay_on_device(process: RoleProcess) -> bool:
    """Whether versions may lie in the trainer's device memory. The devices of a pool are given back empty."""
    return process.pipeline.weights.mover == "auto" and not process.config.pool.devices
