"""What a worker is asked to generate."""

from __future__ import annotations

import msgspec

from penstock.records.ids import PromptIndex, SampleId, Version


class PromptLease(msgspec.Struct, frozen=True, array_like=True):
    """Permission to generate some members of one prompt's group, held by one worker.

    The prompt itself does not travel: every worker computes it from its position in the stream. `members` says
    which members of the group are asked for (all of them at first, the missing ones when the lease is a re-issue).
    """

    prompt: PromptIndex
    attempt: int
    """Counts how often the whole group was thrown away and started afresh."""
    samples: tuple[SampleId, ...]
    members: tuple[int, ...]
    min_version: Version
    """Weights older than this would make the samples outdated before they could be trained."""
    evaluation: Version | None = None
    """Not to be trained: a part of the evaluation of exactly this version, at a position of the held-out stream."""
