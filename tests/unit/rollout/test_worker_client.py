"""Deliveries outlive the loop that made them: a worker that is put to sleep goes on living, with its leases."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

from penstock.errors import PeerLost, PenstockError
from penstock.records.ids import PromptIndex, SampleId, Version
from penstock.records.payload import PayloadRef
from penstock.records.prompt import PromptLease
from penstock.records.rollout import Rollout
from penstock.rollout.io.worker_client import WorkerClient
from penstock.runtime.tasks import Tasks
from penstock.wire.messages import AskLease, Deliver, Delivered, Leased


class Deaf:
    """A controller whose first answer is lost."""

    pipeline, member = "p", "p.rollout.0-1"

    def __init__(self) -> None:
        self.heard: list[Deliver] = []

    async def call(self, message: Deliver) -> Delivered:
        self.heard.append(message)
        if len(self.heard) == 1:
            await asyncio.sleep(3600)
        return Delivered()


async def cut_off(*, stopping: bool) -> list[Deliver]:
    """A delivery that is cancelled before its answer; what the controller heard of it."""
    controller = Deaf()
    process = cast(Any, SimpleNamespace(stop=SimpleNamespace(requested=stopping)))
    async with Tasks() as tasks:
        worker = WorkerClient(process, cast(Any, controller), tasks, cast(Any, None), cast(Any, None))
        delivery = asyncio.create_task(worker.deliver((), (), [SampleId(7)]))
        await asyncio.sleep(0)
        delivery.cancel()
        await asyncio.wait([delivery])
        assert delivery.cancelled()
    return controller.heard


async def test_a_delivery_that_was_cut_off_is_made_again() -> None:
    first, second = await cut_off(stopping=False)
    assert first == second
    assert second.returned == (SampleId(7),)


async def test_a_worker_that_stops_does_not_deliver_again() -> None:
    assert len(await cut_off(stopping=True)) == 1  # its leases go back when it unregisters


class Ring:
    """The ring of rank 0: remembers what it was told to free."""

    def __init__(self) -> None:
        self.discarded: list[PayloadRef] = []

    def discard(self, payloads: Iterable[PayloadRef]) -> None:
        self.discarded += payloads


async def test_unread_payloads_are_freed_in_the_rings_of_all_ranks() -> None:
    """The controller names them with a grant, expired ones this worker remembers, and refused ones of a delivery whose
    loop has ended have no other reader."""
    unread, expired, refused = (PayloadRef(f"ring-{rank}", 0, slot, 0, 0, 0) for slot, rank in enumerate((1, 0, 1)))
    leased = Leased((), "throttled", "running", discard=(unread,), oldest=Version(5))
    rollouts = [
        Rollout(SampleId(sample), Version(4), "d", 0.0, 1, payload) for sample, payload in enumerate((expired, refused))
    ]
    controller = cast(Any, SimpleNamespace(pipeline="p", member="p.rollout.0-1"))
    answers: list[Any] = [Delivered(refused=(SampleId(1),)), leased]

    async def call(message: Any) -> Any:
        return answers.pop(0)

    controller.call = call
    ring = Ring()
    elsewhere: list[PayloadRef] = []
    process = cast(Any, SimpleNamespace(stop=SimpleNamespace(requested=False)))
    async with Tasks() as tasks:
        worker = WorkerClient(process, controller, tasks, cast(Any, SimpleNamespace(version=0)), cast(Any, ring))
        worker.discard_elsewhere = elsewhere.extend
        await worker.deliver(rollouts, (), ())
        await worker.lease(1, 1.0)
    assert ring.discarded == elsewhere == [refused, unread, expired]


class Granting:
    """A controller that says these things, one after the other."""

    pipeline, member = "p", "p.rollout.0-1"

    def __init__(self, *answers: Leased | PenstockError) -> None:
        self._answers = list(answers)
        self.asked: list[int] = []

    async def call(self, message: AskLease) -> Leased:
        self.asked.append(message.request)
        answer = self._answers.pop(0)
        if isinstance(answer, PenstockError):
            raise answer
        return answer


async def test_a_request_keeps_its_number_until_a_grant_has_arrived() -> None:
    """A repeated call can be granted what the call before it was not: only the same number gets that answer again."""
    granted = Leased((PromptLease(PromptIndex(0), 0, (SampleId(7),), (0,), Version(0)),), "granted", "running")
    refused = Leased((), "version_too_old", "running")
    controller = Granting(refused, PeerLost("the answer was lost"), refused, granted, granted)
    process = cast(Any, SimpleNamespace(stop=SimpleNamespace(requested=False)))
    async with Tasks() as tasks:
        worker = WorkerClient(
            process, cast(Any, controller), tasks, cast(Any, SimpleNamespace(version=0)), cast(Any, None)
        )
        for _ in range(5):
            with contextlib.suppress(PeerLost):
                await worker.lease(1, 1.0)
    assert controller.asked == [0, 0, 0, 0, 1]
