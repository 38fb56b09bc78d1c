"""A trainer of several ranks, seen from rank 0, which is the trainer process itself. See `runtime.ranks`.

With one rank everything here is empty: what is done together is done alone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from penstock.errors import PeerLost
from penstock.records.batch import Batch
from penstock.records.ids import Version
from penstock.records.payload import RingAddress
from penstock.runtime.member import RunMember
from penstock.runtime.offload import Offload
from penstock.runtime.ranks import FailureNotes, RankChildren, file_store
from penstock.runtime.tasks import Tasks
from penstock.train.rank_calls import (
    Answer,
    End,
    Frames,
    NumberedAnswer,
    NumberedOrder,
    Order,
    Prepare,
    Snapshot,
    TrainerSeat,
    WriteParts,
)
from penstock.train.share import shares_of

log = logging.getLogger(__name__)

T = TypeVar("T")

COLLECTIVE_S = 1800.0
"""Longest wait of a rank for the slowest one. A dead rank is noticed at once, and a wedged one by the controller."""
LEAVE_S = 3.0


class TrainerRanks:
    """The other ranks of this trainer: gives them their orders, and ends with them."""

    def __init__(self, process: RunMember, training: Offload, count: int = 1) -> None:
        """`training` is the one thread in which this rank trains, saves and moves."""
        self.count = count
        self._children = RankChildren(process, "trainer_rank", count)
        self._training = training
        self._frames: list[Frames] = []
        self._answers: list[dict[int, asyncio.Future[Answer]]] = []
        self._numbers = itertools.count()
        self._notes: FailureNotes | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def store(self) -> Path:
        """Through which the ranks find each other."""
        return self._children.store

    @asynccontextmanager
    async def started(self, checkpoint: str) -> AsyncIterator[None]:
        """The other ranks, for as long as the body runs; they load `checkpoint`. One that ends early ends the body."""
        if self.count == 1:
            yield
            return
        try:
            await self._start(checkpoint)
            async with Tasks() as tasks:
                tasks.spawn("watch the ranks", self._children.first_of(self._loop.create_future()))
                for frames, answers in zip(self._frames, self._answers, strict=True):
                    tasks.spawn("hear a rank", self._hear(frames, answers))
                yield
                tasks.cancel()
            await self._leave()
        finally:
            for frames in self._frames:
                frames.close()
            await self._children.close()

    async def _start(self, checkpoint: str) -> None:
        ends: dict[int, socket.socket] = {}
        for rank in range(1, self.count):
            own, ends[rank] = socket.socketpair()
            self._frames.append(await Frames.over(own))
            self._answers.append({})

        def seat(rank: int, cell_fd: int) -> TrainerSeat:
            store = str(self._children.store)
            return TrainerSeat(rank, self.count, store, ends[rank].fileno(), cell_fd, checkpoint)

        await self._children.start(seat, {rank: (end.fileno(),) for rank, end in ends.items()})
        for end in ends.values():
            end.close()

    async def _hear(self, frames: Frames, answers: dict[int, asyncio.Future[Answer]]) -> None:
        with suppress(PeerLost):  # who watches the ranks knows why
            while True:
                said = cast("NumberedAnswer", await frames.receive(NumberedAnswer))
                waiting = answers.pop(said.number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(said.answer)

    async def _leave(self) -> None:
        self.tell(End())
        with suppress(TimeoutError):  # the late ones are killed
            async with asyncio.timeout(LEAVE_S):
                await self._children.wait()

    # -- orders -----------------------------------------------------------------------------------------------------

    def joined(self) -> None:
        """This rank is in the group: a broken collective can be explained from now on."""
        if self.count > 1:
            self._notes = FailureNotes(file_store(self._children.store, self.count), rank=0, ranks=self.count)

    def tell(self, order: Order) -> list[asyncio.Future[Answer]]:
        """Sends an order to every other rank; their answers."""
        return [self._send(index, order) for index in range(len(self._frames))]

    def _send(self, index: int, order: Order) -> asyncio.Future[Answer]:
        number, answer = next(self._numbers), self._loop.create_future()
        self._answers[index][number] = answer
        self._frames[index].send(NumberedOrder(number, order))
        return answer

    async def together(self, order: Order, work: Callable[..., T], *arguments: Any) -> tuple[T, list[Answer]]:
        """Every other rank does what the order says while this one does `work`, in the thread that trains."""
        answers = self.tell(order)
        own = await self._training.run(self._explained(work), *arguments)
        return own, [await answer for answer in answers]

    def _explained(self, work: Callable[..., T]) -> Callable[..., T]:
        """A collective that broke says nothing of the rank that broke it. The name stays: a simulation goes by it."""

        @wraps(work)
        def explained(*arguments: Any) -> T:
            try:
                return work(*arguments)
            except RuntimeError as error:
                blamed = self._notes.blame() if self._notes is not None else None
                if blamed is None:
                    raise
                raise blamed from error

        return explained

    # -- beside the training thread ---------------------------------------------------------------------------------

    def prepare(self, batch: Batch, rings: tuple[RingAddress, ...]) -> tuple[Batch, list[asyncio.Future[Answer]]]:
        """Sends every other rank its share of a batch; this rank's share, and what the others will say of theirs."""
        own, *shares = shares_of(batch, self.count)
        return own, [self._send(index, Prepare(share, rings)) for index, share in enumerate(shares)]

    def snapshot(self, version: Version, writing: Version | None) -> None:
        """Every rank keeps its weights as they are after what was ordered before, beside those that are written."""
        self.tell(Snapshot(version, writing))

    def write_parts(self, version: Version, directory: Path) -> None:
        """Has the other ranks write their parts of a version and waits for that. Not for the loop's own thread."""
        asyncio.run_coroutine_threadsafe(self._write_parts(version, directory), self._loop).result()

    async def _write_parts(self, version: Version, directory: Path) -> None:
        for answer in self.tell(WriteParts(version, str(directory))):
            await answer
