"""How a version's bytes reach a worker."""

from __future__ import annotations

from typing import cast

import torch

from penstock.errors import ConfigError
from penstock.runtime.member import RunMember
from penstock.runtime.process import host_id
from penstock.weights.io.device import DeviceMover
from penstock.weights.io.files import FileMover
from penstock.weights.io.meeting import BroadcastMover
from penstock.weights.io.neighbours import Mover
from penstock.weights.io.pull import NearestMover, PullMover
from penstock.weights.io.pull_ucxx import Ucx, UcxxCarrier
from penstock.weights.settings import WeightsSection


def ucx_for(carrier: str) -> Ucx | None:
    """The binding to UCX that the payloads use, if they are carried by it: then weights are pulled by it too."""
    if carrier != "ucxx":
        return None
    try:
        from penstock.runtime import ucx
    except ImportError as error:
        raise ConfigError(f"payload.carrier is 'ucxx', which needs the extra penstock[ucxx]: {error}") from error
    return cast("Ucx", ucx)


def mover_of(
    process: RunMember, weights: WeightsSection, carrier: str, device: torch.device, *, on_device: bool
) -> Mover:
    """The configured way; `train.offering` is its other end, in the trainer."""
    files = FileMover(process.run.root)
    token = process.run.token().encode()
    ucx = ucx_for(carrier)
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
            by_device = device.type == "cuda" and on_device
            return DeviceMover(process.run.root, device, nearest) if by_device else nearest
