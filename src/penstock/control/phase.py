"""The phases of a pipeline: running -> draining -> complete -> stopped.

Completion is not shutdown. A pipeline is *draining* when every sample its remaining steps need has been issued, and
*complete* only when no sample, buffered or in flight, can fill a further step and the last step can no longer be lost.
Stopping is always explicit. Drops and trainer rollbacks lead back from draining to running. Only a resume of the run
leads back from complete, because workers that received `exhausted` have left. After a resume a pipeline is complete
again when its trainer has started from the checkpoint of the last step; if that is lost, the missing steps are trained
again.
"""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.errors import InvalidTransition
from penstock.wire.messages import Phase

PHASES: Final[dict[tuple[Phase, Phase], str]] = {
    ("running", "draining"): "everything the remaining steps need is issued, or the prompts ran out",
    ("draining", "running"): "a drop or a trainer rollback made it necessary to issue more",
    ("running", "complete"): "the last step is trained and durable (all that was in flight ended in one event)",
    ("draining", "complete"): "the last step is trained and durable",
    ("running", "stopped"): "a stop was requested, or the run failed",
    ("draining", "stopped"): "a stop was requested, or the run failed",
    ("complete", "stopped"): "a stop was requested",
    ("complete", "running"): "the run was resumed with more to do",
    ("complete", "draining"): "the run was resumed, and its trainer has not loaded the last checkpoint yet",
    ("stopped", "running"): "the run was resumed",
    ("stopped", "draining"): "the run was resumed",
    ("stopped", "complete"): "the run was resumed and has nothing left to do",
}


class Prospects(msgspec.Struct, frozen=True):
    """Inputs of the phase decision."""

    stop_asked: bool
    finished: bool
    """No sample, buffered or in flight, can fill a further step, and the last version is evaluated."""
    safe: bool
    """The last step is in a checkpoint, or the trainer deregistered."""
    still_needed: bool
    """More groups must be issued."""


def decide(current: Phase, prospects: Prospects) -> Phase:
    """The next phase; raises if `PHASES` does not allow the move."""
    if prospects.stop_asked:
        phase: Phase = "stopped"
    elif current == "complete" or (prospects.finished and prospects.safe):
        phase = "complete"
    elif prospects.still_needed:
        phase = "running"
    else:
        phase = "draining"
    if phase != current and (current, phase) not in PHASES:
        raise InvalidTransition(f"a pipeline cannot go from {current} to {phase}")
    return phase
