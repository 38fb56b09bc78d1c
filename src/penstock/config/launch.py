"""Where the processes of a run are started."""

from __future__ import annotations

from typing import Literal

from penstock.records.section import Seconds, Section


class LaunchSection(Section):
    kind: Literal["local", "ray"] = "local"
    """`local` starts processes on this machine, `ray` on a Ray cluster, where the run outlives its terminal."""
    address: str = ""
    """Ray: the cluster as `host:port`, or `auto` for the one this machine is part of. Empty: the value of RAY_ADDRESS;
    without that, a new Ray on this machine, which ends with the run."""
    wait_s: Seconds = 120.0
    """Ray: how long processes may wait for free resources, at the start and after the loss of a node."""
    preload: bool = True
    """Local, on Linux without GPUs: import torch once and fork trainers and workers from that process: they start
    sooner and share memory. `false` starts each as a new process."""
