"""The journal in a simulation: the same file and the same rows, written by the loop itself after a virtual delay."""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
from collections.abc import Callable
from pathlib import Path

from penstock.errors import RunFailed
from penstock.journal.schema import Entry, explain
from penstock.journal.writer import Journal, _Snapshot
from penstock.records.ids import PipelineName, RunId


class VirtualJournal(Journal):
    """Needs a running loop. What was appended and not yet committed is lost with `kill`, as with the process."""

    def __init__(self, path: Path | str, run_id: RunId, commit_s: Callable[[], float]) -> None:
        """`commit_s` says how long the next commit takes; an OSError it raises is the disk's."""
        self._running = asyncio.get_running_loop()
        self._commit_s = commit_s
        self._due = False
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
            delay_s = self._commit_s()
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
        self._commit(entries, snapshot)
        self._advance()

    def kill(self) -> None:
        """The process is gone: nothing more is written, and the lock is free."""
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
