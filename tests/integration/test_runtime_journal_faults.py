"""The journal under a full disk, a hanging disk, and SIGKILL."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from penstock.errors import RunFailed
from penstock.journal import writer as writer_module
from penstock.journal.reader import history
from penstock.journal.schema import Entry
from penstock.journal.writer import Journal
from penstock.records.ids import PipelineName, RunId

A = PipelineName("a")
RUN = RunId("run-1")


async def test_a_full_disk_is_one_clear_sentence_and_loses_nothing_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path, RUN)
    pages = journal._connection.execute("PRAGMA page_count").fetchone()[0]
    journal._connection.execute(f"PRAGMA max_page_count = {pages + 40}")
    acknowledged: list[int] = []

    async def fill() -> None:
        for number in range(1000):
            seq = journal.append(A, float(number), bytes(1000))
            await journal.committed(seq)
            acknowledged.append(seq)

    with pytest.raises(RunFailed, match="the disk is full; everything acknowledged so far is safe"):
        await fill()
    assert 10 < len(acknowledged) < 1000
    with pytest.raises(RunFailed, match="disk is full"):
        journal.append(A, 0.0, b"more")
    with pytest.raises(RunFailed, match="disk is full"):
        journal.close(10)
    assert [entry.seq for entry in history(path)] == acknowledged
    again = Journal(path, RUN)
    assert again.last_seq == acknowledged[-1]
    await again.committed(again.append(A, 0.0, b"there is space again"))
    again.close(10)


@pytest.mark.parametrize("fault", ["deleted", "replaced by a copy", "replaced by another file"])
async def test_a_journal_that_is_not_the_one_on_disk_any_more_ends_the_run_with_that_sentence(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "CHECK_EVERY_S", 0.02)
    path = tmp_path / "journal.sqlite"
    journal = Journal(path, RUN)
    await journal.committed(journal.append(A, 0.0, b"before"))
    if fault == "deleted":
        path.unlink()
    else:
        other = tmp_path / "other"
        other.write_bytes(path.read_bytes() if fault == "replaced by a copy" else b"something else")
        os.replace(other, path)

    async def go_on() -> None:
        while True:
            await journal.committed(journal.append(A, 1.0, b"after"))
            await asyncio.sleep(0.01)

    with pytest.raises(RunFailed, match="was deleted or replaced during the run; events since then are lost"):
        await asyncio.wait_for(go_on(), 30)
    with contextlib.suppress(RunFailed):
        journal.close(10)


async def test_many_waiters_share_few_commits(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", RUN)
    for _ in range(5):
        await asyncio.gather(*(journal.committed(journal.append(A, 0.0, b"x")) for _ in range(200)))
    assert journal.commits <= 20
    journal.close(10)
    assert len(list(history(journal.path))) == 1000


async def test_waiting_out_of_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", RUN)
    seqs = [journal.append(A, 0.0, b"x") for _ in range(50)]
    async with asyncio.timeout(20):
        await asyncio.gather(*(journal.committed(seq) for seq in reversed(seqs)))
    journal.close(10)


async def test_a_hanging_disk_is_noticed_and_ends_every_wait(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", RUN)
    release, entered = threading.Event(), threading.Event()
    commit = journal._commit

    def hang(*arguments: object) -> None:
        entered.set()
        release.wait(30)
        commit(*arguments)  # type: ignore[arg-type]

    journal._commit = hang  # type: ignore[method-assign]
    waiting = asyncio.ensure_future(journal.committed(journal.append(A, 0.0, b"x")))
    await asyncio.to_thread(entered.wait, 20)
    assert not waiting.done()
    assert journal.uncommitted_for_s > 0
    journal.fail(RunFailed("the disk hangs"))
    with pytest.raises(RunFailed, match="hangs"):
        await waiting
    with pytest.raises(RunFailed, match="could not be written within"):
        journal.close(0.05)
    release.set()
    journal._writer.join(20)
    os.close(journal._lock_fd)


async def test_nothing_is_written_after_a_commit_that_failed(tmp_path: Path) -> None:
    """With a gap, the events behind it would be replayed into a state that never was."""
    journal = Journal(tmp_path / "journal.sqlite", RUN)
    release, entered = threading.Event(), threading.Event()
    commit = journal._commit

    def fail_once(entries: list[Entry], snapshot: object) -> None:
        if entries and entries[0].seq == 2:
            entered.set()
            release.wait(30)
            raise sqlite3.OperationalError("disk I/O error")
        commit(entries, snapshot)  # type: ignore[arg-type]

    journal._commit = fail_once  # type: ignore[method-assign]
    await journal.committed(journal.append(A, 0.0, b"first"))
    lost = journal.append(A, 1.0, b"lost")
    await asyncio.to_thread(entered.wait, 20)
    late = journal.append(A, 2.0, b"late")
    release.set()
    for seq in (lost, late):
        with pytest.raises(RunFailed, match="disk I/O error"):
            await asyncio.wait_for(journal.committed(seq), 20)
    with pytest.raises(RunFailed, match="disk I/O error"):
        journal.close(10)
    assert [entry.seq for entry in history(journal.path)] == [1]


async def test_who_awaits_a_flush_is_told_that_the_journal_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that commits and does not flush: an event that is not flushed is never reported as flushed."""
    refused = threading.Semaphore(0)

    def refuse(descriptor: int) -> None:
        refused.release()
        raise OSError("the disk does not flush")

    monkeypatch.setattr(writer_module.os, "fdatasync", refuse)
    journal = Journal(tmp_path / "journal.sqlite", RUN, flush_every_s=0.01)
    await journal.committed(journal.append(A, 0.0, b"first"))
    waiting = asyncio.ensure_future(journal.flushed())
    for _ in range(3):
        assert await asyncio.to_thread(refused.acquire, timeout=20)
    assert not waiting.done()
    assert journal.uncommitted_for_s > 0.0
    journal.fail(RunFailed("the disk hangs"))
    with pytest.raises(RunFailed, match="hangs"):
        await asyncio.wait_for(waiting, 20)
    journal.close(10)


