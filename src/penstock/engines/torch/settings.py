"""`[pipeline.engine]` with `kind = "torch"`."""

from __future__ import annotations

from typing import ClassVar, Literal

from penstock.engines.section import Capabilities, EngineSection
from penstock.records.section import NonNegative, Positive


class TorchEngineSection(EngineSection):
    """Samples from the model with torch, in the worker's own process."""

    REQUESTS_KEY: ClassVar[str] = "rows"
    kind: Literal["torch"] = "torch"
    """Chooses this table."""
    rows: Positive = 64
    """Completions decoded together; the others wait in the order they came."""
    cache_tokens: Positive = 131072
    """Bound on rows times the longest of them, in tokens with their keys and values on the device."""
    kept_tokens: NonNegative = 65536
    """Bound on tokens kept of conversations that wait for their environment; beyond it they are read again."""
    reread: bool = False
    """Read contexts again after the weights changed, instead of going on from older keys and values."""
    graphs: bool = True
    """On a GPU: capture decode steps as CUDA graphs. Without, the engine needs less memory and decodes slower."""

    tensor_parallel: Positive = 1
    """Processes over which the model is divided, by the plan that transformers has for it; on GPUs each has its own."""

    @property
    def capabilities(self) -> Capabilities:
        whole = self.tensor_parallel == 1
        return Capabilities(
            gymnasium=whole, ranks=whole, device_weights=whole, adapters=whole, sleep=whole, tensor_parallel=True
        )

    @property
    def processes(self) -> int:
        return self.tensor_parallel
