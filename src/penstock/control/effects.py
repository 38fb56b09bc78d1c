"""What a pipeline tells its server to do, in the imperative.

The first effect of a request is its reply, in the words of the wire; instructions follow.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.control.points import EvaluationResult
from penstock.records.ids import MemberId, PromptIndex
from penstock.records.payload import PayloadRef
from penstock.records.weights import Manifest
from penstock.wire.messages import Reply

Topic = Literal["leases", "batches", "weights", "phase"]
Level = Literal["debug", "info", "warning", "error"]


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


Instruction = OfferWeights | EvictMember | ReleasePayloads | NoteFiltered | NoteEvaluation | Log | Announce | FailRun
Effect = Reply | Instruction
