"""Selects a worker's transport for weights."""

from __future__ import annotations

from typing import cast

import torch

from penstock.errors import ConfigError
from penstock.runtime.member import RunMember
from penstock.runtime.process import host_id
from penstock.weights.io.device import DeviceTransport
from penstock.weights.io.files import FileTransport
from penstock.weights.io.meeting import BroadcastTransport
from penstock.weights.io.neighbours import WeightTransport
from penstock.weights.io.pull import NearestTransport, PullTransport
from penstock.weights.io.pull_ucxx import Ucx, UcxxConnection
from penstock.weights.settings import WeightsSection


def ucx_for(transport: str) -> Ucx | None:
    """The UCX binding if the payloads' transport is `ucxx`: then weights are pulled by UCX too."""
    if transport != "ucxx":
        return None
    try:
        from penstock.runtime import ucx
    except ImportError as error:
        raise ConfigError(f"payload.transport is 'ucxx', which needs the extra penstock-rl[ucxx]: {error}") from error
    return cast("Ucx", ucx)


def transport_of(
    process: RunMember, weights: WeightsSection, transport: str, device: torch.device, *, on_device: bool
) -> WeightTransport:
    """The configured transport; `train.weight_publisher` is the trainer's side."""
    files = FileTransport(process.run.root)
    token = process.run.token().encode()
    ucx = ucx_for(transport)
    pull = PullTransport(token, streams=weights.streams, ucxx=UcxxConnection(token, ucx) if ucx is not None else None)
    nearest = NearestTransport(host_id(), files, pull)
    match weights.transport:
        case "files":
            return files
        case "pull":
            return pull
        case "broadcast":
            return BroadcastTransport(process.member, nearest, token)
        case "auto":
            by_device = device.type == "cuda" and on_device
            return DeviceTransport(process.run.root, device, nearest) if by_device else nearest
