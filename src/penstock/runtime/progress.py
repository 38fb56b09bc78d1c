"""One cell of shared memory in which a process says when it last moved, and what it is doing.

The sidecar reads it from outside: a process whose loop or main thread hangs cannot look alive, and one that is busy
with a long but known piece of work says so.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from dataclasses import dataclass

from penstock.runtime.clock import monotonic

MAX_DOING_BYTES = 200

# The counter stands before and behind the fields, and one call writes them in that order: a reader that finds the
# two counters equal has seen one whole write.
CELL = struct.Struct(f"<Qd H{MAX_DOING_BYTES}s Q")
READ_ATTEMPTS = 5


@dataclass(frozen=True)
class Progress:
    """What the cell says now."""

    ago_s: float
    """Since the last sign of progress."""
    doing: str


class ProgressCell:
    """Written by one process, read by its sidecar through the inherited file descriptor; it has no name to leak."""

    def __init__(self, fd: int | None = None) -> None:
        """Makes a new cell, or attaches to the one behind an inherited `fd`."""
        if fd is None:
            fd = _anonymous_file()
            os.ftruncate(fd, CELL.size)
        self._fd = fd
        self._cell = mmap.mmap(fd, CELL.size)
        self._writes = 0

    def fileno(self) -> int:
        """To be passed to the sidecar (`pass_fds`)."""
        return self._fd

    def moved(self, doing: str = "") -> None:
        """Says: progress was made just now, and this is what comes next. Takes about a microsecond."""
        said = doing.encode()[:MAX_DOING_BYTES]
        self._writes += 1
        CELL.pack_into(self._cell, 0, self._writes, monotonic(), len(said), said, self._writes)

    def read(self) -> Progress | None:
        """The latest report; None before the first."""
        begun, moved, size, said, ended = CELL.unpack_from(self._cell, 0)
        for _ in range(READ_ATTEMPTS):
            if begun == ended:
                break
            begun, moved, size, said, ended = CELL.unpack_from(self._cell, 0)
        if begun != ended:  # the writer died within a write: the time is a whole word, the text may be torn
            size = 0
        if moved == 0.0:
            return None
        return Progress(max(0.0, monotonic() - moved), said[:size].decode(errors="replace"))

    def close(self) -> None:
        self._cell.close()
        os.close(self._fd)

    def __repr__(self) -> str:
        return f"ProgressCell({self.read()!r})"


def _anonymous_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("penstock-progress")
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
