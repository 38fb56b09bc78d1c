"""`[pipeline.model]` and `[pipeline.lora]`: the trained model. The tables of engines are in their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from penstock.records.section import Positive, PositiveFloat, Section


class TinyModel(Section):
    """A small causal language model built from a config, with a character tokenizer."""

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
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights in training and serving. In `bfloat16` the trainer keeps float32 master weights, and the
    optimiser's state in float32. `auto`: `bfloat16` where `train.device` is a GPU, else `float32`."""


class HubModel(Section):
    """A pretrained model by its name on the Hugging Face hub, downloaded once into the cache of huggingface_hub."""

    kind: Literal["hub"] = "hub"
    """Chooses this table."""
    name: Annotated[str, Field(pattern=r"^[\w.-]+(/[\w.-]+)?$")]
    """As on the hub: `Qwen/Qwen2.5-0.5B-Instruct`."""
    revision: str = ""
    """A branch, a tag or a commit; the default branch when empty. A commit makes runs repeatable."""
    cache: Path | None = None
    """The cache directory; by default from HF_HUB_CACHE or HF_HOME. With HF_HUB_OFFLINE=1 nothing is downloaded."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights in training and serving. In `bfloat16` the trainer keeps float32 master weights, and the
    optimiser's state in float32. `auto`: `bfloat16` where `train.device` is a GPU, else `float32`."""


class LoraSection(Section):
    """Trains a low-rank adapter of a frozen language model. Versions and checkpoints hold the adapter only."""

    rank: Positive = 16
    """Rank of the two matrices that are trained for each target."""
    alpha: PositiveFloat = 32.0
    """The adapter's output is scaled by this over `rank`."""
    targets: list[str] = []
    """Names of the layers, for example `["q_proj", "v_proj"]`; all linear layers but the head by default."""


class MlpModel(Section):
    """A policy and value network for gymnasium environments."""

    kind: Literal["mlp"] = "mlp"
    """Chooses this table."""
    hidden: Positive = 64
    """Width of its layers."""
    normalize_observations: bool = False
    """Subtract the running mean of each observation component and divide by its running spread. The statistics are part
    of the weights and of checkpoints; evaluation uses them as they are."""
    normalize_rewards: bool = False
    """Divide rewards by the running spread of discounted returns and cut them off at 10 spreads, for the loss only. The
    value network already adapts to the scale of returns; use this for rewards with rare extremes."""


Model = Annotated[TinyModel | PathModel | HubModel | MlpModel, Field(discriminator="kind")]
