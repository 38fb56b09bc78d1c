"""What is on the disk, and not only with the kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def flush(path: Path) -> None:
    """Returns once the file, or the names in the directory, will survive a loss of power."""
    _flush(path)


def _really_flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_flush: Callable[[Path], None] = _really_flush


@contextmanager
def flushed_by(function: Callable[[Path], None]) -> Iterator[None]:
    """While the body runs, a simulated disk decides what survives."""
    global _flush
    before, _flush = _flush, function
    try:
        yield
    finally:
        _flush = before
