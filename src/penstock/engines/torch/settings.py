"""`[pipeline.engine]` with `kind = "torch"`."""

from __future__ import annotations

from typing import Literal

from penstock.engines.section import Capabilities, EngineSection
from penstock.records.section import NonNegative, Positive


class TorchEngineSection(EngineSection):
    """Samples from the model with torch, in the worker's own process."""

    kind: Literal["torch"] = "torch"
    """Chooses this table."""
    batching: Literal["static", "continuous"] = "static"
    """`static` decodes a batch to its end; in `continuous` completions join and leave at any decode step."""
    rows: Positive = 64
    """Continuous: completions decoded together; the others wait in the order they came."""
    cache_tokens: Positive = 65536
    """Continuous: bound on rows times the longest of them, in tokens with their keys and values on the device."""
    kept_tokens: NonNegative = 65536
    """Continuous: bound on tokens kept of conversations that wait for their environment; beyond it they are re-read."""
    reread: bool = False
    """Continuous: read contexts again after the weights changed, instead of going on from older keys and values."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            requests=self.batching == "continuous",
            gymnasium=self.batching == "static",
            device_weights=True,
            adapters=True,
        )

    @property
    def requests_at_once(self) -> int:
        return self.rows
