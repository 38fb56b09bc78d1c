"""What a pipeline tells its server to do, in the imperative.

The first effect of a request is its reply, in the words of the wire; instructions follow.
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
    """Journal this event: it changed the state of a pipeline, or of the pool. `decided` is what came of it."""

    event: msgspec.Struct
    decided: tuple[msgspec.Struct, ...]


class FenceMember(msgspec.Struct, frozen=True):
    """End this process for certain: its devices are wanted and it does not answer."""

    member: MemberId
    reason: str


class EvictMember(msgspec.Struct, frozen=True):
    """The member no longer counts: its leases were taken back and its calls will be refused."""

    member: MemberId
    reason: str


class ReleasePayloads(msgspec.Struct, frozen=True):
    """These payloads have no reader any more: their slots can be freed."""

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
    member: MemberId | None = None
    """Only this one's call."""


class FailRun(msgspec.Struct, frozen=True):
    """The run cannot go on; the sentence is for the user."""

    sentence: str


Instruction = (
    Record | FenceMember | EvictMember | ReleasePayloads | NoteFiltered | NoteEvaluation | Log | Announce | FailRun
)
Effect = Reply | Instruction
