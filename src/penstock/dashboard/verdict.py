"""Is the run well? One word, one tone and one sentence from what the files say."""

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
    """What the configuration says of a pipeline, as far as it can be read."""

    name: str
    steps: int | None = None
    max_staleness: int | None = None
    workers: int | None = None


@dataclass(frozen=True)
class Evidence:
    """What was found in the run directory, and whether its supervisor holds it."""

    directory: str
    stall_after_s: float
    """A run with no progress for longer is stalled."""
    pipelines: tuple[PipelineFacts, ...] = ()
    alive: bool = False
    """A supervisor on this machine holds the run."""
    ending: Mapping[str, Any] | None = None
    """How the supervisor said the run ended."""
    failure_reports: Mapping[str, str] = field(default_factory=dict)
    """By process, of those that died."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """Trained steps by pipeline."""
    gauges: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    stalls: Mapping[str, str] = field(default_factory=dict)
    """By pipeline, the controller's last diagnosis of a stall."""
    failed: str = ""
    """What the journal says the run failed of."""
    silent_s: float | None = None
    """How long ago the newest file was written; None when there is none."""


@dataclass(frozen=True)
class Verdict:
    word: Word
    tone: Tone
    sentence: str


def judge(found: Evidence) -> Verdict:
    if found.alive:
        return _of_a_live_one(found)
    if found.ending is not None:
        return _of_an_ended_one(found, found.ending)
    if found.silent_s is not None and found.silent_s < RECENTLY_S and not found.failure_reports:
        return _of_a_live_one(found)  # on another machine, by its files
    if found.failure_reports or found.failed:
        process, words = next(iter(found.failure_reports.items()), ("", found.failed))
        return Verdict("failed", "bad", f"{process}: {_first_line(words)}" if process else _first_line(words))
    if _is_complete(found):
        return Verdict("complete", "well", f"Complete: {_progress(found)}.")
    if found.silent_s is None:
        return Verdict("empty", "quiet", "Nothing has been written yet: the run was made, but no process has begun.")
    sentence = f"Its processes are gone without a word, after {_progress(found)}: it was killed."
    return Verdict("killed", "bad", f"{sentence} {_resume(found)}")


def _of_a_live_one(found: Evidence) -> Verdict:
    for name, gauges in found.gauges.items():
        stalled_s = float(gauges.get("stalled_s", 0.0))
        if stalled_s > found.stall_after_s:
            why = found.stalls.get(name, "who waits for what is not said yet")
            return Verdict("running", "attention", f"{name} has not moved for {stalled_s:.0f} s: {why}")
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


def _of_an_ended_one(found: Evidence, ending: Mapping[str, Any]) -> Verdict:
    sentence = _first_line(str(ending.get("sentence", "")))
    match ending.get("how"):
        case "complete":
            return Verdict("complete", "well", f"Complete: {_progress(found)}.")
        case "interrupted":
            return Verdict("interrupted", "attention", f"Interrupted after {_progress(found)}. {_resume(found)}")
    return Verdict("failed", "bad", sentence or "Failed without a sentence.")


def _is_complete(found: Evidence) -> bool:
    """As far as the files of a run without an ending can tell."""
    if found.gauges:
        return all(gauges.get("phase") in ("complete", "stopped") for gauges in found.gauges.values())
    limited = [one for one in found.pipelines if one.steps]
    return bool(limited) and all(found.steps.get(one.name, 0) >= (one.steps or 0) for one in limited)


def _progress(found: Evidence) -> str:
    limits = {one.name: one.steps for one in found.pipelines}
    words = [
        f"{name} step {step}" + (f" of {limits[name]}" if limits.get(name) else "")
        for name, step in found.steps.items()
    ]
    return ", ".join(words) if words else "no step"


def _resume(found: Evidence) -> str:
    return f"Go on with: penstock run --resume {found.directory}"


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
