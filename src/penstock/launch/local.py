"""Processes on this machine.

They die with the supervisor: each requests this from the kernel as its first action. A killed supervisor leaves only
the run directory, from which `--resume` continues, and processes that the user's code detached, which `--resume` kills.

What the user's code detaches from a worker is killed when that worker ends, if it is still in the worker's session or
has the worker's variable in its environment; otherwise with the run, since the supervisor adopts all orphans.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, Process

import psutil

from penstock.config.run import Config
from penstock.engines.vllm.leftovers import homes_in, remove_leftovers
from penstock.launch.forkserver import ForkedProcess, ForkServer
from penstock.launch.gpus import gpu_environment, gpus_here
from penstock.launch.preload import Preloading
from penstock.launch.processes import ProcessSpec, command, environment
from penstock.launch.restarts import Ended
from penstock.payload.io.leftovers import sweep_dead, sweep_own
from penstock.runtime.logs import rotate
from penstock.runtime.process import (
    adopt_orphans,
    kill_adopted,
    kill_left_behind,
    kill_of_earlier_starts,
    kill_tree,
    reap_adopted,
)
from penstock.runtime.run_token import handed_over, place_digest
from penstock.runtime.rundir import RunDir

log = logging.getLogger(__name__)

LEFT_BEHIND_S = 4.0
ROTATE_EVERY_S = 5.0


class LocalProcess:
    """A child of the supervisor."""

    def __init__(self, child: Process) -> None:
        self._child = child

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def where(self) -> str:
        return f"process {self._child.pid}"

    @property
    def running(self) -> bool:
        return self._child.returncode is None

    async def wait(self) -> Ended:
        return Ended(await self._child.wait())

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._child.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()

    async def kill_tree(self, timeout_s: float) -> None:
        await asyncio.to_thread(kill_tree, self._child.pid, timeout_s)


class ProcessWithDescendants:
    """A process and its descendants. When it has ended they are killed, even if they were detached from it."""

    def __init__(self, head: LocalProcess | ForkedProcess, member: str) -> None:
        self._head = head
        self._member = member
        self._clearing: asyncio.Future[None] | None = None
        self.terminate = head.terminate
        self.kill = head.kill
        self.kill_tree = head.kill_tree

    @property
    def where(self) -> str:
        return self._head.where

    @property
    def running(self) -> bool:
        return self._head.running

    async def wait(self) -> Ended:
        ended = await self._head.wait()
        if self._clearing is None:
            self._clearing = asyncio.get_running_loop().run_in_executor(None, self._clear)
        await asyncio.shield(self._clearing)
        return ended

    def _clear(self) -> None:
        left = kill_left_behind(self._head.pid, self._member, LEFT_BEHIND_S)
        if left:
            log.warning("%s left processes behind, which were killed: %s", self._member, left)


class LocalPlacer:
    """Starts every process as a child of the supervisor, without a limit on resources."""

    def __init__(self, run: RunDir, config: Config, preloading: Preloading | None = None) -> None:
        self._run = run
        self._config = config
        self._forkserver = ForkServer(config, run.log_path("forkserver"), preloading)
        self._gpus: tuple[str, ...] = ()
        self._prefix = f"{place_digest(run.root, run.run_id)}:"
        """Of the members' variable."""
        self._begun: set[int] = set()
        """Children of this process that are no adopted orphans."""
        self._placing = 0

    async def open(self) -> None:
        self._begun = {child.pid for child in psutil.Process().children()}
        if sys.platform == "linux":
            adopt_orphans()
        left = await asyncio.to_thread(kill_of_earlier_starts, self._prefix, LEFT_BEHIND_S)
        if left:
            log.warning("an earlier start of the run left processes behind, which were killed: %s", left)
        _, self._gpus = await asyncio.gather(self._forkserver.start(), asyncio.to_thread(gpus_here))
        removed = [*sweep_own(self._run.run_id, os.getpid()), *sweep_dead()]
        if removed:
            log.info("removed %d shared-memory rings of dead runs", len(removed))

    async def place(self, spec: ProcessSpec, member: str, session: str) -> ProcessWithDescendants:
        self._placing += 1  # a process that was just started is not known yet
        try:
            head = await self._start(spec, member, session)
        finally:
            self._placing -= 1
        self._begun.add(head.pid)
        return ProcessWithDescendants(head, self._prefix + member)

    async def _start(self, spec: ProcessSpec, member: str, session: str) -> LocalProcess | ForkedProcess:
        arguments = command(spec, self._run.root, member, session, parent=os.getpid())
        path = self._run.log_path(spec.name)
        inherited = environment(spec, self._config.run.extra_path, self._prefix + member) | gpu_environment(
            spec, self._config, self._gpus
        )
        if spec.role == "trainer":
            await asyncio.sleep(0)  # it needs samples first: workers that start at the same time go first
        forked = await self._forkserver.fork(spec, arguments, inherited, path, self._run.token())
        if forked is not None:
            return forked
        with path.open("ab") as output, handed_over(self._run.token()) as token:
            child = await asyncio.create_subprocess_exec(
                *arguments,
                *("--token-fd", str(token)),
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
                env=inherited,
                pass_fds=(token,),
                start_new_session=True,
            )
        return LocalProcess(child)

    async def run(self) -> None:
        """Bounds the size of the logs: processes, and the user's code that prints, write to them directly."""
        while True:
            await asyncio.sleep(ROTATE_EVERY_S)
            await asyncio.to_thread(rotate, self._run.root / "logs", self._config.run.log_mb << 20)
            if not self._placing:
                reap_adopted(self._known())

    async def close(self) -> None:
        await self._forkserver.close()
        left = await asyncio.to_thread(kill_adopted, self._known(), LEFT_BEHIND_S)
        if left:
            log.warning("the run left processes behind, which were killed: %s", left)
        remove_leftovers(homes_in(self._run.root))
        sweep_own(self._run.run_id, os.getpid())

    def _known(self) -> set[int]:
        server = self._forkserver.pid
        return self._begun if server is None else self._begun | {server}
