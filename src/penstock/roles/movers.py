"""How a version's bytes reach a worker."""

from __future__ import annotations

from penstock.roles.process import RoleProcess
from penstock.weights.io.files import FileMover
from penstock.weights.io.updater import Mover


def mover_of(process: RoleProcess) -> Mover:
    """Workers share the run directory with the trainer: they map the files it published."""
    return FileMover(process.run.root)
