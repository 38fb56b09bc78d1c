"""Writes the journal: an append returns at once, commits are grouped, and only committed events are guaranteed.

`append` numbers the event and queues it. One thread takes everything queued, writes it as one row in one transaction,
and then releases all callers of `committed`. So a hundred calls that arrive together cost one commit, and the event
loop never waits for a disk.

Loss of acknowledged events: by SIGKILL of any process, none (the pages are in the kernel). By a power failure or a
kernel crash, the events since the last flush. A second thread flushes every `flush_every_s`, and when a caller awaits
`flushed`.
"""

from __future__ import annotations

import asyncio
import fcntl
import heapq
import itertools
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.errors import LocalProtocolError, PenstockError, RunFailed
from penstock.journal import schema
from penstock.journal.schema import WHAT_TO_DO, Entry, checksum, explain, explained, pack, unpack
from penstock.records.ids import PipelineName, RunId

logger = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 10.0
CLOSE_ORDER_S = 5.0
CHECK_EVERY_S = 1.0
"""How often the file is checked to be in place."""
PACKED_EVENTS = 4096
"""Events per compressed block: large enough to compress well, small enough to pack between two commits."""
MAX_LOG_BYTES = 32 * 1024 * 1024
"""Above this size the write-ahead log is restarted, which pauses the writer once."""


class _Snapshot(msgspec.Struct):
    seq: int
    states: dict[PipelineName, bytes]


