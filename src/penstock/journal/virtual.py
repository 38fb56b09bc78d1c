"""The journal in a simulation: the same file and the same rows, written by the event loop after a virtual delay.

A simulated disk (`JournalDisk`) decides what a power failure leaves of it.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Protocol

from penstock.errors import RunFailed
from penstock.journal.schema import Entry, explain
from penstock.journal.writer import Journal, _Snapshot
from penstock.records.ids import PipelineName, RunId

SnapshotRow = tuple[int, str, int, bytes]


class JournalDisk(Protocol):
    """The simulated disk of the journal. It outlives the processes that write to it. Its faults raise OSError."""

    def commit_s(self) -> float:
        """How long the next commit takes."""
        ...

    def flush_journal(self, seq: int) -> None:
        """Makes everything up to event `seq` survive a power failure."""
        ...

    def replaces_snapshots(self, rows: list[SnapshotRow]) -> None:
        """Receives the rows that a commit, not flushed yet, deletes."""
        ...


def roll_back(path: Path, seq: int, snapshots: list[SnapshotRow]) -> None:
    """Leaves a journal as if nothing after event `seq` had been written."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM blocks WHERE last_seq > ?", (seq,))
        if connection.execute("DELETE FROM snapshots WHERE seq > ?", (seq,)).rowcount:
            connection.executemany("INSERT INTO snapshots VALUES (?, ?, ?, ?)", snapshots)


class VirtualJournal(Journal):
    """Needs a running loop. `kill` loses what was appended and not yet committed, as the end of a process does."""

    def __init__(self, path: Path | str, run_id: RunId, disk: JournalDisk) -> None:
        self._running = asyncio.get_running_loop()
        self._disk = disk
        self._due = self._flush_due = False
        self._time = self._running.time
        super().__init__(path, run_id)

    def _start(self) -> None:
        self._connection.execute("PRAGMA synchronous = OFF")  # the simulated disk decides what is durable

    def append(self, pipeline: PipelineName, at: float, event: bytes, decided: bytes = b"") -> int:
        seq = super().append(pipeline, at, event, decided)
        self._plan()
        return seq

    def snapshot(self, states: object) -> None:
        super().snapshot(states)  # type: ignore[arg-type]
        self._plan()

    def _plan(self) -> None:
        if self._due:
            return
        self._due = True
        try:
            delay_s = self._disk.commit_s()
        except OSError as error:
            self._running.call_later(0.0, self._refuse, error)
        else:
            self._running.call_later(delay_s, self._take_all)

    def _refuse(self, error: OSError) -> None:
        full = sqlite3.OperationalError("database or disk is full")
        full.sqlite_errorcode = sqlite3.SQLITE_FULL  # as the database itself does
        self.fail(explain(self.path, full) if error.errno == 28 else RunFailed(f"journal {self.path}: {error}"))

    def _take_all(self) -> None:
        self._due = False
        if self._closing.is_set() and self._lock_fd < 0:
            return
        entries: list[Entry] = []
        snapshot: _Snapshot | None = None
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, Entry):
                entries.append(item)
            elif item is not None:
                snapshot = item
        if snapshot is not None:
            self._disk.replaces_snapshots(self._connection.execute("SELECT * FROM snapshots").fetchall())
        self._commit(entries, snapshot)
        self._advance()
        self._flush_after(self._flush_every_s)

    def _request_flush(self) -> None:
        self._running.call_soon(self._flush_all)

    def _flush_after(self, delay_s: float) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._running.call_later(delay_s, self._flush_in_turn)

    def _flush_in_turn(self) -> None:
        self._flush_due = False
        self._flush_all()

    def _flush_all(self) -> None:
        if self._lock_fd < 0:
            return
        try:
            self._disk.flush_journal(self._committed_seq)
        except OSError:  # retried, as in the real journal
            self._flush_after(self._flush_every_s)
            return
        self._flushed_seq = self._committed_seq
        self._advance()

    def kill(self) -> None:
        """Simulates the end of the process: nothing more is written, and the lock is released."""
        if self._lock_fd >= 0:
            self._closing.set()
            self._connection.close()
            os.close(self._lock_fd)
            self._lock_fd = -1

    def close(self, timeout_s: float) -> None:
        if self._lock_fd >= 0:
            if self._failure is None:
                self._take_all()
            self.kill()
