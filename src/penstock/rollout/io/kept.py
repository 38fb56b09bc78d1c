"""Unfinished episodes on disk, so that the tokens of a drained worker are not generated again.

Age and total bytes are bounded, and episodes too stale to be trained are removed: a worker that leaves often must not
fill the disk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import RemoteProtocolError
from penstock.rollout.episode import Episode

CHECK_EVERY_S = 1.0
PRUNE_EVERY_S = 10.0


class KeptEpisodes:
    """Episodes by prompt, attempt and member. Each is taken at most once, by the first worker that requests it."""

    def __init__(self, directory: Path, *, max_bytes: int = 256 << 20, max_age_s: float = 3600.0) -> None:
        self.directory = directory
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._checked_at = self._pruned_at = float("-inf")
        self._pruned_below = 0
        self._bytes = 0
        """Found at the last prune, and written since."""
        self._empty = True
        directory.mkdir(parents=True, exist_ok=True)

    def keep(self, prompt: int, attempt: int, member: int, episode: Episode) -> None:
        """Stores an episode atomically; replaces the one of the same member."""
        body = episode.to_bytes()
        path = self._path(prompt, attempt, member)
        writing = path.with_suffix(f".{os.getpid()}.part")
        writing.write_bytes(body)
        writing.replace(path)
        self._empty = False
        self._bytes += len(body)
        if self._bytes > self._max_bytes or time.monotonic() - self._pruned_at >= PRUNE_EVERY_S:
            self.prune(self._pruned_below)

    def take(self, prompt: int, attempt: int, member: int, *, min_version: int = 0) -> Episode | None:
        """Removes and returns the kept episode; None if there is none, or it is too stale to be trained."""
        if self._is_empty():
            return None
        if min_version > self._pruned_below and time.monotonic() - self._pruned_at >= PRUNE_EVERY_S:
            self.prune(min_version)
        path = self._path(prompt, attempt, member)
        taken = path.with_suffix(f".{os.getpid()}.taken")
        try:
            path.rename(taken)
        except FileNotFoundError:
            return None
        body = taken.read_bytes()
        taken.unlink()
        episode = _decoded(body)
        return None if episode is None or _outdated(episode, min_version) else episode

    def prune(self, min_version: int) -> int:
        """Removes episodes older than `max_age_s` or than version `min_version`, and the oldest beyond `max_bytes`.

        Returns the number of files removed. Safe in several processes concurrently.
        """
        self._pruned_at = time.monotonic()
        self._pruned_below = max(self._pruned_below, min_version)
        removed = 0
        self._bytes = 0
        for path, changed_at, size_bytes in sorted(self._files(), key=lambda file: -file[1]):
            fits = self._bytes + size_bytes <= self._max_bytes and time.time() - changed_at <= self._max_age_s
            if fits and not self._is_useless(path):
                self._bytes += size_bytes
            else:
                path.unlink(missing_ok=True)
                removed += 1
        return removed

    def _files(self) -> Iterator[tuple[Path, float, int]]:
        with os.scandir(self.directory) as entries:
            for entry in entries:
                try:
                    status = entry.stat()
                except FileNotFoundError:  # another worker took it
                    continue
                yield Path(entry.path), status.st_mtime, status.st_size

    def _is_useless(self, path: Path) -> bool:
        if path.suffix != ".episode":  # being written or taken: at most `max_age_s` old
            return False
        try:
            episode = _decoded(path.read_bytes())
        except FileNotFoundError:
            return False
        return episode is None or _outdated(episode, self._pruned_below)

    def _is_empty(self) -> bool:
        """Nearly always true, so it is checked once a second; an episode missed meanwhile is only generated again."""
        now = time.monotonic()
        if now - self._checked_at >= CHECK_EVERY_S:
            with os.scandir(self.directory) as entries:
                self._empty = next(entries, None) is None
            self._checked_at = now
        return self._empty

    def _path(self, prompt: int, attempt: int, member: int) -> Path:
        return self.directory / f"{prompt:d}-{attempt:d}-{member:d}.episode"


def _decoded(body: bytes) -> Episode | None:
    try:
        return Episode.from_bytes(body)
    except RemoteProtocolError:
        return None


def _outdated(episode: Episode, min_version: int) -> bool:
    return episode.version is not None and episode.version < min_version
