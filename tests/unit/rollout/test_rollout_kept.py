"""Kept episodes: each taken once, and never more of them than the bounds allow."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from penstock.rollout.episode import Episode
from penstock.rollout.io.kept import KeptEpisodes


def episode(version: int = 3, tokens: int = 4) -> Episode:
    made = Episode.start([1, 2])
    ids = np.arange(tokens)
    made.generated(ids, np.zeros(tokens), np.array([[0, version]], dtype=np.int32), version, f"digest {version}")
    return made


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_each_is_taken_once_by_the_first_worker(tmp_path: Path) -> None:
    KeptEpisodes(tmp_path).keep(7, 0, 1, episode())
    first, second = KeptEpisodes(tmp_path), KeptEpisodes(tmp_path)
    taken = first.take(7, 0, 1)
    assert taken is not None
    assert taken.context() == [1, 2, 0, 1, 2, 3]
    assert second.take(7, 0, 1) is None
    assert names(tmp_path) == []


def test_what_is_too_old_to_be_trained_is_removed_with_the_first_that_is_found_so(tmp_path: Path) -> None:
    kept = KeptEpisodes(tmp_path)
    for prompt, version in enumerate((1, 2, 3)):
        kept.keep(prompt, 0, 0, episode(version))
    (tmp_path / "9-0-0.episode").write_bytes(b"not an episode")
    fresh = KeptEpisodes(tmp_path)
    assert fresh.take(0, 0, 0, min_version=3) is None
    assert names(tmp_path) == ["2-0-0.episode"], "the others go without being asked for"
    assert fresh.take(2, 0, 0, min_version=3) is not None


def test_the_newest_stay_when_there_is_no_room_for_all(tmp_path: Path) -> None:
    size_bytes = len(episode().to_bytes())
    kept = KeptEpisodes(tmp_path, max_bytes=3 * size_bytes)
    long_ago = time.time() - 100
    for prompt in range(10):
        kept.keep(prompt, 0, 0, episode())
        os.utime(tmp_path / f"{prompt}-0-0.episode", (long_ago + prompt, long_ago + prompt))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4 * size_bytes
    kept.prune(0)
    assert names(tmp_path) == ["7-0-0.episode", "8-0-0.episode", "9-0-0.episode"]


def test_the_very_old_goes_also_what_a_killed_process_left_half_done(tmp_path: Path) -> None:
    kept = KeptEpisodes(tmp_path, max_age_s=100.0)
    kept.keep(1, 0, 0, episode())
    kept.keep(2, 0, 0, episode())
    (tmp_path / "3-0-0.123.part").write_bytes(b"half")
    (tmp_path / "4-0-0.123.taken").write_bytes(b"taken")
    long_ago = time.time() - 1000
    for name in ("1-0-0.episode", "3-0-0.123.part"):
        os.utime(tmp_path / name, (long_ago, long_ago))
    assert kept.prune(0) == 2
    assert names(tmp_path) == ["2-0-0.episode", "4-0-0.123.taken"]
