"""Opening a journal: what is accepted, and what each refusal says."""

from __future__ import annotations

import random
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from penstock.errors import ConfigError, LocalProtocolError, RunFailed
from penstock.journal import schema
from penstock.journal.reader import history, replay
from penstock.journal.schema import Entry, create, pack, unpack
from penstock.journal.writer import Journal
from penstock.records.ids import PipelineName, RunId

A = PipelineName("a")
RUN = RunId("run-1")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    journal = Journal(path, RUN)
    yield journal
    journal.close(10)


def write(path: Path, count: int) -> None:
    journal = Journal(path, RUN)
    for number in range(count):
        journal.append(A, float(number), b"%d" % number)
    journal.close(10)


def test_what_was_appended_is_read_back_in_order(path: Path) -> None:
    write(path, 100)
    entries = list(history(path))
    assert [entry.seq for entry in entries] == list(range(1, 101))
    assert [entry.body for entry in entries] == [b"%d" % number for number in range(100)]
    assert {entry.pipeline for entry in entries} == {A}


def test_a_journal_that_was_closed_is_one_file_and_its_lock(path: Path) -> None:
    for _ in range(5):
        write(path, 3)
        assert sorted(file.name for file in path.parent.iterdir()) == ["journal.sqlite", "journal.sqlite-lock"]


def test_numbering_goes_on_after_reopening(path: Path) -> None:
    write(path, 3)
    write(path, 2)
    assert [entry.seq for entry in history(path)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("version", "age"), [(1, "an older"), (99, "another")])
def test_another_version_is_named_in_the_refusal(path: Path, version: int, age: str) -> None:
    write(path, 1)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(version),))
        connection.execute("DELETE FROM meta WHERE key = 'checksum'")
        connection.commit()
    sentence = f"{age} version of Penstock: it has journal version {version}"
    with pytest.raises(ConfigError, match=sentence):
        Journal(path, RUN)
    with pytest.raises(ConfigError, match=sentence):
        replay(path)


def test_another_run_is_refused(path: Path) -> None:
    write(path, 1)
    with pytest.raises(ConfigError, match="belongs to run run-1"):
        Journal(path, RunId("run-2"))


def test_a_file_that_is_no_database_is_called_corrupt(path: Path) -> None:
    path.write_bytes(b"this is not a database, it is a sentence" * 100)
    with pytest.raises(RunFailed, match="damaged"):
        Journal(path, RUN)
    with pytest.raises(RunFailed, match="damaged"):
        replay(path)


def test_a_database_of_something_else_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
        connection.commit()
    with pytest.raises(RunFailed, match="not a journal"):
        history(path)


def test_overwritten_pages_are_called_corrupt(path: Path) -> None:
    write(path, 5000)
    body = bytearray(path.read_bytes())
    body[8192:] = b"\xa5" * (len(body) - 8192)
    path.write_bytes(body)
    with pytest.raises(RunFailed, match="damaged"):
        list(history(path))


def test_a_missing_event_is_noticed(path: Path) -> None:
    for _ in range(3):
        write(path, 2)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM blocks WHERE first_seq = 3")
        connection.commit()
    with pytest.raises(RunFailed, match="event 3 cannot be trusted"):
        list(history(path))


def test_a_damaged_block_is_named(path: Path) -> None:
    first, last, packed, checksum, body = pack([Entry(7, PipelineName("name"), 0.0, b"body")], compress=False)
    for damage in (
        (first, last, packed, checksum, body.replace(b"name", b"nane")),
        (first, last, 1, checksum, body),
        (first + 1, last, packed, checksum, body),
        (first, last, packed, checksum ^ 1, body),
    ):
        with pytest.raises(RunFailed, match=r"damaged: events \d to 7 cannot be trusted.*restore the file from a copy"):
            unpack(path, damage)


