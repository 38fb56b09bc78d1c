"""Unfinished episodes on disk, so that the tokens of a drained worker are not drawn again."""

from __future__ import annotations

import os
import time
from pathlib import Path

from penstock.errors import RemoteProtocolError
from penstock.rollout.episode import Episode

LOOK_EVERY_S = 1.0


class KeptEpisodes:
    """Episodes by prompt, attempt and member. Each is taken at most once, by whoever comes first."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._looked_at = float("-inf")
        self._empty = True
        directory.mkdir(parents=True, exist_ok=True)

    def keep(self, prompt: int, attempt: int, member: int, episode: Episode) -> None:
        """Replaces what was kept for the same member; appears whole or not at all."""
        path = self._path(prompt, attempt, member)
        writing = path.with_suffix(f".{os.getpid()}.part")
        writing.write_bytes(episode.to_bytes())
        writing.replace(path)
        self._empty = False

    def take(self, prompt: int, attempt: int, member: int, *, min_version: int = 0) -> Episode | None:
        """The kept episode, now the caller's; None if there is none, or it is too old to be trained any more."""
        if self._is_empty():
            return None
        path = self._path(prompt, attempt, member)
        taken = path.with_suffix(f".{os.getpid()}.taken")
        try:
            path.rename(taken)
        except FileNotFoundError:
            return None
        body = taken.read_bytes()
        taken.unlink()
        try:
            episode = Episode.from_bytes(body)
        except RemoteProtocolError:
            return None
        return None if episode.version is not None and episode.version < min_version else episode

    def _is_empty(self) -> bool:
        """Nearly always true, so it is looked up once a second; a prefix missed meanwhile is only drawn again."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_EVERY_S:
            with os.scandir(self.directory) as entries:
                self._empty = next(entries, None) is None
            self._looked_at = now
        return self._empty

    def _path(self, prompt: int, attempt: int, member: int) -> Path:
        return self.directory / f"{prompt:d}-{attempt:d}-{member:d}.episode"
