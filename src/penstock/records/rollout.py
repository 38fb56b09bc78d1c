"""What a worker reports about the samples it generated: scalars and a reference."""

from __future__ import annotations

import msgspec

from penstock.records.ids import SampleId, Version
from penstock.records.payload import PayloadRef


class StageTimes(msgspec.Struct, frozen=True, array_like=True):
    """Seconds spent in each stage of generation, for the sample's story and the step's line of metrics."""

    prepare_s: float = 0.0
    generate_s: float = 0.0
    postprocess_s: float = 0.0
    waited_s: float = 0.0
    """From the lease to the start of generation, less the preparation."""
    lease_s: float = 0.0
    """What the ask took that it was granted by."""
    deliver_s: float = 0.0
    """What this worker's last delivery before it took."""


class Rollout(msgspec.Struct, frozen=True):
    """One finished sample. Delivering it twice is harmless: the ledger knows the sample's state."""

    sample: SampleId
    version: Version
    """The oldest weights any of its tokens were sampled with."""
    weights_digest: str
    """What the engine said it was serving, so that undelivered or torn weights cannot go unnoticed."""
    reward: float
    length: int
    """Generated tokens, or environment steps."""
    payload: PayloadRef
    times: StageTimes = StageTimes()
    unscored: str = ""
    """Why it has no reward of its own, if so: `reward` is then the mean of the others, and it has no advantage."""


class Score(msgspec.Struct, frozen=True, array_like=True):
    """One finished sample of an evaluation: it is counted and never trained, so it has no payload."""

    sample: SampleId
    version: Version
    """The oldest weights any part of it was made with."""
    newest: Version
    """The newest: it counts only if the two are one, so an evaluation never mixes versions."""
    weights_digest: str
    reward: float
    length: int


class FailedRollout(msgspec.Struct, frozen=True):
    """A sample that could not be made. A failed rollout is a record, not an exception."""

    sample: SampleId
    hook: str
    error: str
    """The traceback, shortened to what a story needs."""
    poison: bool = False
    """Retrying cannot help (an over-long prompt, say): set the prompt aside at once."""
