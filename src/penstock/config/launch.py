"""Where the processes of a run are started."""

from __future__ import annotations

from typing import Literal

from penstock.records.section import Seconds, Section


class LaunchSection(Section):
    kind: Literal["local", "ray"] = "local"
    """`local` starts them on this machine, `ray` on the nodes of a Ray cluster, where the run outlives its terminal."""
    address: str = ""
    """Ray: the cluster as `host:port`, or `auto` for the one this machine is part of. Empty: what RAY_ADDRESS says, and
    without that a Ray of its own on this machine, which ends with the run."""
    wait_s: Seconds = 120.0
    """Ray: how long processes may wait for free resources, at the start and after the loss of a node."""
    preload: bool = True
    """Local, on Linux without GPUs: import torch once and fork trainers and workers from there: they start sooner
    and share memory. `false` starts each from nothing."""
