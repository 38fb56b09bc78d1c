"""`[pipeline.engine]` with `kind = "torch"`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from penstock.engines.section import Capabilities, EngineSection
from penstock.records.section import LANGUAGE_ONLY, NonNegative, Positive


class TorchEngineSection(EngineSection):
    """Samples from the model with torch, in the worker's process."""

    REQUESTS_KEY: ClassVar[str] = "rows"
    kind: Literal["torch"] = "torch"
    """Chooses this table."""
    rows: Annotated[Positive, LANGUAGE_ONLY] = 64
    """Completions decoded together; the others wait in order of arrival."""
    cache_tokens: Annotated[Positive, LANGUAGE_ONLY] = 131072
    """Bound on rows times the longest row, in tokens of the KV cache on the device."""
    kept_tokens: Annotated[NonNegative, LANGUAGE_ONLY] = 65536
    """Bound on KV cache tokens kept while conversations wait for their environment; others are prefilled again."""
    reread: Annotated[bool, LANGUAGE_ONLY] = False
    """Prefill contexts again after a weight update, instead of reusing older keys and values."""
    graphs: Annotated[bool, LANGUAGE_ONLY] = True
    """On a GPU: capture decode steps as CUDA graphs. If false, the engine uses less memory and decodes slower."""

    tensor_parallel: Annotated[Positive, LANGUAGE_ONLY] = 1
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
