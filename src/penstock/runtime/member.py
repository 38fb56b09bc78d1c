"""The state of one process of a run: its run directory, name, shutdown signal and progress."""

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

POLL_EVERY_S = 0.1


class StoppedAtStart(Exception):
    """A stop was requested before the process had anything to shut down."""


@dataclass(slots=True)
class RunMember:
    """One process of a run. `member` is new for every incarnation: a restarted process is another member."""

    run: RunDir
    name: str
    member: MemberId
    session: str
    """The supervisor's session: it changes when a run is resumed."""
    pipeline_name: PipelineName
    """Empty for processes that serve all pipelines."""
    index: int
    stop: ShutdownSignal = field(default_factory=ShutdownSignal)
    progress: ProgressCell = field(default_factory=ProgressCell)

    async def started(self, work: Future[T]) -> T:
        """Waits for long start-up work. Raises `StoppedAtStart` as soon as a stop is requested."""
        starting = asyncio.wrap_future(work)
        while not starting.done():
            if self.stop.requested:
                raise StoppedAtStart
            await asyncio.wait([starting], timeout=POLL_EVERY_S)
        return starting.result()
