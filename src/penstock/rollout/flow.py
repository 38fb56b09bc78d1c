"""Stages of a lease, and the events and effects of the prefetch machine."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from penstock.records.ids import SampleId
from penstock.records.prompt import PromptLease
from penstock.wire.messages import Verdict

Ticket = int
"""Number of a lease within one worker, in the order of the grants."""


class Stage(StrEnum):
    """Stage of a lease in the worker."""

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
"""Every transition of a lease, by the event or effect that causes it."""

# Events


class Started(msgspec.Struct, frozen=True):
    """Preflight passed."""


class LeaseAnswered(msgspec.Struct, frozen=True):
    """The controller answered a lease request."""

    leases: tuple[PromptLease, ...]
    verdict: Verdict
    waited_s: float = 0.0
    """How long the answer took: after a long wait the next request needs no backoff."""


class PrepareEnded(msgspec.Struct, frozen=True):
    """One lease was prepared, or (with `failed`) its preparation failed."""

    ticket: Ticket
    size_bytes: int = 0
    failed: bool = False


class GenerateEnded(msgspec.Struct, frozen=True):
    """A batch left the engine, or (with `failed`) its collate or generate raised."""

    batch: int
    sizes_bytes: tuple[int, ...] = ()
    """New size of each ticket of the batch; empty leaves the sizes unchanged."""
    failed: bool = False


class ScoringBegan(msgspec.Struct, frozen=True):
    """Postprocessing of one lease waits for rewards that run on other threads; `PostprocessEnded` follows."""

    ticket: Ticket


class PostprocessEnded(msgspec.Struct, frozen=True):
    """One lease was postprocessed and stored, or this failed; in both cases it can be delivered."""

    ticket: Ticket


class DeliverEnded(msgspec.Struct, frozen=True):
    """The controller accepted the delivery in flight."""


class ReturnEnded(msgspec.Struct, frozen=True):
    """The controller accepted returned leases."""


class PrefetchSet(msgspec.Struct, frozen=True):
    """The live setting was read."""

    on: bool


class EnginePolled(msgspec.Struct, frozen=True):
    """Load of the engine."""

    decoding: int
    """Completions."""
    waiting: int
    """Completions that wait in the engine for room."""
    preempted: int = 0
    """Preempted for lack of room since the last poll; their prefill is repeated."""


class StopRequested(msgspec.Struct, frozen=True):
    """Graceful stop: leases in the engine or after it are finished, queued leases are returned."""

    reason: str


class Abandoned(msgspec.Struct, frozen=True):
    """Immediate stop: every lease that is not being delivered is returned."""

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
    | EnginePolled
    | StopRequested
    | Abandoned
)

# Effects


class AskLease(msgspec.Struct, frozen=True):
    """Request up to `samples` samples from the controller, after `after_s`."""

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
    """Return these samples to the controller at once."""

    tickets: tuple[Ticket, ...]
    samples: tuple[SampleId, ...]


class Finish(msgspec.Struct, frozen=True):
    """The worker holds no lease and will request none."""

    reason: str


Effect = AskLease | Prepare | Generate | Postprocess | Deliver | ReturnLeases | Finish
