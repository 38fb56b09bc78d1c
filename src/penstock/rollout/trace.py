"""Traces of a running worker: small structured events, cheap enough to leave on.

    A  BranchesTaken    which decisions the prefetch machine took, how often
    B  QueueSampled     samples and bytes held, by stage
    C  GenerateEntered, GenerateLeft    one batch in the engine
    D  LeaseAnswered    what the controller granted, or why not
    E  which groups the filter took, and why: decided, journalled and counted by the controller

A and B are sampled; C and D are complete. The newest are kept in memory for diagnosis. All are counted in
`Runner.statistics()`, and each is one DEBUG line in the log.
"""

from __future__ import annotations

from typing import Any

import msgspec


class BranchesTaken(msgspec.Struct, frozen=True, tag="branches_taken"):
    """Trace A: counts since the previous one."""

    at: float
    counts: dict[str, int]


class QueueSampled(msgspec.Struct, frozen=True, tag="queue_sampled"):
    """Trace B."""

    at: float
    samples: dict[str, int]
    """By stage."""
    held_bytes: int
    generating_batches: int
    prefetch: bool


class GenerateEntered(msgspec.Struct, frozen=True, tag="generate_entered"):
    """Trace C, entry."""

    at: float
    batch: int
    prompts: int
    samples: int


class GenerateLeft(msgspec.Struct, frozen=True, tag="generate_left"):
    """Trace C, exit."""

    at: float
    batch: int
    took_s: float
    error: str = ""


class LeaseAnswered(msgspec.Struct, frozen=True, tag="lease_answered"):
    """Trace D: dispatched or throttled."""

    at: float
    asked_samples: int
    granted_samples: int
    verdict: str
    waited_s: float
    held_samples: int
    phase: str = ""


Trace = BranchesTaken | QueueSampled | GenerateEntered | GenerateLeft | LeaseAnswered


def as_line(trace: Trace) -> str:
    """One trace as one line of text."""
    fields: dict[str, Any] = msgspec.to_builtins(trace)
    name = fields.pop("type")
    return f"{name} " + " ".join(f"{field}={value}" for field, value in fields.items())
