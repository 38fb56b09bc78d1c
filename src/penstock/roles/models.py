"""From the user's configuration to the stages' own settings: environments, policies, losses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.config.check import environment_options
from penstock.config.run import Config, MlpModel, PathModel, PipelineSection, TinyModel
from penstock.envs.registry import find_reward, load, make_environment
from penstock.envs.rewards import Rubric
from penstock.errors import ConfigError, PenstockError
from penstock.rollout.hooks import Workload
from penstock.rollout.io.gymnasium_workload import GymnasiumWorkload
from penstock.rollout.io.kept import KeptEpisodes
from penstock.rollout.io.language_workload import LanguageWorkload
from penstock.rollout.io.policy_engine import PolicyEngine
from penstock.rollout.io.torch_engine import TorchEngine
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


def environment_of(config: Config, pipeline: PipelineSection) -> Any:
    """Builds the environment. What its own code raises is the user's to fix, so it becomes a `ConfigError`."""
    sys.path[:0] = [str(path) for path in config.run.extra_path]
    try:
        return make_environment(pipeline.env.name, environment_options(pipeline, config.run.seed))
    except PenstockError:
        raise
    except Exception as error:
        raise ConfigError(
            f"environment {pipeline.env.name!r} could not be made: {type(error).__name__}: {error}"
        ) from error


def policy_of(
    config: Config, pipeline: PipelineSection, environment: Any, device: str
) -> LanguagePolicy | ControlPolicy:
    """The initial policy: equal numbers in every process."""
    policy = build(_spec(config, pipeline, environment))
    policy.module.to(device_of(device))
    return policy


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


class ScoredEnvironment:
    """An environment whose rewards are checked, and replaced by the configured functions if there are any."""

    def __init__(self, environment: Any, pipeline: PipelineSection) -> None:
        functions = [find_reward(name) for name in pipeline.env.rewards] or [environment.score]
        self._environment = environment
        self._rubric = Rubric(functions, pipeline.env.reward_weights or None)

    def prompt(self, position: int) -> Any:
        return self._environment.prompt(position)

    def score(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        return self._rubric(prompts, completions, **columns)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)


def engine_of(
    policy: LanguagePolicy | ControlPolicy, seed: int, progressed: Callable[[], None]
) -> TorchEngine | PolicyEngine:
    """The engine that serves a policy. It has no digest yet: it may not serve before published weights are in."""
    if isinstance(policy, LanguagePolicy):
        return TorchEngine(policy.module, pad_id=policy.tokenizer.pad_id, seed=seed, progressed=progressed)
    return PolicyEngine(policy.module, seed=seed, progressed=progressed)


def workload_of(
    pipeline: PipelineSection,
    environment: Any,
    policy: LanguagePolicy | ControlPolicy,
    engine: TorchEngine | PolicyEngine,
    kept: Path,
) -> Workload[Any, Any, Any]:
    """The five hooks: the user's own class if one is named, else the built-in one that fits the environment.

    `kept` is where unfinished episodes of a worker that leaves wait for the next one.
    """
    if pipeline.rollout.workload is not None:
        return load(pipeline.rollout.workload)(environment, engine, policy)
    if isinstance(engine, PolicyEngine):
        return GymnasiumWorkload(environment, engine)
    assert isinstance(policy, LanguagePolicy)
    return LanguageWorkload(
        ScoredEnvironment(environment, pipeline),
        engine,
        policy.tokenizer,
        max_new_tokens=pipeline.rollout.max_new_tokens,
        temperature=pipeline.rollout.temperature,
        max_turns=pipeline.rollout.max_turns,
        kept=KeptEpisodes(kept),
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
