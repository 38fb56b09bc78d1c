"""The other ranks of a trainer, controlled by rank 0, which is the trainer process. See `runtime.ranks`.

With one rank there are no others, and rank 0 does all work.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from penstock.errors import PeerLost
from penstock.records.batch import Batch
from penstock.records.ids import StepIndex, Version
from penstock.records.payload import RingAddress
from penstock.runtime.member import RunMember
from penstock.runtime.offload import Offload
from penstock.runtime.ranks import FailureNotes, RankChildren, file_store
from penstock.runtime.tasks import Tasks
from penstock.train.rank_calls import (
    Answer,
    End,
    Fetch,
    Frames,
    NumberedAnswer,
    NumberedOrder,
    Order,
    Pack,
    Snapshot,
    TrainerRankAssignment,
    WriteParts,
)
from penstock.train.share import shares_of

log = logging.getLogger(__name__)

T = TypeVar("T")

COLLECTIVE_S = 1800.0
"""Longest wait of a rank for the slowest one. A dead rank is detected at once, and a hung one by the controller."""
LEAVE_S = 3.0


class TrainerRanks:
    """Starts the other ranks of this trainer, sends them orders, and ends with them."""

    def __init__(self, process: RunMember, training: Offload, count: int = 1) -> None:
        """`training` is the one thread in which this rank trains, saves and moves its learner."""
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
        """The rendezvous file of the ranks."""
        return self._children.store

    @asynccontextmanager
    async def started(self, checkpoint: str) -> AsyncIterator[None]:
        """Runs the other ranks during the body; they load `checkpoint`. A rank that ends early ends the body."""
        if self.count == 1:
            yield
            return
        try:
            await self._start(checkpoint)
            async with Tasks() as tasks:
                tasks.spawn("watch the ranks", self._children.first_of(self._loop.create_future()))
                for frames, answers in zip(self._frames, self._answers, strict=True):
                    tasks.spawn("receive answers of a rank", self._receive(frames, answers))
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

        def seat(rank: int, cell_fd: int) -> TrainerRankAssignment:
            store = str(self._children.store)
            return TrainerRankAssignment(rank, self.count, store, ends[rank].fileno(), cell_fd, checkpoint)

        await self._children.start(seat, {rank: (end.fileno(),) for rank, end in ends.items()})
        for end in ends.values():
            end.close()

    async def _receive(self, frames: Frames, answers: dict[int, asyncio.Future[Answer]]) -> None:
        with suppress(PeerLost):  # the task that watches the ranks reports why
            while True:
                received = cast("NumberedAnswer", await frames.receive(NumberedAnswer))
                waiting = answers.pop(received.number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(received.answer)

    async def _leave(self) -> None:
        self.send_all(End())
        with suppress(TimeoutError):  # late ranks are killed
            async with asyncio.timeout(LEAVE_S):
                await self._children.wait()

    # -- orders -----------------------------------------------------------------------------------------------------

    def joined(self) -> None:
        """This rank has joined the group: failed collectives can be attributed from now on."""
        if self.count > 1:
            self._notes = FailureNotes(file_store(self._children.store, self.count), rank=0, ranks=self.count)

    def send_all(self, order: Order) -> list[asyncio.Future[Answer]]:
        """Sends an order to every other rank. Returns their future answers."""
        return [self._send(index, order) for index in range(len(self._frames))]

    def _send(self, index: int, order: Order) -> asyncio.Future[Answer]:
        number, answer = next(self._numbers), self._loop.create_future()
        self._answers[index][number] = answer
        self._frames[index].send(NumberedOrder(number, order))
        return answer

    async def together(self, order: Order, work: Callable[..., T], *arguments: Any) -> tuple[T, list[Answer]]:
        """Every other rank executes the order while this one does `work`, in the training thread."""
        answers = self.send_all(order)
        own = await self._training.run(self._explained(work), *arguments)
        return own, [await answer for answer in answers]

    def _explained(self, work: Callable[..., T]) -> Callable[..., T]:
        """Attributes a failed collective to the rank that caused it. Keeps the name of `work`, for the simulation."""

        @wraps(work)
        def explained(*arguments: Any) -> T:
            try:
                return work(*arguments)
            except RuntimeError as error:
                blamed = self._notes.find_cause() if self._notes is not None else None
                if blamed is None:
                    raise
                raise blamed from error

        return explained

    # -- outside the training thread --------------------------------------------------------------------------------

    def fetch(self, batch: Batch, rings: tuple[RingAddress, ...]) -> tuple[Batch, list[asyncio.Future[Answer]]]:
        """Sends every other rank its share of a batch. Returns this rank's share and the others' future answers."""
        own, *shares = shares_of(batch, self.count)
        return own, [self._send(index, Fetch(share, rings)) for index, share in enumerate(shares)]

    def pack(self, step: StepIndex, advantages: Sequence[np.ndarray]) -> list[asyncio.Future[Answer]]:
        """Sends every other rank the advantages of the samples that it fetched. Returns their future answers."""
        return [self._send(index, Pack(step, tuple(one.tolist()))) for index, one in enumerate(advantages)]

    def snapshot(self, version: Version, writing: Version | None) -> None:
        """Every other rank copies its weights after all earlier orders, and keeps the copy that is being written."""
        self.send_all(Snapshot(version, writing))

    def write_parts(self, version: Version, directory: Path) -> None:
        """Makes the other ranks write their parts of a version and waits for them. Not to be called on the loop."""
        asyncio.run_coroutine_threadsafe(self._write_parts(version, directory), self._loop).result()

    async def _write_parts(self, version: Version, directory: Path) -> None:
        for answer in self.send_all(WriteParts(version, str(directory))):
            await answer
