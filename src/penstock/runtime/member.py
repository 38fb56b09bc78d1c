"""One process of a run, as everything in it sees it: its run directory, its name, its stop, its progress."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.records.ids import MemberId, PipelineName
from penstock.runtime.progress import ProgressCell
from penstock.runtime.rundir import RunDir
from penstock.runtime.shutdown import ShutdownSignal

T = TypeVar("T")

LOOK_EVERY_S = 0.1


class StoppedAtStart(Exception):
    """A stop was requested before the process had anything to shut down."""


@dataclass(slots=True)
class RunMember:
    """One process of a run. `member` is new for every incarnation: a restarted process is another member."""

    run: RunDir
    name: str
    member: MemberId
    session: str
    """The supervisor's session: a run that is resumed has another one."""
    pipeline_name: PipelineName
    """Empty for processes that serve all pipelines."""
    index: int
    stop: ShutdownSignal = field(default_factory=ShutdownSignal)
    progress: ProgressCell = field(default_factory=ProgressCell)

    async def started(self, work: Future[T]) -> T:
        """The result of long work done before anything is held. A stop meanwhile ends the process at once."""
        starting = asyncio.wrap_future(work)
        while not starting.done():
            if self.stop.requested:
                raise StoppedAtStart
            await asyncio.wait([starting], timeout=LOOK_EVERY_S)
        return starting.result()
