"""The checkpoint with the best evaluation, kept beside the newest ones: `checkpoints/<pipeline>/best/`."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import orjson

log = logging.getLogger(__name__)

BEST = "best"
RECORD = "checkpoint.json"


def keep_best(checkpoints: Path, metrics: Path, pipeline: str) -> int | None:
    """Copies the best checkpoint on disk if it is better than the one kept so far. Returns its step, else None.

    An evaluation of a version takes time, so the newest checkpoint is compared at a later call. Files are linked, not
    copied, where the file system supports it.
    """
    best, replaced = checkpoints / BEST, checkpoints / f".replaced-{BEST}"
    if replaced.exists() and not best.exists():  # killed between the two renames below
        replaced.rename(best)
    rewards = _evaluations(metrics, pipeline)
    on_disk = {int(path.name.removeprefix("step-")): path for path in checkpoints.glob("step-*")}
    evaluated = {step: rewards[step] for step in on_disk if step in rewards}
    if not evaluated:
        return None
    step = max(evaluated, key=lambda one: (evaluated[one], one))
    kept = _kept_step(best)
    if kept is not None and (kept == step or rewards.get(kept, float("-inf")) >= evaluated[step]):
        return None
    partial = checkpoints / f".partial-{BEST}"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(on_disk[step], partial, copy_function=_link_or_copy)
    shutil.rmtree(replaced, ignore_errors=True)
    if best.exists():
        best.rename(replaced)
    partial.rename(best)
    shutil.rmtree(replaced, ignore_errors=True)
    log.info("step %d is the best so far: reward %g in evaluation", step, evaluated[step])
    return step


def _evaluations(metrics: Path, pipeline: str) -> dict[int, float]:
    """Mean rewards by version."""
    rewards: dict[int, float] = {}
    if metrics.exists():
        for line in metrics.read_bytes().splitlines():
            if b'"evaluation"' not in line:
                continue
            try:
                entry = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if entry.get("kind") == "evaluation" and entry["pipeline"] == pipeline and "skipped" not in entry:
                rewards[entry["version"]] = entry["eval/reward"]
    return rewards


def _kept_step(directory: Path) -> int | None:
    try:
        return int(json.loads((directory / RECORD).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError):
        return None


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
