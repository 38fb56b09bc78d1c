"""`[pipeline.engine]` with `kind = "torch"`."""

from __future__ import annotations

from typing import ClassVar, Literal

from penstock.engines.section import Capabilities, EngineSection
from penstock.records.section import NonNegative, Positive


class TorchEngineSection(EngineSection):
    """Samples from the model with torch, in the worker's process."""

    REQUESTS_KEY: ClassVar[str] = "rows"
    kind: Literal["torch"] = "torch"
    """Chooses this table."""
    rows: Positive = 64
    """Completions decoded together; the others wait in order of arrival."""
    cache_tokens: Positive = 131072
    """Bound on rows times the longest row, in tokens of the KV cache on the device."""
    kept_tokens: NonNegative = 65536
    """Bound on KV cache tokens kept while conversations wait for their environment; others are prefilled again."""
    reread: bool = False
    """Prefill contexts again after a weight update, instead of reusing older keys and values."""
    graphs: bool = True
    """On a GPU: capture decode steps as CUDA graphs. If false, the engine uses less memory and decodes slower."""

    tensor_parallel: Positive = 1
    """Processes over which the model is sharded, by the plan of transformers for it; each uses one GPU, if any."""

    @property
    def capabilities(self) -> Capabilities:
        whole = self.tensor_parallel == 1
        return Capabilities(
            gymnasium=whole, ranks=whole, device_weights=whole, adapters=whole, sleep=whole, tensor_parallel=True
        )

    @property
    def processes(self) -> int:
        return self.tensor_parallel
