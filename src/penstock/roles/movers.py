"""How a version's bytes reach a worker."""

from __future__ import annotations

import torch

from penstock.roles.models import device_of
from penstock.roles.process import RoleProcess
from penstock.runtime.process import host_id
from penstock.weights.io.device import DeviceMover
from penstock.weights.io.files import FileMover
from penstock.weights.io.meeting import BroadcastMover
from penstock.weights.io.pull import NearestMover, PullMover
from penstock.weights.io.updater import Mover


def mover_of(process: RoleProcess) -> Mover:
    """The configured way; `roles.offering` is its other end, in the trainer."""
    weights = process.pipeline.weights
    files = FileMover(process.run.root)
    pull = PullMover(process.run.token().encode(), streams=weights.streams)
    nearest = NearestMover(host_id(), files, pull)
    match weights.mover:
        case "files":
            return files
        case "pull":
            return pull
        case "broadcast":
            return BroadcastMover(process.member, nearest)
        case "auto":
            device = torch.device(device_of(process.pipeline.rollout.device))
            return DeviceMover(process.run.root, device, nearest) if device.type == "cuda" else nearest
