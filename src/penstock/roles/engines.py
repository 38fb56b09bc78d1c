"""From the user's configuration to what generates: the engine and the workload's five hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.config.run import PipelineSection
from penstock.envs.registry import find_reward, load
from penstock.envs.rewards import Rubric
from penstock.rollout.hooks import Workload
from penstock.rollout.io.gymnasium_workload import GymnasiumWorkload
from penstock.rollout.io.kept import KeptEpisodes
from penstock.rollout.io.language_workload import LanguageWorkload
from penstock.rollout.io.policy_engine import PolicyEngine
from penstock.rollout.io.torch_engine import TorchEngine
from penstock.train.model import ControlPolicy, LanguagePolicy


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
