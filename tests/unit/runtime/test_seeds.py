from __future__ import annotations

from pathlib import Path

from penstock.runtime.seeds import next_seed


def test_seeds_follow_from_run_process_and_start(tmp_path: Path) -> None:
    first = [next_seed(tmp_path / "a", "letters.rollout.0.0", 7) for _ in range(3)]
    again = [next_seed(tmp_path / "b", "letters.rollout.0.0", 7) for _ in range(3)]
    assert first == again
    others = [next_seed(tmp_path / "b", "letters.rollout.1.0", 7), next_seed(tmp_path / "c", "letters.rollout.0.0", 8)]
    assert len({*first, *others}) == 5


def test_a_damaged_count_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "w").write_text("")
    assert next_seed(tmp_path, "w", 1) == next_seed(tmp_path / "fresh", "w", 1)
