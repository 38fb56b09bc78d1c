"""The service and its journal: restored from snapshots, and ended by a disk that hangs or fails."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_service_steps import P, Room, T

from penstock.control.io.service import JOURNAL_TIMEOUT_S
from penstock.errors import RunFailed
from penstock.journal.reader import replay
from penstock.records.ids import MemberId, PipelineName, StepIndex
from penstock.runtime.tasks import Tasks
from penstock.wire import messages
from penstock.wire.messages import AckStep, AskBatch, Refused, Register


@contextlib.contextmanager
def room_in(folder: Path, **options: Any) -> Iterator[Room]:
    room = Room(folder, **options)
    try:
        yield room
    finally:
        with contextlib.suppress(RunFailed):
            room.close()


def state_of(room: Room) -> bytes:
    """Everything that a restarted controller must know of the pipeline."""
    return room.service.controller.snapshot()[P]


async def work(room: Room, step: int) -> None:
    """A worker and a trainer make one step."""
    await room.deliver(await room.lease(2))
    await room.service.call(AskBatch(P, T, step=StepIndex(step)))
    assert await room.service.call(AckStep(P, T, step=StepIndex(step))) == messages.Ok()


async def test_a_restarted_controller_restores_a_snapshot_and_the_events_after_it(tmp_path: Path) -> None:
    with room_in(tmp_path, snapshot_every=5) as room:
        await room.seat()
        await work(room, 0)
        room.service.tick()
        await room.service.settle()
        taken = room.journal.last_seq
        leased = await room.lease(1)
        room.service.tick()
        left, last = state_of(room), room.journal.last_seq
    restored = replay(room.journal.path)
    assert restored.seq == taken
    assert len(list(restored.entries)) == last - taken > 0
    with room_in(tmp_path, snapshot_every=5, new_session=False) as room:
        assert state_of(room) == left
        room.request = 2
        await room.deliver(leased)  # to the lease of the former life
        await work(room, 1)
        room.service.check()
        for _ in range(2):
            room.service.tick()
            await room.service.settle()
        left = state_of(room)
    assert replay(room.journal.path).seq > taken
    with room_in(tmp_path, new_session=False) as room:
        assert state_of(room) == left


async def test_snapshots_are_taken_every_so_many_events_and_not_at_every_tick(tmp_path: Path) -> None:
    with room_in(tmp_path, snapshot_every=5) as room:
        taken: list[int] = []
        room.journal.snapshot = lambda states: taken.append(room.journal.last_seq)  # type: ignore[method-assign]
        for number in range(12):
            await room.service.call(Register(P, MemberId(f"w{number}"), role="rollout", pid=1, host_id="host"))
            for _ in range(3):
                room.service.tick()
    assert taken
    assert all(after - before >= 5 for before, after in zip([0, *taken], taken, strict=False))
    assert len(taken) == len(set(taken))


@pytest.mark.parametrize(
    ("name", "state", "sentence"),
    [
        ("another", b"", r"has the pipelines \['another'\], which this configuration lacks"),
        (P, b"nonsense", r"the snapshot of p after event \d+ cannot be replayed"),
    ],
)
async def test_a_snapshot_that_does_not_fit_is_named(tmp_path: Path, name: str, state: bytes, sentence: str) -> None:
    with room_in(tmp_path) as room:
        await room.seat()
        room.journal.snapshot(room.service.controller.snapshot() | {PipelineName(name): state})
        await room.service.settle()
    with pytest.raises(RunFailed, match=sentence):
        Room(tmp_path, new_session=False)


async def test_a_disk_that_hangs_fails_the_run_and_every_call_that_waits(tmp_path: Path) -> None:
    release, entered = threading.Event(), threading.Event()
    with room_in(tmp_path) as room:
        await room.seat()
        commit, journal = room.journal._commit, room.journal

        def hang(*arguments: Any) -> None:
            entered.set()
            release.wait(30)
            commit(*arguments)

        journal._commit = hang  # type: ignore[method-assign]
        calling = asyncio.ensure_future(room.service.call(AskBatch(P, T, step=StepIndex(0))))
        leasing = asyncio.ensure_future(room.lease(2))
        await asyncio.to_thread(entered.wait, 20)
        room.service.tick()
        assert not room.service.failure
        assert not leasing.done()
        before = journal._time
        journal._time = lambda: before() + JOURNAL_TIMEOUT_S + 1.0  # type: ignore[method-assign]
        room.service.tick()
        assert "no write completed for 30 s; the disk hangs" in room.service.failure
        assert room.service.failed.is_set()
        with pytest.raises(AssertionError, match="the disk hangs"):  # the reply is no lease
            await asyncio.wait_for(leasing, 20)
        await asyncio.wait_for(calling, 20)
        again = await room.service.call(Register(P, MemberId("late"), role="rollout", pid=1, host_id="host"))
        assert isinstance(again, Refused)
        assert again.kind == "RunFailed"
        release.set()


async def test_an_instruction_whose_event_cannot_be_committed_is_not_executed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def fail(*arguments: Any) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with room_in(tmp_path) as room:
        await room.seat()
        async with Tasks() as tasks:
            tasks.spawn("service", room.service.run())
            while not room.service._instructions.empty():  # noqa: ASYNC110 - what the registrations left
                await asyncio.sleep(0.001)
            assert "p: rollout w joined" in caplog.text
            room.journal._commit = fail  # type: ignore[method-assign]
            reply = await room.service.call(Register(P, MemberId("w2"), role="rollout", pid=1, host_id="host"))
            assert isinstance(reply, Refused)
            await asyncio.wait_for(room.service.failed.wait(), 20)
            tasks.cancel()
        assert "disk I/O error" in room.service.failure
        assert "w2 joined" not in caplog.text