async def test_readers_beside_a_writer_that_compacts_always_see_a_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "PACKED_EVENTS", 50)
    journal = Journal(tmp_path / "journal.sqlite", RUN, flush_every_s=0.01)
    ended = threading.Event()

    def read() -> list[int]:
        lengths = [0]
        while not ended.is_set():
            bodies = [entry.body for entry in history(journal.path)]
            assert bodies == [b"%d" % number for number in range(len(bodies))]
            lengths.append(len(bodies))
        return lengths

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        readers = [group.create_task(asyncio.to_thread(read)) for _ in range(2)]
        try:
            for number in range(1500):
                seq = journal.append(A, 0.0, b"%d" % number)
                if number % 5 == 0:
                    await journal.committed(seq)
                if number % 100 == 0:
                    journal.snapshot({A: b"state"})
        finally:
            ended.set()
    journal.close(10)
    for reader in readers:
        assert reader.result() == sorted(reader.result())
        assert reader.result()[-1] > 0
    assert len(list(history(journal.path))) == 1500


WRITER = """
    import asyncio, sys
    from penstock.journal.writer import Journal

    async def main():
        journal = Journal(sys.argv[1], "run-1")
        print("ready", journal.last_seq, flush=True)
        while True:
            seqs = [journal.append("a", 0.0, b"event") for _ in range(7)]
            await journal.committed(seqs[-1])
            print(seqs[-1], flush=True)

    asyncio.run(main())
"""


def test_sigkill_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    acknowledged = 0
    for life in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            ready, found = writer.stdout.readline().split()
            assert ready == "ready"
            assert int(found) >= acknowledged
            for _ in range(3 + 17 * life):
                acknowledged = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            for line in writer.stdout:  # told before it died, read after
                acknowledged = int(line) if line.endswith("\n") else acknowledged
        assert writer.returncode == -signal.SIGKILL
        assert len(list(history(path))) >= acknowledged
    assert acknowledged > 500


async def test_a_flush_is_made_at_once_when_one_is_asked_for(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", RUN, flush_every_s=3600.0)
    async with asyncio.timeout(20):
        for round_of_events in (1, 2):
            for number in range(50):
                journal.append(A, float(number), b"event %d" % number)
            await asyncio.gather(journal.flushed(), journal.flushed())
            folder = tmp_path / f"after {round_of_events}"
            folder.mkdir()
            shutil.copy(journal.path, folder)  # without the log, which a power failure may take
            assert len(list(history(folder / "journal.sqlite"))) == 50 * round_of_events
        await journal.flushed()
        assert journal.uncommitted_for_s == 0.0
    assert not journal._flush_waiters, "those that were released are still listed"
    journal.close(10)


async def test_events_are_flushed_also_while_a_reader_uses_an_older_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader keeps the checkpoint from moving, and so from flushing, the newer part of the log."""
    journal = Journal(tmp_path / "journal.sqlite", RUN, flush_every_s=3600.0)
    log = journal.path.with_name("journal.sqlite-wal")
    flushed_bytes: list[int] = []
    fdatasync = os.fdatasync

    def record(descriptor: int) -> None:
        assert os.fstat(descriptor).st_ino == log.stat().st_ino
        flushed_bytes.append(os.fstat(descriptor).st_size)
        fdatasync(descriptor)

    monkeypatch.setattr(writer_module.os, "fdatasync", record)
    reader = sqlite3.connect(journal.path, isolation_level=None)
    async with asyncio.timeout(20):
        await journal.committed(journal.append(A, 0.0, b"before"))
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM blocks").fetchone()
        await journal.committed(journal.append(A, 1.0, bytes(100_000)))
        with contextlib.closing(sqlite3.connect(journal.path)) as another:
            _, frames, moved = another.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        assert moved < frames, "the reader holds the checkpoint back"
        await journal.flushed()
    assert flushed_bytes, "the log was never flushed"
    assert flushed_bytes[-1] == log.stat().st_size
    reader.close()
    journal.close(10)
