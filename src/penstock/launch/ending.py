"""When a run is over, and how it ended. Pure: what is known of the run in, a verdict out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.launch.restarts import FailTheRun, Finished

OVER = ("complete", "stopped")


def judge(status: Mapping[str, Any], trainers: Iterable[str], ended_well: set[str]) -> Finished | FailTheRun | None:
    """What the controller's status says of the whole run; None: it goes on.

    A failed pipeline is also a stopped one, whose trainer leaves in good order: the failure counts, not the good
    order, whichever of the two is seen first.
    """
    if status.get("failure"):
        return FailTheRun(f"controller: {status['failure']}")
    pipelines = status.get("pipelines", {})
    over = bool(pipelines) and all(one["phase"] in OVER for one in pipelines.values())
    return Finished() if over and ended_well.issuperset(trainers) else None


def judge_last_words(last_words: Mapping[str, Mapping[str, Any] | None]) -> FailTheRun | None:
    """What processes wrote when they were told to end: a final checkpoint that failed is a failed run."""
    for process, words in last_words.items():
        if words is not None:
            return FailTheRun(f"{process}: {words['message']}", words["kind"] == "ConfigError")
    return None
