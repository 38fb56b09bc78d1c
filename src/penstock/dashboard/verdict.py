"""The health of a run from its files: one word, one tone and one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Word = Literal["running", "complete", "interrupted", "failed", "killed", "empty"]
Tone = Literal["well", "attention", "bad", "quiet"]

SILENT_AFTER_S = 60.0
RECENTLY_S = 10.0
"""A run writes its gauges every two seconds: older files belong to a run that is not live."""


@dataclass(frozen=True)
class PipelineFacts:
    """Settings of a pipeline, as far as the configuration can be read."""

    name: str
    steps: int | None = None
    max_staleness: int | None = None
    workers: int | None = None


@dataclass(frozen=True)
class Evidence:
    """Contents of the run directory, and whether a supervisor holds its lock."""

    directory: str
    stall_after_s: float
    """A run with no progress for longer is stalled."""
    pipelines: tuple[PipelineFacts, ...] = ()
    alive: bool = False
    """A supervisor on this machine holds the lock of the run."""
    ending: Mapping[str, Any] | None = None
    """The ending that the supervisor wrote."""
    failure_reports: Mapping[str, str] = field(default_factory=dict)
    """By process, of those that failed."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """Trained steps by pipeline."""
    gauges: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    stalls: Mapping[str, str] = field(default_factory=dict)
    """By pipeline, the controller's last diagnosis of a stall."""
    failed: str = ""
    """The failure recorded in the journal."""
    silent_s: float | None = None
    """Seconds since the newest file was written; None if there is none."""


@dataclass(frozen=True)
class Verdict:
    word: Word
    tone: Tone
    sentence: str


def judge(found: Evidence) -> Verdict:
    if found.alive:
        return _judge_live(found)
    if found.ending is not None:
        return _judge_ended(found, found.ending)
    if found.silent_s is not None and found.silent_s < RECENTLY_S and not found.failure_reports:
        return _judge_live(found)  # on another machine, according to its files
    if found.failure_reports or found.failed:
        process, message = next(iter(found.failure_reports.items()), ("", found.failed))
        return Verdict("failed", "bad", f"{process}: {_first_line(message)}" if process else _first_line(message))
    if _is_complete(found):
        return Verdict("complete", "well", f"Complete: {_progress(found)}.")
    if found.silent_s is None:
        return Verdict("empty", "quiet", "The run directory was created, but no process has written to it yet.")
    sentence = f"Its processes ended without a report after {_progress(found)}: it was killed."
    return Verdict("killed", "bad", f"{sentence} {_resume(found)}")


def _judge_live(found: Evidence) -> Verdict:
    for name, gauges in found.gauges.items():
        stalled_s = float(gauges.get("stalled_s", 0.0))
        if stalled_s > found.stall_after_s:
            why = found.stalls.get(name, "there is no diagnosis yet")
            return Verdict("running", "attention", f"{name} has made no progress for {stalled_s:.0f} s: {why}")
        if gauges.get("workers_suspected"):
            return Verdict("running", "attention", f"{name}: {gauges['workers_suspected']} workers do not answer.")
        if not gauges.get("trainer_alive", 1) and gauges.get("phase") == "running":
            return Verdict("running", "attention", f"{name} has no live trainer at the moment.")
        if gauges.get("workers_alive") == 0 and gauges.get("phase") == "running":
            return Verdict("running", "attention", f"{name} has no live worker at the moment.")
    if found.silent_s is not None and found.silent_s > SILENT_AFTER_S:
        return Verdict("running", "attention", f"Alive, but nothing was written for {found.silent_s:.0f} s.")
    if not found.steps:
        return Verdict("running", "quiet", "Starting: no step has been trained yet.")
    return Verdict("running", "well", f"Running well: {_progress(found)}.")


def _judge_ended(found: Evidence, ending: Mapping[str, Any]) -> Verdict:
    sentence = _first_line(str(ending.get("sentence", "")))
    match ending.get("how"):
        case "complete":
            return Verdict("complete", "well", f"Complete: {_progress(found)}.")
        case "interrupted":
            return Verdict("interrupted", "attention", f"Interrupted after {_progress(found)}. {_resume(found)}")
    return Verdict("failed", "bad", sentence or "Failed without a message.")


def _is_complete(found: Evidence) -> bool:
    """Derived from gauges and steps, for a run without a written ending."""
    if found.gauges:
        return all(gauges.get("phase") in ("complete", "stopped") for gauges in found.gauges.values())
    limited = [one for one in found.pipelines if one.steps]
    return bool(limited) and all(found.steps.get(one.name, 0) >= (one.steps or 0) for one in limited)


def _progress(found: Evidence) -> str:
    limits = {one.name: one.steps for one in found.pipelines}
    parts = [
        f"{name} step {step}" + (f" of {limits[name]}" if limits.get(name) else "")
        for name, step in found.steps.items()
    ]
    return ", ".join(parts) if parts else "no step"


def _resume(found: Evidence) -> str:
    return f"Resume with: penstock run --resume {found.directory}"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
