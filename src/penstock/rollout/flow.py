"""The words of the prefetch machine: where a lease can be, what happens to it, what to do about it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from penstock.records.ids import SampleId
from penstock.records.prompt import PromptLease
from penstock.wire.messages import Verdict

Ticket = int
"""Numbers the leases of one worker in the order they were granted."""


class Stage(StrEnum):
    """Where a lease is."""

    LEASED = "leased"
    PREPARING = "preparing"
    READY = "ready"
    GENERATING = "generating"
    GENERATED = "generated"
    POSTPROCESSING = "postprocessing"
    SCORING = "scoring"
    FINISHED = "finished"
    DELIVERING = "delivering"
    DELIVERED = "delivered"
    RETURNED = "returned"


TRANSITIONS: dict[Stage, dict[str, Stage]] = {
    Stage.LEASED: {"Prepare": Stage.PREPARING, "ReturnLeases": Stage.RETURNED},
    Stage.PREPARING: {
        "PrepareEnded": Stage.READY,
        "PrepareEnded (failed)": Stage.FINISHED,
        "ReturnLeases": Stage.RETURNED,
    },
    Stage.READY: {"Generate": Stage.GENERATING, "ReturnLeases": Stage.RETURNED},
    Stage.GENERATING: {
        "GenerateEnded": Stage.GENERATED,
        "GenerateEnded (failed, with others)": Stage.READY,
        "GenerateEnded (failed, alone)": Stage.FINISHED,
        "ReturnLeases": Stage.RETURNED,
    },
    Stage.GENERATED: {"Postprocess": Stage.POSTPROCESSING, "ReturnLeases": Stage.RETURNED},
    Stage.POSTPROCESSING: {
        "PostprocessEnded": Stage.FINISHED,
        "ScoringBegan": Stage.SCORING,
        "ReturnLeases": Stage.RETURNED,
    },
    Stage.SCORING: {"PostprocessEnded": Stage.FINISHED, "ReturnLeases": Stage.RETURNED},
    Stage.FINISHED: {"Deliver": Stage.DELIVERING, "ReturnLeases": Stage.RETURNED},
    Stage.DELIVERING: {"DeliverEnded": Stage.DELIVERED},
    Stage.DELIVERED: {},
    Stage.RETURNED: {},
}
"""Every move a lease can make, by the event or effect that makes it."""

# Events


class Started(msgspec.Struct, frozen=True):
    """Preflight passed."""


class LeaseAnswered(msgspec.Struct, frozen=True):
    """The controller answered an ask."""

    leases: tuple[PromptLease, ...]
    verdict: Verdict
    waited_s: float = 0.0
    """How long the answer took: a controller that held the call need not be given a pause as well."""


class PrepareEnded(msgspec.Struct, frozen=True):
    """One lease was prepared, or (with `failed`) could not be."""

    ticket: Ticket
    size_bytes: int = 0
    failed: bool = False


class GenerateEnded(msgspec.Struct, frozen=True):
    """A batch came out of the engine, or (with `failed`) its collate or generate raised."""

    batch: int
    sizes_bytes: tuple[int, ...] = ()
    """Held by each ticket of the batch from now on; empty leaves them as they were."""
    failed: bool = False


class ScoringBegan(msgspec.Struct, frozen=True):
    """Postprocessing of one lease waits for its rewards, which are computed elsewhere; `PostprocessEnded` follows."""

    ticket: Ticket


class PostprocessEnded(msgspec.Struct, frozen=True):
    """One lease was postprocessed and stored, or failed there; either way it can be reported."""

    ticket: Ticket


class DeliverEnded(msgspec.Struct, frozen=True):
    """The controller took the delivery in flight."""


class ReturnEnded(msgspec.Struct, frozen=True):
    """The controller took leases back."""


class PrefetchSet(msgspec.Struct, frozen=True):
    """The live setting was read."""

    on: bool


class EngineLooked(msgspec.Struct, frozen=True):
    """How full the engine is."""

    decoding: int
    """Completions."""
    waiting: int
    """Completions that the engine has, and has no room for."""
    preempted: int = 0
    """Since the last look: thrown out for want of room, to be read again."""


class StopAsked(msgspec.Struct, frozen=True):
    """The worker should end: what is in the engine or behind it is finished, the waiting line is given back."""

    reason: str


class Abandoned(msgspec.Struct, frozen=True):
    """The worker ends now: everything not yet on its way to the controller is given back."""

    reason: str


Event = (
    Started
    | LeaseAnswered
    | PrepareEnded
    | GenerateEnded
    | ScoringBegan
    | PostprocessEnded
    | DeliverEnded
    | ReturnEnded
    | PrefetchSet
    | EngineLooked
    | StopAsked
    | Abandoned
)

# Effects


class AskLease(msgspec.Struct, frozen=True):
    """Ask the controller for up to `samples` samples, after a pause."""

    samples: int
    after_s: float = 0.0


class Prepare(msgspec.Struct, frozen=True):
    """Prepare these leases, in order; each ends with its own PrepareEnded."""

    tickets: tuple[Ticket, ...]


class Generate(msgspec.Struct, frozen=True):
    """Collate and generate these leases as one batch."""

    batch: int
    tickets: tuple[Ticket, ...]


class Postprocess(msgspec.Struct, frozen=True):
    """Postprocess and store these leases, in order; each ends with its own PostprocessEnded."""

    tickets: tuple[Ticket, ...]


class Deliver(msgspec.Struct, frozen=True):
    """Report the outcome of these leases."""

    tickets: tuple[Ticket, ...]


class ReturnLeases(msgspec.Struct, frozen=True):
    """Give these samples back, at once."""

    tickets: tuple[Ticket, ...]
    samples: tuple[SampleId, ...]


class Finish(msgspec.Struct, frozen=True):
    """Nothing is held and nothing more will come."""

    reason: str


Effect = AskLease | Prepare | Generate | Postprocess | Deliver | ReturnLeases | Finish
