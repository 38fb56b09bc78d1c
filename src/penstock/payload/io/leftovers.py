"""Ring files that outlived their run: identified by their headers, removed when a run ends and before one starts."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from penstock.errors import PenstockError, RemoteProtocolError, Stale
from penstock.payload.io.mapping import DIRECTORY, Mapping
from penstock.payload.ring import Header, check_name
from penstock.payload.slot import MAX_READERS
from penstock.runtime.process import start_time

UNREADABLE_GRACE_S = 60.0
"""A header that cannot be read may belong to a ring that is just being created."""


def sweep(run_id: str, directory: str = DIRECTORY) -> list[str]:
    """Removes every ring of `run_id`, in use or not; returns their names. For hosts without a process of the run."""
    return [
        name
        for name, header in _rings(directory)
        if header is not None and header.run_id == run_id and _unlink(directory, name)
    ]


def sweep_own(run_id: str, guardian_pid: int, directory: str = DIRECTORY) -> list[str]:
    """Removes the rings of `run_id` that this guardian's processes created, and dead ones; returns their names.

    A copied run directory has the id of the original run, which may be alive: its rings stay.
    """
    return [
        name
        for name, header in _rings(directory)
        if header is not None
        and header.run_id == run_id
        and (header.guardian_pid == guardian_pid or not _in_use(name, directory, header))
        and _unlink(directory, name)
    ]


def sweep_dead(directory: str = DIRECTORY, *, keep_run: str | None = None) -> list[str]:
    """Removes the rings of dead runs (writer, readers and guardian gone); returns their names.

    For the start of a run. Rings of `keep_run` stay: a resumed run may still read them.
    """
    removed = []
    for name, header in _rings(directory):
        if header is None:
            dead = _age_s(Path(directory) / name) > UNREADABLE_GRACE_S
        else:
            dead = header.run_id != keep_run and not _in_use(name, directory, header)
        if dead and _unlink(directory, name):
            removed.append(name)
    return removed


def _rings(directory: str) -> list[tuple[str, Header | None]]:
    """Every ring file of this user; None for a header that cannot be read (being created, or damaged)."""
    found: list[tuple[str, Header | None]] = []
    for entry in sorted(os.listdir(directory)):
        try:
            mapping = Mapping.open(check_name(entry), directory)
        except Stale:
            continue
        except (RemoteProtocolError, ValueError):
            path = Path(directory) / entry
            with contextlib.suppress(PenstockError, OSError):
                if check_name(entry) and path.lstat().st_uid == os.getuid():
                    found.append((entry, None))
            continue
        found.append((entry, mapping.header))
        mapping.close()
    return found


def _in_use(name: str, directory: str, header: Header) -> bool:
    if header.guardian_start and start_time(header.guardian_pid) == header.guardian_start:
        return True
    try:
        mapping = Mapping.open(name, directory)
    except PenstockError:
        return False
    try:
        return mapping.writer_alive() or any(mapping.reader_alive(reader) for reader in range(MAX_READERS))
    finally:
        mapping.close()


def _unlink(directory: str, name: str) -> bool:
    try:
        (Path(directory) / name).unlink()
    except FileNotFoundError:
        return False
    return True


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0
