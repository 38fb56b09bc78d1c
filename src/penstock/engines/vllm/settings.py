"""`[pipeline.engine]` with `kind = "vllm"`."""

from __future__ import annotations

from typing import ClassVar, Literal

from penstock.engines.section import Capabilities, EngineSection
from penstock.records.section import Positive, Seconds


class VllmEngineSection(EngineSection):
    """A vLLM server that the worker starts and owns. Its weights are always updated in place."""

    REQUESTS_KEY: ClassVar[str] = "max_requests"
    kind: Literal["vllm"] = "vllm"
    """Chooses this table."""
    python: str = ""
    """The Python of an environment with vLLM and this package; empty: the one that runs Penstock."""
    max_requests: Positive = 64
    """Completions decoded together; the others wait in the server."""
    max_length: Positive | None = None
    """Tokens of the longest context; the model's own limit by default."""
    tensor_parallel: Positive = 1
    """GPUs over which one copy of the model is divided."""
    data_parallel: Positive = 1
    """Copies of the model in one server, each on its own `tensor_parallel` GPUs, with its own `max_requests`."""
    cache_gb: Positive = 1
    """GiB for keys and values on CPU. On a GPU the server takes its share of the device: see its own flags."""
    eager: bool = False
    """No compiled graphs: the server starts much sooner and decodes slower."""
    options: list[str] = []
    """Further flags of the server, for example `["--gpu-memory-utilization", "0.5"]`."""
    start_s: Seconds = 600.0
    """How long the server may take until it answers."""
    stall_s: Seconds = 120.0
    """A server that does not answer for this long is replaced, and its worker with it."""
    request_s: Seconds = 1800.0
    """How long one completion may take, pauses included."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(weights="files", device_weights=True, tensor_parallel=True, adapters=True)

    @property
    def needs(self) -> tuple[str, str] | None:
        return None if self.python else ("engine.kind = 'vllm' without engine.python", "vllm")

    @property
    def devices(self) -> int:
        return self.tensor_parallel * self.data_parallel

    @property
    def requests_at_once(self) -> int:
        return self.max_requests * self.data_parallel

    @property
    def starting_s(self) -> float:
        return self.start_s
