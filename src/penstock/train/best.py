"""The checkpoint that was evaluated best, kept beside the newest ones: `checkpoints/<pipeline>/best/`."""

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
    """Keeps a copy of the best checkpoint that is on disk, if it is better than the one kept so far; its step then.

    An evaluation of a version takes a while, so the newest checkpoint is judged at a later call. Files are linked, not
    copied, where the file system can.
    """
    rewards = _evaluations(metrics, pipeline)
    there = {int(path.name.removeprefix("step-")): path for path in checkpoints.glob("step-*")}
    judged = {step: rewards[step] for step in there if step in rewards}
    if not judged:
        return None
    step = max(judged, key=lambda one: (judged[one], one))
    kept = _kept_step(checkpoints / BEST)
    if kept is not None and (kept == step or rewards.get(kept, float("-inf")) >= judged[step]):
        return None
    partial = checkpoints / f".partial-{BEST}"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(there[step], partial, copy_function=_link_or_copy)
    shutil.rmtree(checkpoints / BEST, ignore_errors=True)
    partial.rename(checkpoints / BEST)
    log.info("step %d is the best so far: reward %g in evaluation", step, judged[step])
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
