"""A mapped ring file: tables, locks and liveness. Shared by the producer and the readers of a ring.

Locks are the kernel's (open-file-description record locks on bytes beyond any real file), so a process that dies at any
instruction releases all of them. Three groups of bytes are locked: one of the writer during its lifetime, one per
reader process during its lifetime, and one per slot for the few microseconds of a transition. Liveness is therefore
never guessed from a pid.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import threading
import time
import weakref
from pathlib import Path

import numpy as np

from penstock.errors import LocalProtocolError, RemoteProtocolError, Stale, Transient
from penstock.payload.io.huge_pages import map_shared
from penstock.payload.ring import EXTENT, HEADER_BYTES, READER, READER_ORPHANS_OFFSET, Header, check_name
from penstock.payload.slot import MAX_READERS, STATE_MASK, SlotState, reader_of, reclaim

DIRECTORY = "/dev/shm"
SLOT_LOCK_TIMEOUT_S = 2.0

_FLOCK = struct.Struct("hhqqi4x")
_WRITER_BYTE = 1 << 48
_READER_BYTES = _WRITER_BYTE + 1
_SLOT_BYTES = 1 << 49


def _flock(kind: int, byte: int, count: int = 1) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, byte, count, 0)


def _try_lock(fd: int, lock: bytes) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def _is_locked(fd: int, byte: int) -> bool:
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, byte))
    return _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK


def opened(mapping: Mapping) -> None:
    """Replaced in simulations, which close the mappings of a process that they kill, as the kernel does."""


class Mapping:
    """One mapping of a ring, and the file description that holds this process's locks on it.

    Takes ownership of `fd`. The locks have a separate file description (`self.fd`): the mapped one stays open as long
    as the mapping, in a forked child too.

    Stores of one word are single aligned 8-byte stores and commit a transition; everything else is written before the
    word that makes it visible.
    """

    def __init__(self, path: Path, fd: int, header: Header) -> None:
        self.path = path
        self.header = header
        self.layout = header.layout
        self.memory = map_shared(fd, self.layout.total_bytes)
        self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        os.close(fd)
        self.bytes = self.memory.data
        self.word_array = np.frombuffer(self.bytes, np.uint64, header.slots, self.layout.words)
        self._words = self.bytes[self.layout.words : self.layout.words + 8 * header.slots].cast("Q")
        self._transition = threading.Lock()
        self._readonly = self.bytes.toreadonly()
        self.closed = False
        _open_mappings.add(self)
        opened(self)

    def __repr__(self) -> str:
        return f"<Mapping {self.path.name}{' closed' if self.closed else ''}>"

    @staticmethod
    def open(name: str, directory: str) -> Mapping:
        """Maps a ring. Raises `Stale` when it is gone, `RemoteProtocolError` when the file is no ring of this user."""
        path = Path(directory) / check_name(name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise Stale(f"ring {name} does not exist on this host (any more)") from error
        except OSError as error:
            raise RemoteProtocolError(f"ring {name} cannot be opened: {error.strerror}") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise RemoteProtocolError(f"ring {name} is not a private file of this user; refusing to map it")
            return Mapping(path, fd, Header.unpack(os.pread(fd, HEADER_BYTES, 0), status.st_size))
        except BaseException:
            os.close(fd)
            raise

    # Words and tables

    def load(self, slot: int) -> int:
        return self._words[slot]

    def store(self, slot: int, word: int) -> None:
        self._words[slot] = word

    def extent(self, slot: int) -> tuple[int, int, int]:
        """Offset in the arena, length and digest of the body in `slot`."""
        return EXTENT.unpack_from(self.bytes, self.layout.extents + slot * EXTENT.size)

    def store_extent(self, slot: int, offset: int, size_bytes: int, digest: int) -> None:
        EXTENT.pack_into(self.bytes, self.layout.extents + slot * EXTENT.size, offset, size_bytes, digest)

    def body(self, offset: int, size_bytes: int) -> memoryview:
        """The writable memory of a body, for the producer."""
        start = self.layout.arena + offset
        return self.bytes[start : start + size_bytes]

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """The read-only memory of a body, for readers."""
        start = self.layout.arena + offset
        return self._readonly[start : start + size_bytes]

    def lock(self, first: int, count: int = 1) -> None:
        """Prevents every other process and thread from moving a run of slots out of READY or READING.

        Held for microseconds, released with `unlock`.
        """
        self._transition.acquire()
        try:
            if self.closed:
                raise LocalProtocolError(f"ring {self.path.name} was closed here; attach it again to use it")
            lock = _flock(fcntl.F_WRLCK, _SLOT_BYTES + first, count)
            if not _try_lock(self.fd, lock):
                self._wait_lock(first, lock)
        except BaseException:
            self._transition.release()
            raise

    def unlock(self, first: int, count: int = 1) -> None:
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, _SLOT_BYTES + first, count))
        finally:
            self._transition.release()

    def _wait_lock(self, first: int, lock: bytes) -> None:
        deadline = time.monotonic() + SLOT_LOCK_TIMEOUT_S
        pause_s = 2e-5
        while not _try_lock(self.fd, lock):
            if time.monotonic() > deadline:
                raise Transient(
                    f"slot {first} of ring {self.path.name} (or one after it) has been locked for "
                    f"{SLOT_LOCK_TIMEOUT_S} s by another process; is one of them stopped?"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5e-3)

    # Liveness

    def become_writer(self) -> None:
        if not _try_lock(self.fd, _flock(fcntl.F_WRLCK, _WRITER_BYTE)):
            raise LocalProtocolError(f"ring {self.path.name} already has a writer")

    def writer_alive(self) -> bool:
        return _is_locked(self.fd, _WRITER_BYTE)

    def become_reader(self, label: str) -> int:
        """Claims a reader record; slots that a dead holder of the record was reading become READY."""
        for reader in range(MAX_READERS):
            if not _try_lock(self.fd, _flock(fcntl.F_WRLCK, _READER_BYTES + reader)):
                continue
            for slot in self.held_by(reader):
                self.reclaim(slot)
            READER.pack_into(
                self.bytes, self.layout.readers + reader * READER.size, os.getpid(), 0, label.encode()[:48]
            )
            return reader
        raise Transient(f"ring {self.path.name} already has {MAX_READERS} readers; detach one first")

    def reader_alive(self, reader: int) -> bool:
        return _is_locked(self.fd, _READER_BYTES + reader)

    def reader_name(self, reader: int) -> str:
        pid, _, label = READER.unpack_from(self.bytes, self.layout.readers + reader * READER.size)
        return f"{label.rstrip(bytes(1)).decode(errors='replace') or 'reader'} (pid {pid})"

    def orphans(self, reader: int) -> int:
        return READER.unpack_from(self.bytes, self.layout.readers + reader * READER.size)[1]

    def count_orphan(self, reader: int) -> None:
        """Only the holder of the record writes it, so no lock is needed between processes."""
        at = self.layout.readers + reader * READER.size + READER_ORPHANS_OFFSET
        struct.pack_into("<Q", self.bytes, at, struct.unpack_from("<Q", self.bytes, at)[0] + 1)

    def held_by(self, reader: int | None = None) -> list[int]:
        """Slots being read: by `reader`, or by any."""
        reading = np.flatnonzero((self.word_array & np.uint64(STATE_MASK)) == SlotState.READING).tolist()
        return [slot for slot in reading if reader is None or reader_of(self.load(slot)) == reader]

    def reclaim(self, slot: int) -> bool:
        """Makes `slot` READY if no other mapping holds its reader's lock; true if it did."""
        self.lock(slot)
        try:
            word = self.load(slot)
            if word & STATE_MASK != SlotState.READING or self.reader_alive(reader_of(word)):
                return False
            self.store(slot, reclaim(word))
            return True
        finally:
            self.unlock(slot)

    def in_place(self) -> bool:
        """Whether this file still exists under its name."""
        try:
            return os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self.fd))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Releases all locks. The memory stays mapped while a view of it exists."""
        with self._transition:
            if self.closed:
                return
            self.closed = True
            os.close(self.fd)
            _open_mappings.discard(self)

    def _forget_in_child(self) -> None:
        # A forked child shares the locks: it must close its copy, or they would outlive the parent.
        self.closed = True
        os.close(self.fd)


_open_mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()


def _close_in_child() -> None:
    for mapping in list(_open_mappings):
        mapping._forget_in_child()
    _open_mappings.clear()


os.register_at_fork(after_in_child=_close_in_child)
