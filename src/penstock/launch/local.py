"""Processes on this machine.

They die with the supervisor (each asks the kernel for that first of all), so a killed supervisor leaves nothing
behind but a run directory, and `--resume` goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from asyncio.subprocess import DEVNULL, Process

from penstock.config.run import Config
from penstock.launch.forkserver import ForkedProcess, ForkServer, usable
from penstock.launch.processes import ProcessSpec, command, environment
from penstock.launch.restarts import Ended
from penstock.payload.io.leftovers import sweep, sweep_dead
from penstock.runtime.process import kill_tree
from penstock.runtime.rundir import RunDir

log = logging.getLogger(__name__)


class LocalProcess:
    """A child of the supervisor."""

    def __init__(self, child: Process) -> None:
        self._child = child

    @property
    def where(self) -> str:
        return f"process {self._child.pid}"

    @property
    def running(self) -> bool:
        return self._child.returncode is None

    async def wait(self) -> Ended:
        return Ended(await self._child.wait())

    def ask_to_end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._child.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()

    async def kill_tree(self, timeout_s: float) -> None:
        await asyncio.to_thread(kill_tree, self._child.pid, timeout_s)


class LocalPlacer:
    """Starts every process as a child; there is always a place."""

    def __init__(self, run: RunDir, config: Config) -> None:
        self._run = run
        self._config = config
        self._forkserver = ForkServer(config, run.log_path("forkserver"))

    async def open(self) -> None:
        if usable(self._config):
            await self._forkserver.start()
        removed = [*sweep(self._run.run_id), *sweep_dead()]
        if removed:
            log.info("removed %d shared-memory rings that dead runs had left", len(removed))

    async def place(self, spec: ProcessSpec, member: str, session: str) -> LocalProcess | ForkedProcess:
        arguments = command(spec, self._run.root, member, session, parent=os.getpid())
        inherited, path = environment(spec, self._config.run.extra_path), self._run.log_path(spec.name)
        forked = await self._forkserver.fork(spec, arguments, inherited, path)
        if forked is not None:
            return forked
        with path.open("ab") as output:
            child = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
                env=inherited,
                start_new_session=True,
            )
        return LocalProcess(child)

    async def run(self) -> None:
        pass

    async def close(self) -> None:
        await self._forkserver.close()
        sweep(self._run.run_id)
