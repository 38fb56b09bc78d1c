"""Snapshots bound what a restart reads; compaction keeps what a story needs."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from penstock.journal import writer as writer_module
from penstock.journal.reader import history, replay
from penstock.journal.schema import checksum
from penstock.journal.writer import Journal
from penstock.records.ids import PipelineName, RunId

A, B = PipelineName("a"), PipelineName("b")
RUN = RunId("run-1")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def blocks(path: Path) -> list[tuple[int, int, int]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT first_seq, last_seq, packed FROM blocks ORDER BY first_seq").fetchall()


def test_without_a_snapshot_everything_is_replayed(path: Path) -> None:
    journal = Journal(path, RUN)
    journal.append(A, 1.0, b"one")
    journal.close(10)
    found = replay(path)
    assert (found.seq, found.states) == (0, {})
    assert [entry.body for entry in found.entries] == [b"one"]


def test_replay_starts_at_the_newest_snapshot(path: Path) -> None:
    journal = Journal(path, RUN)
    journal.append(A, 1.0, b"one")
    journal.snapshot({A: b"old"})
    journal.append(B, 2.0, b"two")
    journal.snapshot({A: b"state of a", B: b"state of b"})
    journal.append(A, 3.0, b"three")
    journal.close(10)
    found = replay(path)
    assert found.seq == 2
    assert found.states == {A: b"state of a", B: b"state of b"}
    assert [(entry.seq, entry.body) for entry in found.entries] == [(3, b"three")]
    assert [entry.body for entry in history(path)] == [b"one", b"two", b"three"]


def test_compaction_joins_blocks_and_loses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "PACKED_EVENTS", 64)
    for life in range(20):  # every life leaves at least one block of its own
        journal = Journal(path, RUN)
        for number in range(10):
            journal.append(A, float(life), b"event %d" % (10 * life + number))
        journal.close(10)
    before = [entry.body for entry in history(path)]
    assert len(blocks(path)) >= 20
    journal = Journal(path, RUN)
    journal.snapshot({A: b"state"})
    while journal._writer.is_alive() and any(not packed for _, _, packed in blocks(path)):
        pass  # compaction goes on in the writer's idle time; the test's own limit bounds this
    journal.append(A, 21.0, b"after")
    journal.close(10)
    packed = [block for block in blocks(path) if block[2]]
    assert 1 <= len(packed) <= 4
    assert packed[0][0] == 1
    assert packed[-1][1] == 200
    assert [entry.body for entry in history(path)] == [*before, b"after"]
    assert [entry.body for entry in replay(path).entries] == [b"after"]


def test_a_replay_that_begins_inside_a_packed_block(path: Path) -> None:
    journal = Journal(path, RUN)
    for number in range(10):
        journal.append(A, 0.0, b"%d" % number)
    journal.close(10)
    with closing(sqlite3.connect(path)) as connection:
        row = (4, "a", checksum(b"\0", 4, "a"), b"\0")
        connection.execute("INSERT INTO snapshots VALUES (?, ?, ?, ?)", row)
        connection.commit()
    assert [entry.seq for entry in replay(path).entries] == [5, 6, 7, 8, 9, 10]


def test_a_live_journal_can_be_read(path: Path) -> None:
    journal = Journal(path, RUN)
    journal.append(A, 0.0, b"x")
    while not list(history(path)):
        pass
    journal.append(A, 0.0, b"y")
    journal.close(10)
    assert len(list(history(path))) == 2


def test_a_read_only_directory_can_be_read(path: Path) -> None:
    journal = Journal(path, RUN)
    journal.append(A, 0.0, b"x")
    journal.close(10)
    path.parent.chmod(0o500)
    try:
        assert len(list(history(path))) == 1
    finally:
        path.parent.chmod(0o700)
