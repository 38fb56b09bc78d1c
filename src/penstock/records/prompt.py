"""Leases: prompts that a worker generates."""

from __future__ import annotations

import msgspec

from penstock.records.ids import PromptIndex, SampleId, Version


class PromptLease(msgspec.Struct, frozen=True, array_like=True):
    """Permission to generate some members of one prompt's group, held by one worker.

    The prompt is not sent: every worker computes it from its position in the stream. `members` lists the members of
    the group to generate: all of them at first, the missing ones when the lease is a re-issue.
    """

    prompt: PromptIndex
    attempt: int
    """How often the whole group was discarded and started again."""
    samples: tuple[SampleId, ...]
    members: tuple[int, ...]
    min_version: Version
    """Samples of older weights would be outdated before they could be trained."""
    evaluation: Version | None = None
    """If set, the samples are not trained: they evaluate exactly this version, on a prompt of the held-out stream."""
