"""Effects of an event: instructions from a pipeline to its server.

The first effect of a request is its reply, a struct of `wire/messages.py`; instructions follow.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.control.evaluation_state import EvaluationResult
from penstock.records.ids import MemberId, PromptIndex
from penstock.records.payload import PayloadRef
from penstock.wire.messages import Reply

Topic = Literal["leases", "batches", "weights", "phase", "checkpoint", "devices", "orders"]
Level = Literal["debug", "info", "warning", "error"]


class Record(msgspec.Struct, frozen=True):
    """Journal this event: it changed the state of a pipeline or of the pool. `decided` are its effects."""

    event: msgspec.Struct
    decided: tuple[msgspec.Struct, ...]


class FenceMember(msgspec.Struct, frozen=True):
    """Make sure that this process has ended: its devices are requested and it does not respond."""

    member: MemberId
    reason: str


class EvictMember(msgspec.Struct, frozen=True):
    """The member is removed: its leases were revoked and its calls are refused."""

    member: MemberId
    reason: str


class ReleasePayloads(msgspec.Struct, frozen=True):
    """These payloads have no reader: their slots can be freed."""

    payloads: tuple[PayloadRef, ...]


class NoteFiltered(msgspec.Struct, frozen=True):
    """Groups that the filter removed, as (prompt, reason). Only for the story and the metrics."""

    groups: tuple[tuple[PromptIndex, str], ...]


class NoteEvaluation(msgspec.Struct, frozen=True):
    """An evaluation ended or was skipped. Only for the story and the metrics."""

    result: EvaluationResult


class Log(msgspec.Struct, frozen=True):
    level: Level
    line: str


class Announce(msgspec.Struct, frozen=True):
    """Wake the calls that wait for this topic: a retry may now succeed."""

    topic: Topic
    member: MemberId | None = None
    """Wake only the calls of this member."""


class FailRun(msgspec.Struct, frozen=True):
    """The run cannot continue; the sentence is shown to the user."""

    sentence: str


Instruction = (
    Record | FenceMember | EvictMember | ReleasePayloads | NoteFiltered | NoteEvaluation | Log | Announce | FailRun
)
Effect = Reply | Instruction
