"""What a pipeline tells its surroundings to do, in the imperative.

An event that is a call has exactly one answering effect, and it comes first in the list.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.control.points import EvaluationResult
from penstock.records.batch import Batch
from penstock.records.ids import MemberId, PromptIndex, SampleId, StepIndex, Version
from penstock.records.payload import PayloadRef, RingAddress
from penstock.records.prompt import PromptLease
from penstock.records.weights import Manifest
from penstock.wire.messages import Phase

Topic = Literal["leases", "batches", "weights", "phase"]
Level = Literal["debug", "info", "warning", "error"]


class Confirm(msgspec.Struct, frozen=True):
    """Answer: done (or done before), nothing to add."""


class RefuseCall(msgspec.Struct, frozen=True):
    """Answer: nothing was changed. `kind` names the error class the caller should raise."""

    kind: Literal["Stale", "LocalProtocolError", "RunFailed"]
    message: str


class AcceptMember(msgspec.Struct, frozen=True):
    phase: Phase
    version: Version
    step: StepIndex


class AcceptHeartbeat(msgspec.Struct, frozen=True):
    known: bool
    phase: Phase


class GrantLeases(msgspec.Struct, frozen=True):
    leases: tuple[PromptLease, ...]
    phase: Phase


class RefuseLease(msgspec.Struct, frozen=True):
    """Answer: no lease now. Only `exhausted` is final; after the others the caller waits and asks again."""

    verdict: Literal["throttled", "exhausted", "version_too_old"]
    phase: Phase


class AcceptDelivery(msgspec.Struct, frozen=True):
    """Answer: everything was taken except `refused`, whose payloads nobody will read."""

    refused: tuple[SampleId, ...] = ()
    reason: str = ""


class GiveBatch(msgspec.Struct, frozen=True):
    batch: Batch
    rings: tuple[RingAddress, ...]


class DeferBatch(msgspec.Struct, frozen=True):
    """Answer: not yet; ask again when batches are announced."""

    waiting_for: str
    phase: Phase


class ConfirmComplete(msgspec.Struct, frozen=True):
    """Answer: no further batch will ever come."""

    steps: StepIndex


class OfferWeights(msgspec.Struct, frozen=True):
    """Newest weights, for every engine that holds others."""

    manifest: Manifest


class EvictMember(msgspec.Struct, frozen=True):
    """The member no longer counts: its leases were taken back and its calls will be refused."""

    member: MemberId
    reason: str


class ReleasePayloads(msgspec.Struct, frozen=True):
    """Nobody will read these payloads: their slots can be freed."""

    payloads: tuple[PayloadRef, ...]


class NoteFiltered(msgspec.Struct, frozen=True):
    """The filter took these groups: prompts with the reasons. For the story and the metrics; nothing else follows."""

    groups: tuple[tuple[PromptIndex, str], ...]


class NoteEvaluation(msgspec.Struct, frozen=True):
    """A version was evaluated, or was to be and was not. For the story and the metrics; nothing else follows."""

    result: EvaluationResult


class Log(msgspec.Struct, frozen=True):
    level: Level
    line: str


class Announce(msgspec.Struct, frozen=True):
    """Wake those who wait for this: asking again may now succeed."""

    topic: Topic


class FailRun(msgspec.Struct, frozen=True):
    """The run cannot go on; the sentence is for the user."""

    sentence: str


Answer = (
    Confirm
    | RefuseCall
    | AcceptMember
    | AcceptHeartbeat
    | GrantLeases
    | RefuseLease
    | AcceptDelivery
    | GiveBatch
    | DeferBatch
    | ConfirmComplete
)
Instruction = OfferWeights | EvictMember | ReleasePayloads | NoteFiltered | NoteEvaluation | Log | Announce | FailRun
Effect = Answer | Instruction
