"""`[pipeline.model]` and `[pipeline.engine]`: what is trained, and what draws tokens from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from penstock.records.section import NonNegative, Positive, Seconds, Section


class TinyModel(Section):
    """A small causal language model built from a config, with a character tokenizer of its own."""

    kind: Literal["tiny"] = "tiny"
    """Chooses this table."""
    hidden: Positive = 128
    """Width of its layers."""
    layers: Positive = 1
    """Transformer layers."""
    heads: Positive = 4
    """Attention heads of each layer; must divide `hidden`."""
    max_length: Positive = 128
    """Tokens of prompt and completions together."""


class PathModel(Section):
    """A pretrained model from a local directory (config.json and safetensors, or one GGUF file)."""

    kind: Literal["path"] = "path"
    """Chooses this table."""
    path: Path
    """The directory."""
    gguf_file: str = ""
    """The file in it, if the weights are in GGUF."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model is trained and served in."""


class MlpModel(Section):
    """A policy and value network for gymnasium environments."""

    kind: Literal["mlp"] = "mlp"
    """Chooses this table."""
    hidden: Positive = 64
    """Width of its layers."""


Model = Annotated[TinyModel | PathModel | MlpModel, Field(discriminator="kind")]


class TorchEngineSection(Section):
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


class VllmEngineSection(Section):
    """A vLLM server that the worker starts and owns. Its weights are always updated in place."""

    kind: Literal["vllm"] = "vllm"
    """Chooses this table."""
    python: str = ""
    """The Python of an environment with vLLM and this package; empty: the one that runs Penstock."""
    max_requests: Positive = 64
    """Completions decoded together; the others wait in the server."""
    max_length: Positive | None = None
    """Tokens of the longest context; the model's own limit by default."""
    cache_gb: Positive = 1
    """GiB for keys and values on CPU. On a GPU the server takes its share of the device: see its own flags."""
    eager: bool = False
    """Do without compiled graphs: the server starts much sooner and decodes slower."""
    options: list[str] = []
    """Further flags of the server, for example `["--gpu-memory-utilization", "0.5"]`."""
    start_s: Seconds = 600.0
    """How long the server may take until it answers."""
    stall_s: Seconds = 120.0
    """A server that does not answer for so long is replaced, and its worker with it."""
    request_s: Seconds = 1800.0
    """How long one completion may take, pauses included."""


def _engine_kind(engine: Any) -> str:
    """`torch`, unless said otherwise."""
    return engine.get("kind", "torch") if isinstance(engine, dict) else engine.kind


Engine = Annotated[
    Annotated[TorchEngineSection, Tag("torch")] | Annotated[VllmEngineSection, Tag("vllm")], Discriminator(_engine_kind)
]
