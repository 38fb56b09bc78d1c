"""Replays the journal of a run through the same state machines: every decision must be the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from penstock.config.load import load
from penstock.config.run import Config
from penstock.control.notes import encode_notes
from penstock.errors import RunFailed
from penstock.journal.reader import history
from penstock.records.ids import PipelineName
from penstock.roles.controller import controller_of
from penstock.runtime.rundir import RunDir


class Replayed(msgspec.Struct):
    """Result of a replay."""

    events: int = 0
    decisions: int = 0
    """Events with a recorded decision, which was compared."""
    took_s: float = 0.0
    """From the first event to the last."""
    status: dict[PipelineName, dict[str, Any]] = {}
    """State of each pipeline at the end of the replay."""
    diagnosis: dict[PipelineName, str] = {}
    """What each pipeline waited for then, and which process should have made progress."""
    problem: str = ""


def replay_run(root: Path, until_s: float | None = None) -> Replayed:
    """Replays a run directory, up to `until_s` seconds after its first event, and returns the state then."""
    run = RunDir.open(root)
    return replayed(run.journal_path, load(run.config_path), until_s)


def replayed(journal: Path, config: Config, until_s: float | None = None) -> Replayed:
    """Replays a journal with a configuration."""
    controller, found = controller_of(config), Replayed()
    first: float | None = None
    now = 0.0
    for entry in history(journal):
        first = entry.at if first is None else first
        if until_s is not None and entry.at - first > until_s:
            break
        now = entry.at
        found.took_s = now - first
        if not controller.has_part(entry.pipeline):
            raise RunFailed(f"{journal} has events of {entry.pipeline}, which is not in the configuration")
        decided = encode_notes(controller.replay(entry.pipeline, entry.body, entry.at))
        found.events += 1
        found.decisions += bool(entry.decided)
        if decided != entry.decided:
            found.problem = (
                f"event {entry.seq} of {entry.pipeline} was decided differently: recorded {_readable(entry.decided)}, "
                f"replayed {_readable(decided)}"
            )
            break
    at = now if until_s is None or first is None else first + until_s
    controller.check()
    found.status, found.diagnosis = controller.status(at), controller.diagnose(at)
    return found


def _readable(decided: bytes) -> object:
    return msgspec.msgpack.decode(decided) if decided else None
