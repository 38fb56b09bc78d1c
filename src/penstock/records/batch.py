"""The batch of one training step."""

from __future__ import annotations

import msgspec

from penstock.records.ids import PromptIndex, SampleId, StepIndex, Version
from penstock.records.payload import PayloadRef


class BatchGroup(msgspec.Struct, frozen=True):
    """All samples of one prompt, by column. The trainer computes advantages within a group."""

    prompt: PromptIndex
    attempt: int
    samples: tuple[SampleId, ...]
    rewards: tuple[float, ...]
    versions: tuple[Version, ...]
    lengths: tuple[int, ...]
    payloads: tuple[PayloadRef, ...]


class Batch(msgspec.Struct, frozen=True):
    """The groups of one step. The last batch of a run may be partial or empty."""

    step: StepIndex
    groups: tuple[BatchGroup, ...]
    final: bool = False
    """This is the last batch."""
