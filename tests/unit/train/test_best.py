"""The checkpoint that was evaluated best stays, though newer ones replace it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penstock.train.best import BEST, keep_best


def saved(folder: Path, step: int) -> None:
    directory = folder / f"step-{step:08d}"
    directory.mkdir(parents=True)
    (directory / "checkpoint.json").write_text(json.dumps({"step": step}))
    (directory / "model.safetensors").write_text(f"weights of {step}")


def evaluated(metrics: Path, step: int, reward: float) -> None:
    entry = {"kind": "evaluation", "pipeline": "a", "version": step, "eval/reward": reward}
    with metrics.open("a") as lines:
        lines.write(json.dumps(entry) + "\n")


def test_the_best_stays_when_it_is_no_longer_among_the_newest(tmp_path: Path):
    checkpoints, metrics = tmp_path / "checkpoints", tmp_path / "metrics.jsonl"
    saved(checkpoints, 10)
    assert keep_best(checkpoints, metrics, "a") is None  # not evaluated yet
    evaluated(metrics, 10, 0.9)
    assert keep_best(checkpoints, metrics, "a") == 10
    shutil.rmtree(checkpoints / "step-00000010")
    saved(checkpoints, 20)
    evaluated(metrics, 20, 0.5)
    assert keep_best(checkpoints, metrics, "a") is None
    assert (checkpoints / BEST / "model.safetensors").read_text() == "weights of 10"
    saved(checkpoints, 30)
    evaluated(metrics, 30, 0.95)
    assert keep_best(checkpoints, metrics, "a") == 30
    assert json.loads((checkpoints / BEST / "checkpoint.json").read_text())["step"] == 30


@pytest.mark.parametrize("killed_at", [1, 2])
def test_a_kill_while_the_best_is_replaced_loses_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
):
    checkpoints, metrics = tmp_path / "checkpoints", tmp_path / "metrics.jsonl"
    saved(checkpoints, 10)
    evaluated(metrics, 10, 0.9)
    assert keep_best(checkpoints, metrics, "a") == 10
    shutil.rmtree(checkpoints / "step-00000010")
    saved(checkpoints, 20)
    evaluated(metrics, 20, 0.95)
    rename, calls = Path.rename, []

    def killed(path: Path, target: Path) -> Path:
        calls.append(path.name)
        if len(calls) == killed_at:
            raise SystemExit
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(SystemExit):
            keep_best(checkpoints, metrics, "a")
    assert len(calls) == killed_at
    shutil.rmtree(checkpoints / "step-00000020")  # it was pruned, or is damaged
    assert keep_best(checkpoints, metrics, "a") is None
    assert (checkpoints / BEST / "model.safetensors").read_text() == "weights of 10"


def test_another_pipeline_does_not_count(tmp_path: Path):
    saved(tmp_path / "checkpoints", 10)
    evaluated(tmp_path / "metrics.jsonl", 10, 0.9)
    assert keep_best(tmp_path / "checkpoints", tmp_path / "metrics.jsonl", "b") is None
