"""What the processes of a vLLM server leave behind if they are killed: shared memory, and sockets in its home.

Shared memory without a name of its own gets one that begins with a digest of the server's home, so that it can be
attributed to the server when all processes have ended. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

DIRECTORY = Path("/dev/shm")
PREFIX_VARIABLE = "PENSTOCK_SHARED_MEMORY"
"""In the environment of the server: how the names of its shared memory begin."""


def prefix_of(home: Path) -> str:
    return f"psm_penstock_{hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:16]}_"


def homes_in(run_root: Path, process: str = "*") -> list[Path]:
    """The homes of the servers of a run, or of one of its processes. Links, as in a run of a stranger, are left out."""
    found = sorted(run_root.glob(f"engines/*/{process}"))
    return [home for home in found if not any(one.is_symlink() for one in (home, *home.parents[:2]))]


def remove_leftovers(homes: Iterable[Path]) -> list[str]:
    """Removes what is left of these servers, none of which may be alive; returns the names."""
    removed: list[str] = []
    for home in homes:
        found = list(DIRECTORY.glob(f"{prefix_of(home)}*")) if DIRECTORY.is_dir() else []
        if home.is_dir():
            found += [entry for entry in home.iterdir() if entry.is_socket() and not entry.is_symlink()]
        for path in found:
            with contextlib.suppress(OSError):  # another user's, or removed meanwhile
                path.unlink()
                removed.append(path.name)
    return removed


class NamedSharedMemory(shared_memory.SharedMemory):
    """Named after the server if the caller gives no name."""

    def __init__(self, name: str | None = None, create: bool = False, size: int = 0, **more: Any) -> None:
        if create and name is None:
            name = os.environ[PREFIX_VARIABLE] + secrets.token_hex(8)
        super().__init__(name, create, size, **more)


def name_shared_memory() -> None:
    """In each process of the server, before it creates any."""
    if PREFIX_VARIABLE in os.environ:
        shared_memory.SharedMemory = NamedSharedMemory
