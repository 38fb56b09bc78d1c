"""From the user's configuration to policies and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.config.pipeline import MlpModel, PathModel, PipelineSection, TinyModel
from penstock.config.run import Config
from penstock.errors import ConfigError
from penstock.train.loss import ControlLossSettings, LossSettings, TokenLossSettings
from penstock.train.model import (
    ControlPolicy,
    GymnasiumPolicy,
    LanguagePolicy,
    ModelSpec,
    PretrainedLanguageModel,
    TinyLanguageModel,
    build,
)
from penstock.train.step import OptimSettings


def policy_of(config: Config, pipeline: PipelineSection, environment: Any) -> LanguagePolicy | ControlPolicy:
    """The initial policy in host memory: equal numbers in every process."""
    return build(_spec(config, pipeline, environment))


def _spec(config: Config, pipeline: PipelineSection, environment: Any) -> ModelSpec:
    match pipeline.model:
        case TinyModel(hidden=hidden, layers=layers, heads=heads, max_length=max_length):
            alphabet = getattr(environment, "alphabet", None)
            options = {} if alphabet is None else {"alphabet": alphabet}
            return TinyLanguageModel(
                hidden_size=hidden,
                layers=layers,
                heads=heads,
                max_positions=max_length,
                seed=config.run.seed,
                **options,
            )
        case PathModel(path=path, gguf_file=gguf_file, dtype=dtype):
            return PretrainedLanguageModel(path=str(path), gguf_file=gguf_file or None, dtype=dtype)
        case MlpModel(hidden=hidden):
            return GymnasiumPolicy(
                observation_shape=environment.spaces.observation_shape,
                action_kind=environment.spaces.action_kind,
                action_size=environment.spaces.action_size,
                hidden_size=hidden,
                seed=config.run.seed,
            )


def loss_of(pipeline: PipelineSection) -> LossSettings:
    if isinstance(pipeline.model, MlpModel):
        return ControlLossSettings(**pipeline.control_loss.model_dump())
    return TokenLossSettings(**pipeline.token_loss.model_dump(), temperature=pipeline.rollout.temperature)


def optimizer_of(config: Config, pipeline: PipelineSection) -> OptimSettings:
    return OptimSettings(**pipeline.optimizer.model_dump(), seed=config.run.seed)


def device_of(name: str) -> torch.device:
    """`auto` is the GPU when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r}: {error}") from error


def device_at(config: Config, name: str, devices: Sequence[int], rank: int = 0) -> torch.device:
    """Where a process works that was given these devices. Unless a GPU is named, those of a pool are the GPUs in their
    order, as far as there are any; without a pool each rank takes one."""
    count = torch.cuda.device_count()
    if name not in ("auto", "cuda") or not count:
        return device_of(name)
    return torch.device("cuda", (devices[rank] if config.pool.devices else rank) % count)