class Journal:
    """The one writer of a run's journal. All methods but `close` must be called from the thread of the event loop."""

    _time = staticmethod(time.monotonic)

    def __init__(self, path: Path | str, run_id: RunId, *, flush_every_s: float = 1.0) -> None:
        """Opens or creates the journal of this run. Raises if it is in use, corrupt, or not of this run."""
        self.path = Path(path)
        self._flush_every_s = flush_every_s
        self._lock_fd = _lock(self.path)
        try:
            with explained(self.path):
                self._connection = self._open(run_id)
                last = self._connection.execute("SELECT max(last_seq) FROM blocks").fetchone()[0] or 0
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._inode = os.stat(self.path).st_ino
        self.last_seq: int = last
        """The number of the newest event, committed or not."""
        self._committed_seq: int = last
        self._queue: queue.SimpleQueue[Entry | _Snapshot | None] = queue.SimpleQueue()
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._waits = itertools.count()  # breaks ties in the heap: futures do not compare
        self._loop: asyncio.AbstractEventLoop | None = None
        self._oldest_append = 0.0
        self._flushed_seq = 0
        self._flush_waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._flush_requested_at: float | None = None
        self._flush_requested = threading.Event()
        self._failure: PenstockError | None = None
        self._closing = threading.Event()
        self.commits = 0
        self._start()

    def _start(self) -> None:
        self._writer = threading.Thread(target=self._write, name="journal-writer", daemon=True)
        self._flusher = threading.Thread(target=self._flush, name="journal-flusher", daemon=True)
        self._writer.start()
        self._flusher.start()

    def append(self, pipeline: PipelineName, at: float, event: bytes, decided: bytes = b"") -> int:
        """Queues the event and returns its number; it is guaranteed only after `committed` returns.

        `decided` holds the decisions that followed, for stories only: replay decides again and does not read it.
        """
        if self._failure is not None:
            raise self._failure
        if self._closing.is_set():
            raise LocalProtocolError(f"journal {self.path} is closed and takes no more events")
        if self._committed_seq == self.last_seq:
            self._oldest_append = self._time()
        self.last_seq += 1
        self._queue.put(Entry(self.last_seq, pipeline, at, event, decided))
        return self.last_seq

    async def committed(self, seq: int) -> None:
        """Returns once everything up to event `seq` will survive the death of this process."""
        if self._committed_seq >= seq:
            return
        loop = self._loop = asyncio.get_running_loop()
        if self._failure is not None:
            raise self._failure
        if self._committed_seq >= seq:  # may have happened before the writer could see the loop
            return
        future: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._waiters, (seq, next(self._waits), future))
        await future

    async def flushed(self) -> None:
        """Returns once everything appended so far will survive a power failure."""
        seq = self.last_seq
        await self.committed(seq)
        loop = self._loop = asyncio.get_running_loop()
        if self._failure is not None:
            raise self._failure
        future: asyncio.Future[None] = loop.create_future()
        self._flush_waiters.append((seq, future))
        if self._flush_requested_at is None:
            self._flush_requested_at = self._time()
        self._request_flush()
        await future

    def _request_flush(self) -> None:
        self._flush_requested.set()

    def snapshot(self, states: Mapping[PipelineName, bytes]) -> None:
        """Queues the states of all machines as they are after the newest event; replay will start from them.

        Older events are then joined into compressed blocks, a few at a time: they are kept for stories, and not
        read at a restart.
        """
        if self._failure is None:
            self._queue.put(_Snapshot(self.last_seq, dict(states)))

    @property
    def uncommitted_for_s(self) -> float:
        """How long the oldest queued event, or a flush, has been waiting; several seconds mean that the disk hangs."""
        since = [self._oldest_append] if self._committed_seq < self.last_seq else []
        since += [self._flush_requested_at] if self._flush_requested_at is not None else []
        return self._time() - min(since) if since else 0.0

    def fail(self, failure: PenstockError) -> None:
        """Ends every present and future wait with `failure`: the journal can guarantee nothing more."""
        self._failure = self._failure or failure
        self._advance()

    def close(self, timeout_s: float) -> None:
        """Commits what is queued and closes the file; raises `RunFailed` when that cannot be done in time."""
        if not self._closing.is_set():
            self._closing.set()
            self._flush_requested.set()
            self._queue.put(None)
        deadline = self._time() + timeout_s
        for thread in (self._flusher, self._writer):
            thread.join(max(0.0, deadline - self._time()))
        if self._writer.is_alive() or self._flusher.is_alive():
            raise RunFailed(
                f"journal {self.path}: {self.last_seq - self._committed_seq} events could not be written within "
                f"{timeout_s:g} s; the disk hangs"
            )
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
        if self._failure is not None and self._committed_seq < self.last_seq:
            raise self._failure

    def _open(self, run_id: RunId) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=16
        )
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchone()
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            if not schema.exists(connection):
                schema.create(connection, run_id)
            schema.verify(connection, self.path, run_id)
        except BaseException:
            connection.close()
            raise
        return connection

    def _write(self) -> None:
        """Consumes the queue; produces commits; ends on `close`, or at the first error."""
        ending = False
        packable_seq = 0
        while not ending:
            item = self._queue.get()
            entries: list[Entry] = []
            snapshot: _Snapshot | None = None
            while True:
                if item is None:
                    ending = True
                elif isinstance(item, Entry):
                    entries.append(item)
                else:
                    snapshot = item
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            try:
                self._commit(entries, snapshot)
                packable_seq = snapshot.seq if snapshot else packable_seq
                while packable_seq and not ending and self._queue.empty():
                    if not self._pack(packable_seq):
                        packable_seq = 0
            except Exception as error:  # noqa: BLE001 - any error must reach the waiting callers
                self._failure = self._failure or explain(self.path, error)
                logger.error("%s", self._failure)
                ending = True
                self._notify()
        self._flusher.join(
            CLOSE_ORDER_S
        )  # the last connection to close removes the log; if both close at once, neither does
        self._connection.close()

    def _commit(self, entries: list[Entry], snapshot: _Snapshot | None) -> None:
        if not entries and snapshot is None:
            return
        execute = self._connection.execute
        if snapshot is not None:
            execute("BEGIN IMMEDIATE")
        try:
            if entries:
                execute("INSERT INTO blocks VALUES (?, ?, ?, ?, ?)", pack(entries, compress=False))
            if snapshot is not None:
                seq, states = snapshot.seq, snapshot.states
                rows = [(seq, name, checksum(body, seq, str(name)), body) for name, body in states.items()]
                self._connection.executemany("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?)", rows)
                execute("DELETE FROM snapshots WHERE seq < ?", (snapshot.seq,))
                execute("COMMIT")
        except sqlite3.Error:
            if self._connection.in_transaction:
                execute("ROLLBACK")
            raise
        self.commits += 1
        if entries:
            self._committed_seq = entries[-1].seq
            self._oldest_append = self._time()
            self._notify()

    def _pack(self, upto_seq: int) -> bool:
        """Joins one run of small blocks; True while there are more."""
        rows = self._connection.execute(
            "SELECT first_seq, last_seq, packed, checksum, body FROM blocks WHERE packed = 0 AND last_seq <= ? "
            "ORDER BY last_seq LIMIT ?",
            (upto_seq, PACKED_EVENTS),
        ).fetchall()
        entries: list[Entry] = []
        for row in rows:
            entries += unpack(self.path, row)
            if len(entries) >= PACKED_EVENTS:
                break
        if not entries:
            return False
        first, last = entries[0].seq, entries[-1].seq
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        try:
            execute("DELETE FROM blocks WHERE first_seq BETWEEN ? AND ?", (first, last))
            execute("INSERT INTO blocks VALUES (?, ?, ?, ?, ?)", pack(entries, compress=True))
            execute("COMMIT")
        except sqlite3.Error:
            if self._connection.in_transaction:
                execute("ROLLBACK")
            raise
        return len(entries) >= PACKED_EVENTS

    def _flush(self) -> None:
        """Moves the log into the database and to the disk, so that the writer never has to wait for a flush."""
        try:
            connection = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        except sqlite3.Error as error:
            self._failure = self._failure or explain(self.path, error)  # `flushed` would wait indefinitely
            logger.error("%s", self._failure)
            self._notify()
            return
        flushed, flushed_at = -1, self._time()
        log = self.path.with_name(f"{self.path.name}-wal")
        while True:
            self._flush_requested.wait(min(self._flush_every_s, CHECK_EVERY_S))
            self._flush_requested.clear()
            if self._closing.is_set() or self._failure is not None:
                break
            if not self._is_in_place():
                self._failure = RunFailed(
                    f"journal {self.path} was deleted or replaced during the run; events since then are lost. "
                    + WHAT_TO_DO.format(self.path.parent)
                )
                logger.error("%s", self._failure)
                self._notify()
                break
            if not self._flush_waiters and (self.commits == flushed or self._time() - flushed_at < self._flush_every_s):
                continue
            flushed_at = self._time()
            flushed, seq = self.commits, self._committed_seq
            try:
                mode = "RESTART" if log.stat().st_size > MAX_LOG_BYTES else "PASSIVE"
                _fdatasync(log)  # a checkpoint does not flush while a reader uses an older snapshot
                connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
                self._flushed_seq = seq
                self._notify()
            except (sqlite3.Error, OSError) as error:
                logger.warning("journal %s could not be flushed: %s", self.path, error)
        connection.close()

    def _is_in_place(self) -> bool:
        """Whether the path still refers to the file that is written."""
        try:
            return os.stat(self.path).st_ino == self._inode
        except OSError:
            return False

    def _notify(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._advance)

    def _advance(self) -> None:
        committed, failure = self._committed_seq, self._failure
        while self._waiters and (failure is not None or self._waiters[0][0] <= committed):
            seq, _, future = heapq.heappop(self._waiters)
            if future.done():
                continue
            if seq <= committed:
                future.set_result(None)
            elif failure is not None:
                future.set_exception(failure)
        if not self._flush_waiters:
            return
        left: list[tuple[int, asyncio.Future[None]]] = []
        for seq, future in self._flush_waiters:
            if future.done():
                continue
            if seq <= self._flushed_seq:
                future.set_result(None)
            elif failure is not None:
                future.set_exception(failure)
            else:
                left.append((seq, future))
        self._flush_waiters = left
        self._flush_requested_at = self._flush_requested_at if left else None

    def __repr__(self) -> str:
        return (
            f"Journal({str(self.path)!r}, last_seq={self.last_seq}, committed={self._committed_seq}, {self._failure})"
        )


def _fdatasync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def is_in_use(path: Path) -> bool:
    """Whether a controller has this journal open."""
    try:
        os.close(_lock(path))
    except RunFailed:
        return True
    return False


def _lock(path: Path) -> int:
    """Locks the journal, as two writers would mix two histories. The kernel releases the lock when its holder ends."""
    try:
        fd = os.open(path.with_name(f"{path.name}-lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RunFailed(f"journal {path} cannot be opened: {error}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise RunFailed(
            f"journal {path} is in use: another controller of this run is alive. End it first, or wait for it"
        ) from None
    return fd
