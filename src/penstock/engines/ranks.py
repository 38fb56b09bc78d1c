"""The other processes of an engine that is sharded over several. The worker starts them, and ends when one ends."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.runtime.member import RunMember
from penstock.runtime.ranks import RankChildren
from penstock.runtime.tasks import Tasks

T = TypeVar("T")

LEAVE_S = 3.0


class EngineRankAssignment(msgspec.Struct):
    """Settings that a worker sends to another rank of its engine, on standard input."""

    rank: int
    ranks: int
    store: str
    cell_fd: int
    commands_fd: int


class EngineRanks:
    """Start them from the main thread: child processes end with the thread that started them."""

    def __init__(self, process: RunMember, ranks: int) -> None:
        """`ranks` counts this process, which is rank 0."""
        self.count = ranks
        self.sockets: list[socket.socket] = []
        """One to each other rank, for the commands of the engine."""
        self._children = RankChildren(process, "engine_rank", ranks)

    @property
    def store(self) -> Path:
        return self._children.store

    @asynccontextmanager
    async def started(self) -> AsyncIterator[EngineRanks]:
        """Starts them, if there are any. On exit they have ended, or are killed."""
        if self.count == 1:
            yield self
            return
        theirs: dict[int, socket.socket] = {}
        for rank in range(1, self.count):
            ours, theirs[rank] = socket.socketpair()
            self.sockets.append(ours)

        def seat(rank: int, cell_fd: int) -> EngineRankAssignment:
            return EngineRankAssignment(rank, self.count, str(self.store), cell_fd, theirs[rank].fileno())

        try:
            await self._children.start(seat, {rank: (end.fileno(),) for rank, end in theirs.items()})
            for end in theirs.values():
                end.close()
            yield self
            with suppress(TimeoutError):  # one that is late is killed
                async with asyncio.timeout(LEAVE_S):
                    await self._children.wait()
        finally:
            for end in self.sockets:
                end.close()
            await self._children.close()

    async def unless_lost(self, work: Future[T]) -> T:
        """The result of work that needs the other ranks; raises when one of them ends."""
        wrapped = asyncio.wrap_future(work)
        await self._children.first_of(wrapped)
        return wrapped.result()

    def watch(self, tasks: Tasks) -> None:
        """Ends the worker when a rank ends."""
        if self.count > 1:
            tasks.spawn("watch the engine's ranks", self._children.first_of(asyncio.get_running_loop().create_future()))


def connected(seat: EngineRankAssignment) -> socket.socket:
    """The socket of another rank to rank 0."""
    os.set_inheritable(seat.commands_fd, False)
    return socket.socket(fileno=seat.commands_fd)
