"""Reads a journal: from the latest snapshot for a restart, or from the beginning for a story."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.journal.schema import Entry, check_snapshot, damaged, explained, open_to_read, unpack
from penstock.records.ids import PipelineName

NEXT_BLOCK = """
SELECT first_seq, last_seq, packed, checksum, body FROM blocks
WHERE first_seq >= coalesce((SELECT max(first_seq) FROM blocks WHERE first_seq <= ?), 0) AND last_seq > ?
ORDER BY first_seq LIMIT 1
"""


@dataclass(frozen=True)
class Replay:
    """The last committed state: restore `states`, then handle `entries` in order."""

    seq: int
    """The event after which the states were taken; 0 when there is no snapshot."""
    states: dict[PipelineName, bytes]
    entries: Iterator[Entry]
    """Every committed event after `seq`. Read it to its end, or close it, to release the file."""


def replay(path: Path | str) -> Replay:
    """Reads the data for a restart; the time it takes is bounded by the distance between snapshots."""
    path = Path(path)
    connection = open_to_read(path)
    try:
        with explained(path):
            newest = connection.execute("SELECT max(seq) FROM snapshots").fetchone()[0] or 0
            rows = connection.execute("SELECT * FROM snapshots WHERE seq = ?", (newest,)).fetchall()
        for row in rows:
            check_snapshot(path, *row)
    except BaseException:
        connection.close()
        raise
    return Replay(newest, {name: body for _, name, _, body in rows}, _entries(path, connection, newest))


def history(path: Path | str, after_seq: int = 0) -> Generator[Entry, None, None]:
    """Every event of the run after `after_seq`, in order, compacted or not. Safe on the journal of a live run.

    Close it, if it is not read to its end, to release the file.
    """
    path = Path(path)
    return _entries(path, open_to_read(path), after_seq)


def newest_seq(path: Path | str) -> int:
    """The number of the last committed event; 0 when there is none."""
    path = Path(path)
    connection = open_to_read(path)
    try:
        with explained(path):
            return connection.execute("SELECT max(last_seq) FROM blocks").fetchone()[0] or 0
    finally:
        connection.close()


def _entries(path: Path, connection: sqlite3.Connection, after_seq: int) -> Generator[Entry, None, None]:
    """Reads block by block: one long transaction would keep the writer's log growing."""
    seq = after_seq
    try:
        while True:
            with explained(path):
                row = connection.execute(NEXT_BLOCK, (seq + 1, seq)).fetchone()
            if row is None:
                break
            for entry in unpack(path, row):
                if entry.seq <= seq:
                    continue
                if entry.seq != seq + 1:
                    raise damaged(path, f"event {seq + 1}", "it is missing, but later ones exist")
                seq = entry.seq
                yield entry
    finally:
        connection.close()
