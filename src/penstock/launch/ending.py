"""Decides when a run has ended, and how. Pure: takes the status of the run, returns a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.launch.restarts import Ended, FailTheRun, Finished

OVER = ("complete", "stopped")
LEFT_EARLY = 1
"""Replaces exit code 0 of a process that exited before its pipeline ended."""


def judge(status: Mapping[str, Any], trainers: Iterable[str], ended_well: set[str]) -> Finished | FailTheRun | None:
    """The verdict on the whole run, from the controller's status; None while the run continues.

    The trainer of a failed pipeline shuts down gracefully, since the pipeline is also stopped. The failure takes
    precedence, whichever of the two is seen first.
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
    """No process failed, but a run that trained no step has failed."""
    filtered, aside = pipeline["dropped_filtered"], pipeline["prompts_set_aside"]
    prompts = f"{filtered} samples were filtered and {aside} prompts set aside as failed"
    return f"{name}: no step could be trained: of {pipeline['prompts_issued']} prompts {prompts}, and none are left"


def judge_leaving(status: Mapping[str, Any], pipeline: str, ended: Ended) -> Ended:
    """An exit with code 0 before the pipeline has ended counts as a crash."""
    if ended.exit_code != 0 or status.get("pipelines", {}).get(pipeline, {}).get("phase") in OVER:
        return ended
    return Ended(LEFT_EARLY, "it exited although its pipeline has not ended: did something call os._exit?")


def judge_failure_reports(failure_reports: Mapping[str, Mapping[str, Any] | None]) -> FailTheRun | None:
    """The verdict on failure reports written during shutdown: a final checkpoint that failed fails the run."""
    for process, report in failure_reports.items():
        if report is not None:
            return FailTheRun(f"{process}: {report['message']}", report["kind"] == "ConfigError")
    return None
