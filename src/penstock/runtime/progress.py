"""A cell of shared memory in which a process records when it last made progress, and what it is doing.

The sidecar reads it from outside: a process whose loop or main thread hangs does not appear alive, and one that
is busy with long work can report that work.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from dataclasses import dataclass

from penstock.runtime.clock import monotonic

MAX_DOING_BYTES = 200

# The counter is stored before and after the fields, and one call writes them in that order: if the two counters are
# equal, the reader has seen one complete write.
CELL = struct.Struct(f"<Qd H{MAX_DOING_BYTES}s Q")
READ_ATTEMPTS = 5


@dataclass(frozen=True)
class Progress:
    """The content of the cell."""

    ago_s: float
    """Seconds since the last progress."""
    doing: str


class ProgressCell:
    """Written by one process, read by its sidecar through the inherited file descriptor. It has no name on disk."""

    def __init__(self, fd: int | None = None) -> None:
        """Creates a cell, or attaches to the cell of an inherited `fd`."""
        if fd is None:
            fd = _anonymous_file()
            os.ftruncate(fd, CELL.size)
        self._fd = fd
        self._cell = mmap.mmap(fd, CELL.size)
        self._writes = 0

    def fileno(self) -> int:
        """The descriptor to pass to the sidecar (`pass_fds`)."""
        return self._fd

    def moved(self, doing: str = "") -> None:
        """Records progress, and the work that follows. Takes about a microsecond."""
        text = doing.encode()[:MAX_DOING_BYTES]
        self._writes += 1
        CELL.pack_into(self._cell, 0, self._writes, monotonic(), len(text), text, self._writes)

    def read(self) -> Progress | None:
        """The latest report; None before the first."""
        begun, moved, size, text, ended = CELL.unpack_from(self._cell, 0)
        for _ in range(READ_ATTEMPTS):
            if begun == ended:
                break
            begun, moved, size, text, ended = CELL.unpack_from(self._cell, 0)
        if begun != ended:  # the writer died during a write: the time is one machine word, the text may be torn
            size = 0
        if moved == 0.0:
            return None
        return Progress(max(0.0, monotonic() - moved), text[:size].decode(errors="replace"))

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
