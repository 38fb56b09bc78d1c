"""What a power failure leaves on the simulated disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.journal.reader import history, replay
from penstock.journal.virtual import VirtualJournal
from penstock.records.ids import PipelineName, RunId
from penstock.sim.disk import Disk
from penstock.sim.loop import virtual_loop
from penstock.sim.system import Conditions

A = PipelineName("a")
RUN = RunId("run")


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path, tmp_path / "journal.sqlite", Conditions(), 0.0, lambda: False)


def test_files_that_were_not_flushed_are_torn(disk: Disk, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "p0"
    folder.mkdir(parents=True)
    safe, torn = folder / "safe", folder / "torn"
    for path in (safe, torn):
        path.write_bytes(bytes(100))
    disk.flush(safe)
    assert not disk.holds(folder)
    disk.lose_power()
    assert (safe.stat().st_size, torn.stat().st_size) == (100, 50)
    assert disk.lost == [], "nothing said that it was flushed"


def test_a_flush_that_lied_is_listed_when_it_is_lost(tmp_path: Path) -> None:
    disk = Disk(tmp_path, tmp_path / "journal.sqlite", Conditions(flush_lies=True), 0.0, lambda: False)
    path = tmp_path / "weights" / "file"
    path.parent.mkdir()
    path.write_bytes(bytes(100))
    disk.flush(path)
    disk.flush_journal(7)
    assert disk.holds(path.parent)
    disk.lose_power()
    assert path.stat().st_size == 50
    assert disk.lost == ["weights/file", "events 1 to 7"]


def test_the_journal_ends_with_the_last_flushed_event_and_snapshot(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def main() -> None:
        journal = VirtualJournal(path, RUN, disk)

        async def write(events: int) -> None:
            for _ in range(events):
                await journal.committed(journal.append(A, 0.0, b"event"))

        await write(2)
        journal.snapshot({A: b"at 2"})
        await write(1)
        disk.flush_journal(3)
        await write(1)
        journal.snapshot({A: b"at 4"})
        await write(1)
        journal.kill()

    with virtual_loop(lambda offload, function: 0.0) as loop:
        loop.run_until_complete(main())
    assert (replay(path).seq, len([*history(path)])) == (4, 5)
    disk.lose_power()
    assert [entry.seq for entry in history(path)] == [1, 2, 3]
    restored = replay(path)
    assert (restored.seq, restored.states) == (2, {A: b"at 2"})


def test_the_journal_of_a_simulation_is_flushed_within_a_second(disk: Disk, tmp_path: Path) -> None:
    """As the real one; without that, a power failure would take everything since the last checkpoint."""

    async def main() -> None:
        journal = VirtualJournal(tmp_path / "journal.sqlite", RUN, disk)
        await journal.committed(journal.append(A, 0.0, b"early"))
        await asyncio.sleep(1.1)
        await journal.committed(journal.append(A, 1.1, b"late"))
        journal.kill()

    with virtual_loop(lambda offload, function: 0.0) as loop:
        loop.run_until_complete(main())
    assert [entry.seq for entry in history(tmp_path / "journal.sqlite")] == [1, 2]
    disk.lose_power()
    assert [entry.body for entry in history(tmp_path / "journal.sqlite")] == [b"early"]
