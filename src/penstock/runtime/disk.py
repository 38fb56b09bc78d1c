"""Durable writes: data that is on the disk, not only in the page cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def flush(path: Path) -> None:
    """Returns when the file, or the names in the directory, will survive a loss of power."""
    _flush(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_flush: Callable[[Path], None] = _fsync


@contextmanager
def replace_flush(function: Callable[[Path], None]) -> Iterator[None]:
    """Replaces `flush` while the body runs: a simulated disk decides which data survives."""
    global _flush
    before, _flush = _flush, function
    try:
        yield
    finally:
        _flush = before
