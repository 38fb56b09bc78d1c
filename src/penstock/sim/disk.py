"""The simulated disk: the files of a run after a power failure.

Only flushed data survives: other checkpoints and published versions are torn, and the journal ends with the last
flushed event. A disk may be slow or full, and it may lie: then a flush returns without writing.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from penstock.journal.virtual import SnapshotRow, roll_back
from penstock.runtime.clock import monotonic, sleep


class DiskConditions(Protocol):
    """Present conditions of the disk."""

    commit_s: float
    disk_full: bool
    flush_lies: bool


class Disk:
    """One for the whole run directory."""

    def __init__(
        self, root: Path, journal: Path, conditions: DiskConditions, calm_s: float, may_block: Callable[[], bool]
    ) -> None:
        """A flush takes `conditions.commit_s` if that is more than `calm_s`."""
        self._root = root
        self._journal = journal
        self._conditions = conditions
        self._calm_s = calm_s
        self._may_block = may_block
        self._safe: dict[int, int] = {}
        """Flushed size by inode."""
        self._lied: set[int] = set()
        self._journalled = 0
        """The last flushed event."""
        self._claimed = 0
        """The last event whose flush returned."""
        self._snapshots: list[SnapshotRow] | None = None
        """The snapshots at the last flush of the journal."""
        self.flushed_at = 0.0
        self.lost: list[str] = []
        """Data lost in power failures although its flush had returned."""

    def flush_journal(self, seq: int) -> None:
        self._refuse_if_full()
        self._claimed = max(self._claimed, seq)
        if not self._conditions.flush_lies:
            self._journalled, self._snapshots, self.flushed_at = seq, None, monotonic()

    def replaces_snapshots(self, rows: list[SnapshotRow]) -> None:
        self._snapshots = self._snapshots if self._snapshots is not None else rows

    def commit_s(self) -> float:
        """Seconds of the journal's next commit."""
        self._refuse_if_full()
        return self._conditions.commit_s

    def flush(self, path: Path) -> None:
        self._refuse_if_full()
        if self._conditions.commit_s > self._calm_s and self._may_block():
            sleep(self._conditions.commit_s)
        found = os.stat(path)
        if self._conditions.flush_lies:
            self._lied.add(found.st_ino)
        else:
            self._safe[found.st_ino] = found.st_size

    def holds(self, directory: Path) -> bool:
        """Whether every file there was flushed, or the disk said so."""
        found = [path.stat() for path in directory.glob("*")]
        return bool(found) and all(
            one.st_ino in self._lied or self._safe.get(one.st_ino) == one.st_size for one in found
        )

    def lose_power(self) -> None:
        """Tears unflushed files in place. Names survive: they are flushed last."""
        for directory in ("checkpoints", "weights"):
            for path in sorted((self._root / directory).rglob("*")):
                if path.is_file():
                    self._tear(path)
        if self._claimed > self._journalled:
            self.lost.append(f"events {self._journalled + 1} to {self._claimed}")
        if self._journal.exists():
            roll_back(self._journal, self._journalled, self._snapshots or [])
        self._claimed, self._snapshots = self._journalled, None

    def _tear(self, path: Path) -> None:
        found = path.stat()
        if self._safe.get(found.st_ino) == found.st_size:
            return
        if found.st_ino in self._lied:
            self.lost.append(str(path.relative_to(self._root)))
        os.truncate(path, found.st_size // 2)

    def _refuse_if_full(self) -> None:
        if self._conditions.disk_full:
            raise OSError(errno.ENOSPC, "No space left on device")
