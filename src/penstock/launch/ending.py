"""When a run is over, and how it ended. Pure: what is known of the run in, a verdict out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.launch.restarts import Ended, FailTheRun, Finished

OVER = ("complete", "stopped")
LEFT_EARLY = 1
"""Exit code of a process that had none to leave with."""


def judge(status: Mapping[str, Any], trainers: Iterable[str], ended_well: set[str]) -> Finished | FailTheRun | None:
    """What the controller's status says of the whole run; None: it goes on.

    A failed pipeline is also a stopped one, whose trainer deregisters: the failure counts, not the good
    order, whichever of the two is seen first.
    """
    if status.get("failure"):
        return FailTheRun(f"controller: {status['failure']}")
    pipelines = status.get("pipelines", {})
    over = bool(pipelines) and all(one["phase"] in OVER for one in pipelines.values())
    idle = [name for name, one in pipelines.items() if one["phase"] == "complete" and not one["step"]]
    if over and idle:
        return FailTheRun("; ".join(_nothing_trained(name, pipelines[name]) for name in idle))
    return Finished() if over and ended_well.issuperset(trainers) else None


def _nothing_trained(name: str, pipeline: Mapping[str, Any]) -> str:
    """Every process did what it should, and yet it is no success."""
    filtered, aside = pipeline["dropped_filtered"], pipeline["prompts_set_aside"]
    prompts = f"{filtered} samples were filtered and {aside} prompts set aside as failed"
    return f"{name}: no step could be trained: of {pipeline['prompts_issued']} prompts {prompts}, and no more are left"


def judge_leaving(status: Mapping[str, Any], pipeline: str, ended: Ended) -> Ended:
    """A process that left as if its work were done, although its pipeline is not over, was ended by something else."""
    if ended.exit_code != 0 or status.get("pipelines", {}).get(pipeline, {}).get("phase") in OVER:
        return ended
    return Ended(LEFT_EARLY, "it left although its pipeline is not over: did something call os._exit?")


def judge_failure_reports(failure_reports: Mapping[str, Mapping[str, Any] | None]) -> FailTheRun | None:
    """What processes wrote when they were told to end: a final checkpoint that failed is a failed run."""
    for process, words in failure_reports.items():
        if words is not None:
            return FailTheRun(f"{process}: {words['message']}", words["kind"] == "ConfigError")
    return None