@pytest.mark.parametrize("state", ["closed", "killed"])
def test_no_flipped_bit_is_replayed_into_another_state(tmp_path: Path, state: str) -> None:
    """It is found, or lies where it changes nothing. In the log of a killed writer the database itself stops at the
    first damaged transaction, as after a torn write."""
    path = tmp_path / "journal.sqlite"
    journal = Journal(path, RUN, flush_every_s=0.01)
    for number in range(300):
        journal.append(A, float(number), b"event %d " % number + bytes(number % 50), b"decided")
        if number == 150:
            journal.snapshot({A: b"a state" * 40})
        if number % 10 == 0:
            wait_for_commit(journal)
    wait_for_commit(journal)
    files = [path]
    if state == "killed":
        folder = tmp_path / "copy"
        folder.mkdir()
        files = [path, path.with_name("journal.sqlite-wal")]
        for file in files:
            shutil.copy(file, folder / file.name)
        journal.close(10)
        path = folder / "journal.sqlite"
        files = [folder / file.name for file in files]
    else:
        journal.close(10)
    intact = {file: file.read_bytes() for file in files}
    expected = read_all(path)
    source, found = random.Random(0), 0
    for _ in range(300):
        file = source.choice(files)
        body = bytearray(intact[file])
        body[source.randrange(len(body))] ^= 1 << source.randrange(8)
        for other, whole in intact.items():
            other.write_bytes(whole)
            other.with_name("journal.sqlite-shm").unlink(missing_ok=True)
        file.write_bytes(body)
        try:
            now = read_all(path)
        except (RunFailed, ConfigError):
            found += 1
            continue
        if file.name.endswith("-wal"):
            assert now[1] == expected[1][: len(now[1])] or now[0] != expected[0]
        else:
            assert now == expected
    assert found > 50 or state == "killed"


def wait_for_commit(journal: Journal) -> None:
    deadline = time.monotonic() + 30
    while journal._committed_seq < journal.last_seq:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def read_all(path: Path) -> tuple[dict, list[Entry]]:
    story = replay(path)
    return {"seq": story.seq, **story.states}, list(story.entries)


def test_blocks_survive_packing(path: Path) -> None:
    entries = [Entry(1, A, 0.5, b"x", b"y"), Entry(2, A, 0.75, b"")]
    for compress in (False, True):
        assert unpack(path, pack(entries, compress=compress)) == entries


def test_a_small_block_does_not_fill_the_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = pack([Entry(number, A, 1.0, bytes(1 << 20)) for number in range(1, 4)], compress=True)
    assert len(many[4]) < 1 << 14
    assert len(unpack(path, many)) == 3
    monkeypatch.setattr(schema, "MOST_BYTES", 1 << 21)
    with pytest.raises(RunFailed, match="more than 2097152 bytes"):
        unpack(path, many)


def test_a_block_of_too_many_events_is_not_read(path: Path) -> None:
    body = b"\xdd" + (schema.MOST_EVENTS + 1).to_bytes(4, "big")  # the header of an array; its events do not follow
    first, last = 1, schema.MOST_EVENTS + 1
    with pytest.raises(RunFailed, match="length <= 1048576"):
        unpack(path, (first, last, 0, schema.checksum(body, first, last, 0), body))


def test_two_writers_are_refused(journal: Journal, path: Path) -> None:
    with pytest.raises(RunFailed, match="in use"):
        Journal(path, RUN)


def test_no_journal_at_all(path: Path) -> None:
    with pytest.raises(RunFailed, match="no journal"):
        replay(path)


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="cannot be opened"):
        Journal(tmp_path / "nowhere" / "journal.sqlite", RUN)


def test_nothing_is_taken_after_closing(path: Path) -> None:
    journal = Journal(path, RUN)
    journal.close(10)
    with pytest.raises(LocalProtocolError, match="closed"):
        journal.append(A, 0.0, b"late")


def test_a_path_with_odd_characters(tmp_path: Path) -> None:
    folder = tmp_path / "run #1? 100%"
    folder.mkdir()
    write(folder / "journal.sqlite", 2)
    assert len(list(history(folder / "journal.sqlite"))) == 2


def test_the_document_names_every_table_and_column() -> None:
    document = (Path(__file__).parents[3] / "docs" / "protocols" / "journal.md").read_text()
    with closing(sqlite3.connect(":memory:")) as connection:
        create(connection, RUN)
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = {table: [row[1] for row in connection.execute(f"PRAGMA table_info({table})")] for table in tables}
        keys = [key for (key,) in connection.execute("SELECT key FROM meta")]
    for table, names in columns.items():
        row = next(line for line in document.splitlines() if line.startswith(f"| `{table}`"))
        for name in keys if table == "meta" else names:
            assert f"`{name}`" in row
    assert str(list(Entry.__struct_fields__)).replace("'", "") in document
