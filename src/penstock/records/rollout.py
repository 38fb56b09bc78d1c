"""Reports of a worker on its samples: scalars and a payload reference."""

from __future__ import annotations

import msgspec

from penstock.records.ids import SampleId, Version
from penstock.records.payload import PayloadRef


class StageTimes(msgspec.Struct, frozen=True, array_like=True):
    """Seconds spent in each stage of generation, for `penstock story` and the metrics line of the step."""

    prepare_s: float = 0.0
    generate_s: float = 0.0
    postprocess_s: float = 0.0
    waited_s: float = 0.0
    """From the lease to the start of generation, without the preparation."""
    lease_s: float = 0.0
    """Duration of the `AskLease` call that granted it."""
    deliver_s: float = 0.0
    """Duration of this worker's previous `Deliver` call."""


class Rollout(msgspec.Struct, frozen=True):
    """One finished sample. Delivering it twice is harmless: the ledger tracks the state of every sample."""

    sample: SampleId
    version: Version
    """The oldest weights that any of its tokens was sampled with."""
    weights_digest: str
    """Digest of the weights that the engine served, so that undelivered or torn weights are detected."""
    reward: float
    length: int
    """Generated tokens, or environment steps."""
    payload: PayloadRef
    times: StageTimes = StageTimes()
    unscored: str = ""
    """If set, why it was not scored: `reward` is then the mean of the others, and it has no advantage."""


class Score(msgspec.Struct, frozen=True, array_like=True):
    """One finished sample of an evaluation. It is never trained, so it has no payload."""

    sample: SampleId
    version: Version
    """The oldest weights that any part of it was generated with."""
    newest: Version
    """The newest. The score counts only if both are equal, so an evaluation never mixes versions."""
    weights_digest: str
    reward: float
    length: int


class FailedRollout(msgspec.Struct, frozen=True):
    """A sample that could not be generated. A failed rollout is a record, not an exception."""

    sample: SampleId
    hook: str
    error: str
    """The traceback, shortened."""
    poison: bool = False
    """A retry cannot succeed (for example, the prompt is too long): set the prompt aside at once."""
