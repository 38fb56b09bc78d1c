"""What is on the disk, and not only with the kernel."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Returns once the file, or the names in the directory, will survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
